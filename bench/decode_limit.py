"""Mode "off" and scripted exits against HF generate, and against the ideal speed-up.

    python bench/decode_limit.py $(python scripts/weights.py) \\
        --out bench/results/decode_limit_smollm2.json
    python bench/decode_limit.py random-llama-2048x16 --new 16 --repeats 3 \\
        --out bench/results/decode_limit_random.json

The ideal speed-up applies the baseline's own cost per layer, per LM head and per step to the passes
that an exit schedule needs: a layer call over n tokens costs as much as in the baseline, and what a
baseline step spends outside layers and head is spent once per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from measure import interleave, parser, quantiles, report
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy, TokenPosition
from tide.models.fingerprint import Fingerprint

RANDOM = "random-llama-2048x16"


@contextmanager
def depth(model: Any, layers: int) -> Iterator[None]:
    """The model with its first layers only: what it saves is what the others cost."""
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
def by_size(model: Any, parts: Any, batch: int, context: int, sizes: list[int]) -> dict[int, Any]:
    """Seconds of an HF layer and of the LM head in a pass over n tokens per sequence."""
    n = model.config.num_hidden_layers
    ids = torch.randint(0, model.config.vocab_size, (batch, context + max(sizes)))
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
            state = torch.randn(batch, size, model.config.hidden_size, dtype=model.dtype)
            found[size]["layer"].append((whole - half) / (n - n // 2))
            found[size]["head"].append(seconds_of(lambda: parts.head(parts.norm(state))))  # noqa: B023
    return {
        size: {part: statistics.median(seconds) for part, seconds in of.items()}
        for size, of in found.items()
    }


def engine(model: Any, mode: str, share: float) -> TIDE:
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


@dataclass(frozen=True)
class Run:
    """What is generated: sequences in the batch, tokens of a prompt, new tokens."""

    batch: int
    prompt: int
    new: int


def needed_passes(script: Any, run: Run, n: int, max_pending: int) -> list[tuple[int, int, int]]:
    """(lo, hi, tokens per sequence) of each pass that an exit schedule needs.

    Every token passes the first half. Where a sequence continues, or as many tokens are pending as
    may be, all pending tokens pass the second half together.
    """
    passes, pending = [], 0
    for position in range(run.prompt, run.prompt + run.new - 1):
        passes.append((0, n // 2, 1))
        pending += 1
        exits = all(script(TokenPosition(sequence, position), 0) for sequence in range(run.batch))
        if not exits or pending == max_pending:
            passes.append((n // 2, n, pending))
            pending = 0
    return passes


@dataclass(frozen=True)
class Costs:
    """Seconds of one baseline step over one token: in a layer, in the LM head, outside of both.

    Attributes:
        by_size: seconds of a layer and the LM head, by the number of tokens in a pass.
    """

    layer: float
    head: float
    step: float
    by_size: dict[int, dict[str, float]]

    def seconds(
        self, passes: list[tuple[int, int, int]], n: int, *, exits: int, steps: int
    ) -> float:
        """Seconds of the passes at the baseline's own rates; one LM head per generated token."""
        total = steps * self.step + exits * self.head
        for lo, hi, size in passes:
            total += (hi - lo) * self.layer * self.by_size[size]["layer"] / self.by_size[1]["layer"]
            total += self.head if hi == n else 0.0
        return total


def measure(model: Any, run: Run, repeats: int, title: str) -> Any:
    """One model, dtype and batch size: every method in turn."""
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (run.batch, run.prompt))
    kwargs = {
        "max_new_tokens": run.new, "min_new_tokens": None, "do_sample": False, "eos_token_id": None,
        "pad_token_id": 0, "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    shares = (0.3, 0.6, 0.9)
    engines = {"off": engine(model, "off", 0.0)}
    engines |= {f"exit {share:.0%}": engine(model, "exit", share) for share in shares}
    parts, n = engines["off"].runner.parts, model.config.num_hidden_layers

    def half(**more: Any) -> None:
        with depth(model, n // 2):
            model.generate(ids, **{**kwargs, **more})

    methods: dict[str, Any] = {"baseline": lambda: model.generate(ids, **kwargs), "half": half}
    for name, tide in engines.items():
        methods[name] = lambda tide=tide: tide.generate(ids, **kwargs)
    methods["prefill"] = lambda: model.generate(ids, **{**kwargs, "max_new_tokens": 1})
    methods["half prefill"] = lambda: half(max_new_tokens=1)
    seconds = interleave(methods, repeats, title)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    # Decoding alone: every method pays the same prefill.
    decode = {name: m - medians["prefill"] for name, m in medians.items() if name != "prefill"}
    decode["half"] += medians["prefill"] - medians["half prefill"]

    passes = {"off": [(0, n, 1)] * (run.new - 1)}
    for share in shares:
        script = ScriptedPolicy.share(share).script
        passes[f"exit {share:.0%}"] = needed_passes(script, run, n, TIDEConfig().max_pending)
    sizes = sorted({size for ps in passes.values() for _, _, size in ps} | {1})
    at = by_size(model, parts, run.batch, run.prompt + run.new // 2, sizes)
    # Baseline runs at full and half depth, in turn, give layer and step; no hook is in the way.
    layer = (decode["baseline"] - decode["half"]) / (run.new - 1) / (n - n // 2)
    head = at[1]["head"]
    costs = Costs(layer, head, decode["baseline"] / (run.new - 1) - n * layer - head, at)
    out = []
    for name, tide in engines.items():
        depths = tide.last_stats.depths
        exits = sum(any(d[t] < n for d in depths) for t in range(run.new))
        least = costs.seconds(passes[name], n, exits=exits, steps=run.new - 1)
        speedup, ideal = decode["baseline"] / decode[name], decode["baseline"] / least
        out.append(
            {
                "exit_schedule": name,
                "speedup": round(speedup, 3),
                "ideal_speedup": round(ideal, 3),
                "share_of_ideal": round(speedup / ideal, 3),
                "layer_calls": tide.last_stats.layers_run,
                "layer_calls_needed": n + sum(hi - lo for lo, hi, _ in passes[name]),
                "layer_calls_full": tide.last_stats.layers_full,
                **quantiles(seconds[name]),
            }
        )
        print(f"{title}, {name}: {speedup:.3f}x of an ideal {ideal:.3f}x")
    return {
        "batch": run.batch,
        "baseline": quantiles(seconds["baseline"]),
        "baseline_cost_ms": {
            part: round(1e3 * getattr(costs, part), 3) for part in ("layer", "head", "step")
        },
        "cost_relative_to_one_token": {
            size: {part: round(value / at[1][part], 2) for part, value in of.items()}
            for size, of in at.items()
        },
        "exit_schedules": out,
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
    options.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    options.add_argument("--new", type=int, default=64, help="new tokens")
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtype:
        if args.model == RANDOM:
            model = random_llama(getattr(torch, dtype))
        else:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype))
        for batch in args.batch:
            run = Run(batch, args.prompt, args.new)
            row = measure(model, run, args.repeats, f"{dtype}, batch {batch}")
            results.append({"dtype": dtype, **row})
    report(
        "decode speed of off and of scripted exits at half depth, against HF generate",
        args,
        results,
        new_tokens=args.new,
        prompt_tokens=args.prompt,
        repeats=args.repeats,
    )


if __name__ == "__main__":
    main()
