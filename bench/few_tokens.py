"""What the linear maps of a model cost by the number of tokens: by torch, and with ours.

    python bench/few_tokens.py MODEL --out bench/results/few_tokens_qwen2_5_coder_0_5b.json

Every linear map of the model, the head too, of the same tokens, one after the other as in a pass;
so their weights come from memory, as they do there. Both ways in turn.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from measure import interleave, parser, report
from torch import nn
from transformers import AutoModelForCausalLM

from tide.kernels.linear import operator

TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)


@torch.no_grad()
def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--repeats", type=int, default=10)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    maps = [module for module in model.modules() if isinstance(module, nn.Linear)]
    ours = operator()
    if ours is None:
        raise SystemExit("There is no compiler here, or torch's own linear maps are as fast.")
    ways = {"torch": nn.functional.linear, "tide": ours}
    results: dict[str, dict[str, float]] = {}
    for tokens in TOKENS:
        states = {m.in_features: torch.randn(1, tokens, m.in_features) for m in maps}
        seconds = interleave(
            {name: partial(apply, way, maps, states) for name, way in ways.items()},
            args.repeats,
            f"{tokens} tokens",
        )
        results[str(tokens)] = {
            f"{name}_ms": round(1e3 * statistics.median(times), 2)
            for name, times in seconds.items()
        }
    report("linear maps by tokens", args, results, dtype="float32", repeats=args.repeats)


def apply(way: Any, maps: list[nn.Linear], states: dict[int, torch.Tensor]) -> None:
    """Run every map of the model once."""
    for module in maps:
        way(states[module.in_features], module.weight, module.bias)


if __name__ == "__main__":
    main()
