"""Measures `off` and scripted exits against bare `generate`, and against what is possible.

    python bench/decode_limit.py $(python scripts/smollm2.py) \\
        --out bench/results/decode_limit.json

The limit is what the bare run itself costs per layer, per head and per step, applied to the passes
that the profile needs: a layer call over n tokens costs what a bare layer call over n tokens costs,
and whatever a bare step spends outside layers and head is spent once per token.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import Any

import torch
from measure import interleave, parser, quantiles, report
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy
from tide.models.fingerprint import Fingerprint


@contextmanager
def timed(modules: list[Any], seconds: list[float]) -> Any:
    """Add up the time inside some modules of a model."""
    began = [0.0]

    def before(*_: Any) -> None:
        began[0] = time.perf_counter()

    def after(*_: Any) -> None:
        seconds[0] += time.perf_counter() - began[0]

    handles = [m.register_forward_pre_hook(before) for m in modules]
    handles += [m.register_forward_hook(after) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def bare_costs(model: Any, parts: Any, rows: int, context: int, sizes: list[int]) -> dict[int, Any]:
    """Median seconds of one bare layer call and of the head, by tokens per row in the pass."""
    ids = torch.randint(0, model.config.vocab_size, (rows, context + max(sizes)))
    layer: dict[int, list[float]] = defaultdict(list)
    head: dict[int, list[float]] = defaultdict(list)
    cache = DynamicCache(config=model.config)
    model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
    for _ in range(12):
        for size in sizes:
            in_layers, in_head = [0.0], [0.0]
            with timed(list(parts.layers), in_layers), timed([parts.head], in_head):
                model(ids[:, context : context + size], past_key_values=cache)
            cache.crop(-size)
            layer[size].append(in_layers[0] / len(parts.layers))
            head[size].append(in_head[0])
    return {
        s: {"layer": statistics.median(layer[s]), "head": statistics.median(head[s])} for s in sizes
    }


def engine(model: Any, mode: str, share: float, rows: int) -> TIDE:
    """Exits at half depth by a script; identity heads, as their cost is the head's own."""
    n = model.config.num_hidden_layers
    checkpoint = Checkpoint(n // 2 - 1, ExitHead("identity", model.config.hidden_size))
    return TIDE(
        model,
        Artifact(Fingerprint("", "", ""), model.config.hidden_size, [checkpoint]),
        TIDEConfig(mode=mode, min_layers=0, drafts=()),
        policy=ScriptedPolicy.share(share),
        allow_mismatch=True,
        check=False,
    )


def limit(
    tide: TIDE, passes: list[tuple[int, int, int]], costs: dict[int, Any], per_step: float
) -> float:
    """Seconds that the decode passes of a run must take at the bare run's own rates."""
    n = tide.runner.n_layers
    seconds = 0.0
    for lo, hi, size in passes:
        at = costs[size]
        seconds += (hi - lo) * at["layer"]
        if hi == n:
            seconds += at["head"]
    exits = sum(tide.last_stats.exits_per_layer.values()) / len(tide.last_stats.depths)
    return seconds + exits * costs[1]["head"] + per_step * (tide.last_stats.rounds)


def measure(model: Any, rows: int, new: int, prompt: int, repeats: int, title: str) -> Any:
    """One model, dtype and batch: every side in turn."""
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt))
    kwargs = {
        "max_new_tokens": new, "min_new_tokens": None, "do_sample": False, "eos_token_id": None,
        "pad_token_id": 0, "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    shares = (0.3, 0.6, 0.9)
    engines = {"off": engine(model, "off", 0.0, rows)}
    engines |= {f"exit {share:.0%}": engine(model, "exit", share, rows) for share in shares}
    sides: dict[str, Any] = {"bare": lambda: model.generate(ids, **kwargs)}
    for name, tide in engines.items():
        sides[name] = lambda tide=tide: tide.generate(ids, **kwargs)
    sides["prefill"] = lambda: model.generate(ids, **{**kwargs, "max_new_tokens": 1})
    seconds = interleave(sides, repeats, title)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    # Decoding alone: every side pays the same prefill.
    decode = {name: m - medians["prefill"] for name, m in medians.items() if name != "prefill"}

    some = engines["off"]
    passes: dict[str, list[tuple[int, int, int]]] = {}
    for name, tide in engines.items():
        passes[name] = record_passes(tide, lambda tide=tide: tide.generate(ids, **kwargs))
    sizes = sorted({size for ps in passes.values() for _, _, size in ps} | {1})
    costs = bare_costs(model, some.runner.parts, rows, prompt + new // 2, sizes)
    n = some.runner.n_layers
    per_step = decode["bare"] / (new - 1) - n * costs[1]["layer"] - costs[1]["head"]
    out = []
    for name, tide in engines.items():
        least = limit(tide, passes[name], costs, per_step)
        speedup, possible = decode["bare"] / decode[name], decode["bare"] / least
        out.append(
            {
                "profile": name,
                "speedup": round(speedup, 3),
                "limit": round(possible, 3),
                "reached": round(speedup / possible, 3),
                "layer_calls": tide.last_stats.layers_run,
                "layer_calls_full": tide.last_stats.layers_full,
                **quantiles(seconds[name]),
            }
        )
        print(f"{title}, {name}: {speedup:.3f}x of a possible {possible:.3f}x")
    return {
        "rows": rows,
        "bare": quantiles(seconds["bare"]),
        "per_step_overhead_ms": round(1e3 * per_step, 3),
        "bare_costs_ms": {
            s: {part: round(1e3 * value, 4) for part, value in c.items()} for s, c in costs.items()
        },
        "profiles": out,
    }


def record_passes(tide: TIDE, run: Any) -> list[tuple[int, int, int]]:
    """(lo, hi, tokens per row) of every decode pass of a run; the prefill is left out."""
    passes = []
    whole = tide.runner.run

    def spy(input_ids: Any, lo: int, hi: int, **kwargs: Any) -> Any:
        passes.append((lo, hi, input_ids.shape[1]))
        return whole(input_ids, lo, hi, **kwargs)

    tide.runner.run = spy  # type: ignore[method-assign]
    try:
        run()
    finally:
        del tide.runner.run
    return passes[1:]


def random_llama(dtype: torch.dtype) -> Any:
    """A random llama of hidden 2048 with 16 layers."""
    config = AutoConfig.for_model(
        "llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=16,
        num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    options.add_argument("--new", type=int, default=64, help="tokens generated")
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--no-random", action="store_true", help="leave out the random llama")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for name in (args.model, None) if not args.no_random else (args.model,):
        for dtype in args.dtype:
            kind = getattr(torch, dtype)
            if name is None:
                model, label = random_llama(kind), "random llama 2048 x 16"
            else:
                model, label = AutoModelForCausalLM.from_pretrained(name, dtype=kind), "given model"
            for rows in args.rows:
                title = f"{label}, {dtype}, {rows} rows"
                row = measure(model, rows, args.new, args.prompt, args.repeats, title)
                results.append({"model": label, "dtype": dtype, **row})
    report(
        "decode speed of off and of scripted exits at half depth, against bare generate",
        args,
        results,
        new_tokens=args.new,
        prompt_tokens=args.prompt,
        repeats=args.repeats,
    )


if __name__ == "__main__":
    main()
