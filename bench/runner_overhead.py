"""Measures what the depth runner costs: decoding at full depth against the bare model call.

    python bench/runner_overhead.py $(python scripts/smollm2.py) \\
        --out bench/results/runner_overhead.json

Both sides decode the same tokens after the same prompt, in blocks that alternate within one
process.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

import tide
from tide.models.depth import DepthRunner


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=10)
    return {f"p{p}_ms": round(1e3 * cuts[p // 10 - 1], 4) for p in (20, 50, 80)}


@torch.no_grad()
def measure(model: Any, rows: int, prompt: int, steps: int, blocks: int) -> dict[str, Any]:
    """Time per token of both sides, from `blocks` alternating blocks of `steps` tokens."""
    runner = DepthRunner(model)
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt + steps))

    def bare() -> Callable[[torch.Tensor], torch.Tensor]:
        cache = DynamicCache(config=model.config)
        return lambda new: model(new, past_key_values=cache, use_cache=True).logits

    def through_runner() -> Callable[[torch.Tensor], torch.Tensor]:
        cache = runner.new_cache(rows)
        return lambda new: runner.logits(runner.run(new, 0, runner.n_layers, cache=cache))

    times: dict[str, list[float]] = {"bare": [], "runner": []}
    for block in track(range(blocks + 1), description=f"{rows} rows"):
        for name, start in (("bare", bare), ("runner", through_runner)):
            with runner if name == "runner" else torch.no_grad():
                step = start()
                step(ids[:, :prompt])
                for t in range(prompt, prompt + steps):
                    begin = time.perf_counter()
                    step(ids[:, t : t + 1])
                    if block:  # the first block warms up
                        times[name].append(time.perf_counter() - begin)
    ratio = statistics.median(times["runner"]) / statistics.median(times["bare"])
    return {
        "rows": rows,
        "ratio": round(ratio, 4),
        **{name: quantiles(t) for name, t in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model folder or hub id")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens in the cache before timing")
    parser.add_argument("--steps", type=int, default=32, help="tokens per block")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtype:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        for rows in args.rows:
            results.append(
                {"dtype": dtype, **measure(model, rows, args.prompt, args.steps, args.blocks)}
            )
            print(f"{dtype}, {rows} rows: {results[-1]['ratio']:.3f} x the bare model call")
    report = {
        "what": "one-token decoding at full depth: runner / model(...) with a DynamicCache",
        "conditions": {
            "model": Path(args.model).name,
            "prompt_tokens": args.prompt,
            "steps_per_block": args.steps,
            "blocks": args.blocks,
            "threads": args.threads,
            "device": "cpu",
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tide": tide.__version__,
        },
        "results": results,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
