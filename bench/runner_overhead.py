"""The cost of the depth runner: decoding at full depth, against the model's own forward pass.

    python bench/runner_overhead.py $(python scripts/weights.py) \\
        --out bench/results/runner_overhead.json

Both methods decode the same tokens after the same prompt, in blocks that alternate in one process.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from measure import parser, quantiles, report
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

from tide.models.attach import attach
from tide.models.tokens import TokenBatch


@torch.no_grad()
def measure(model: Any, batch: int, prompt: int, steps: int, blocks: int) -> dict[str, Any]:
    """Time per token of both methods, from `blocks` alternating blocks of `steps` tokens."""
    runner = attach(model, check=False)
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt + steps))
    times: dict[str, list[float]] = {"baseline": [], "runner": []}
    for block in track(range(blocks + 1), description=f"batch {batch}"):
        for name, seconds in times.items():
            if name == "baseline":
                cache: Any = DynamicCache(config=model.config)
            else:
                cache = runner.new_cache(batch)

            def step(new: torch.Tensor, name: str = name, cache: Any = cache) -> Any:
                if name == "baseline":
                    return model(new, past_key_values=cache, use_cache=True).logits
                return runner.logits(runner.run(TokenBatch(new), 0, runner.n_layers, cache=cache))

            step(ids[:, :prompt])
            for t in range(prompt, prompt + steps):
                began = time.perf_counter()
                step(ids[:, t : t + 1])
                if block:  # the first block warms up
                    seconds.append(time.perf_counter() - began)
    ratio = statistics.median(times["runner"]) / statistics.median(times["baseline"])
    return {
        "batch": batch,
        "ratio": round(ratio, 4),
        **{name: quantiles(seconds) for name, seconds in times.items()},
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    options.add_argument("--prompt", type=int, default=128, help="tokens before timing")
    options.add_argument("--steps", type=int, default=32, help="tokens per block")
    options.add_argument("--blocks", type=int, default=12, help="blocks of each method")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtype:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        for batch in args.batch:
            row = measure(model, batch, args.prompt, args.steps, args.blocks)
            results.append({"dtype": dtype, **row})
            print(f"{dtype}, batch {batch}: {row['ratio']:.3f} x the HF forward pass")
    report(
        "one-token decoding at full depth: runner / model(...) with a DynamicCache",
        args,
        results,
        prompt_tokens=args.prompt,
        steps_per_block=args.steps,
        blocks=args.blocks,
    )


if __name__ == "__main__":
    main()
