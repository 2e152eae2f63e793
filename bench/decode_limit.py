"""Measures `off` and scripted exits against bare `generate`, and against what is possible.

    python bench/decode_limit.py $(python scripts/weights.py) \\
        --out bench/results/decode_limit_smollm2.json
    python bench/decode_limit.py random-llama-2048x16 --new 16 --repeats 3 \\
        --out bench/results/decode_limit_random.json

The limit is what the bare run itself costs per layer, per head and per step, applied to the passes
that the profile needs: a layer call over n tokens costs what a bare layer call over n tokens costs,
and whatever a bare step spends outside layers and head is spent once per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import interleave, parser, quantiles, report
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import Place, ScriptedPolicy
from tide.models.fingerprint import Fingerprint

RANDOM = "random-llama-2048x16"


@contextmanager
def depth(model: Any, layers: int) -> Iterator[None]:
    """The bare model with its first layers only: what it saves is what the others cost."""
    whole = model.config.num_hidden_layers
    model.config.num_hidden_layers = layers
    try:
        yield
    finally:
        model.config.num_hidden_layers = whole


def seconds_of(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@torch.no_grad()
def by_size(model: Any, parts: Any, rows: int, context: int, sizes: list[int]) -> dict[int, Any]:
    """Seconds of a bare layer and of the head in a pass over n tokens per row."""
    n = model.config.num_hidden_layers
    ids = torch.randint(0, model.config.vocab_size, (rows, context + max(sizes)))
    cache = DynamicCache(config=model.config)
    model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
    found: dict[int, dict[str, list[float]]] = {size: {"layer": [], "head": []} for size in sizes}
    for _ in range(15):
        for size in sizes:
            new = ids[:, context : context + size]
            whole = seconds_of(lambda: model(new, past_key_values=cache, logits_to_keep=1))  # noqa: B023
            cache.crop(-size)
            with depth(model, n // 2):
                half = seconds_of(lambda: model(new, past_key_values=cache, logits_to_keep=1))  # noqa: B023
            for layer in cache.layers[: n // 2]:
                layer.crop(-size)
            state = torch.randn(rows, size, model.config.hidden_size, dtype=model.dtype)
            found[size]["layer"].append((whole - half) / (n - n // 2))
            found[size]["head"].append(seconds_of(lambda: parts.head(parts.norm(state))))  # noqa: B023
    return {
        size: {part: statistics.median(seconds) for part, seconds in of.items()}
        for size, of in found.items()
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


def needed_passes(
    script: Any, rows: int, prompt: int, new: int, half: int, n: int, cap: int
) -> list[tuple[int, int, int]]:
    """(lo, hi, tokens per row) of each pass that a profile needs: the mechanism, without the loop.

    Every token passes the first half. Where a row stays, or the ledge is full, all that waits
    passes the second half together.
    """
    passes, waiting = [], 0
    for position in range(prompt, prompt + new - 1):
        passes.append((0, half, 1))
        waiting += 1
        stays = not all(script(Place(row, position), 0) for row in range(rows))
        if stays or waiting == cap:
            passes.append((half, n, waiting))
            waiting = 0
    return passes


def limit(
    passes: list[tuple[int, int, int]], n: int, bare: dict[str, float], sizes: dict[int, Any],
    exits: int, steps: int,
) -> float:  # fmt: skip
    """Seconds that passes must take at the bare run's own rates; one head per token said."""
    seconds = steps * bare["step"]
    for lo, hi, size in passes:
        seconds += (hi - lo) * bare["layer"] * sizes[size]["layer"] / sizes[1]["layer"]
        seconds += bare["head"] if hi == n else 0.0
    return seconds + exits * bare["head"]


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
    parts, n = engines["off"].runner.parts, model.config.num_hidden_layers

    def half(**more: Any) -> None:
        with depth(model, n // 2):
            model.generate(ids, **{**kwargs, **more})

    sides: dict[str, Any] = {"bare": lambda: model.generate(ids, **kwargs), "half": half}
    for name, tide in engines.items():
        sides[name] = lambda tide=tide: tide.generate(ids, **kwargs)
    sides["prefill"] = lambda: model.generate(ids, **{**kwargs, "max_new_tokens": 1})
    sides["half prefill"] = lambda: half(max_new_tokens=1)
    seconds = interleave(sides, repeats, title)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    # Decoding alone: every side pays the same prefill.
    decode = {name: m - medians["prefill"] for name, m in medians.items() if name != "prefill"}
    decode["half"] += medians["prefill"] - medians["half prefill"]

    passes = {"off": [(0, n, 1)] * (new - 1)}
    for share in shares:
        script = ScriptedPolicy.share(share).script
        passes[f"exit {share:.0%}"] = needed_passes(
            script, rows, prompt, new, n // 2, n, TIDEConfig().max_pending
        )
    sizes = sorted({size for ps in passes.values() for _, _, size in ps} | {1})
    at = by_size(model, parts, rows, prompt + new // 2, sizes)
    # Bare runs of whole and half depth, in turn, give layer and step; no hook is in the way.
    costs = {
        "layer": (decode["bare"] - decode["half"]) / (new - 1) / (n - n // 2),
        "head": at[1]["head"],
    }
    costs["step"] = decode["bare"] / (new - 1) - n * costs["layer"] - costs["head"]
    out = []
    for name, tide in engines.items():
        depths = tide.last_stats.depths
        exits = sum(any(d[t] < n for d in depths) for t in range(new))
        least = limit(passes[name], n, costs, at, exits, new - 1)
        speedup, possible = decode["bare"] / decode[name], decode["bare"] / least
        out.append(
            {
                "profile": name,
                "speedup": round(speedup, 3),
                "limit": round(possible, 3),
                "reached": round(speedup / possible, 3),
                "layer_calls": tide.last_stats.layers_run,
                "layer_calls_needed": n + sum(hi - lo for lo, hi, _ in passes[name]),
                "layer_calls_full": tide.last_stats.layers_full,
                **quantiles(seconds[name]),
            }
        )
        print(f"{title}, {name}: {speedup:.3f}x of a possible {possible:.3f}x")
    return {
        "rows": rows,
        "bare": quantiles(seconds["bare"]),
        "bare_cost_ms": {part: round(1e3 * value, 3) for part, value in costs.items()},
        "cost_relative_to_one_token": {
            size: {part: round(value / at[1][part], 2) for part, value in of.items()}
            for size, of in at.items()
        },
        "profiles": out,
    }


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
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtype:
        kind = getattr(torch, dtype)
        if args.model == RANDOM:
            model = random_llama(kind)
        else:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=kind)
        for rows in args.rows:
            title = f"{dtype}, {rows} rows"
            row = measure(model, rows, args.new, args.prompt, args.repeats, title)
            results.append({"dtype": dtype, **row})
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
