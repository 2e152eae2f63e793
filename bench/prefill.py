"""Prompts with exits: what `prefill_exit` saves, and what it does to the tokens that follow.

    TIDE_DATA=... python bench/prefill.py MODEL DIR --out bench/results/prefill.json

Prompts are the beginnings of stretches of WikiText-2 (test). Each is run at full depth and, for
each scale of the calibrated thresholds, with exits, in turn. The tokens that follow are the model's
own, greedy; after a prompt with exits they are run at full depth in one pass, each after the
model's own ones, so what differs is due to the prompt alone.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import parser, report
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.config import TIDEConfig
from tide.decode.exits import make_exits
from tide.decode.prefill import PrefillWithExits
from tide.exits.artifact import Artifact
from tide.models.attach import attach
from tide.models.cache import WaterlineCache
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch

FULL = "full depth"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    options.add_argument("--prompts", type=int, default=8, help="of each length")
    options.add_argument("--new", type=int, default=32, help="tokens that follow")
    options.add_argument("--threshold-scale", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    options.add_argument("--dtype", default="float32")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    runner, made = attach(model.eval()), Artifact.load(args.artifact)
    prefills: dict[str, Prefill] = {FULL: at_full_depth(runner)}
    for scale in args.threshold_scale:
        prefills[f"{scale:g}"] = with_exits(runner, made, scale)
    ids = text_ids(tokenizer)
    results = []
    for length in args.lengths:
        stride = max(1, (len(ids) - length) // args.prompts)
        prompts = [ids[None, k * stride : k * stride + length] for k in range(args.prompts)]
        results += compare(runner, prefills, prompts, args.new)
    report(
        "prompts with exits", args, results, dtype=args.dtype, prompts=args.prompts,
        new_tokens=args.new, calibration_tokens=made.record["tokens"]["fit"],
    )  # fmt: skip


def text_ids(tokenizer: Any) -> Tensor:
    """The test split of WikiText-2 as token ids."""
    path = Path(os.environ.get("TIDE_DATA", "")) / "wikitext2" / "test.raw.gz"
    if not path.exists():
        raise SystemExit("Set TIDE_DATA to a folder that has wikitext2/test.raw.gz.")
    with gzip.open(path, "rt") as file:
        return torch.tensor(tokenizer(file.read(), verbose=False).input_ids)


# From a prompt and an empty cache to the state of the last token and the layers that ran for each.
Prefill = Callable[[Tensor, WaterlineCache], tuple[Tensor, float]]


def at_full_depth(runner: DepthRunner) -> Prefill:
    """As without exits."""

    def run(ids: Tensor, cache: WaterlineCache) -> tuple[Tensor, float]:
        states = runner.run(TokenBatch(ids), 0, runner.n_layers, cache=cache)
        return states[:, -1], runner.n_layers

    return run


def with_exits(runner: DepthRunner, made: Artifact, scale: float) -> Prefill:
    """With calibrated exits."""
    config = TIDEConfig(
        mode="exit", kv_cache_strategy="propagate", prefill_exit=True,
        min_layers=made.config.min_layers, exit_threshold=None,
    )  # fmt: skip
    exits = make_exits(runner, made, scale, None, config)

    def run(ids: Tensor, cache: WaterlineCache) -> tuple[Tensor, float]:
        found = PrefillWithExits(runner, exits, config, cache).run(TokenBatch(ids), [0])
        return found.last, float(found.depths.float().mean())

    return run


@torch.no_grad()
def compare(
    runner: DepthRunner, prefills: dict[str, Prefill], prompts: list[Tensor], new: int
) -> list[dict[str, Any]]:
    """Seconds, depth and disagreement of each way, on prompts of one length."""
    length = prompts[0].shape[1]
    seconds: dict[str, list[float]] = {name: [] for name in prefills}
    depths: dict[str, list[float]] = {name: [] for name in prefills}
    differs: dict[str, list[float]] = {name: [] for name in prefills}
    runner.model.generation_config.eos_token_id = None  # as many tokens as asked for
    for name in prefills:  # to warm up
        prefills[name](prompts[0], runner.new_cache(1))
    for prompt in track(prompts, description=f"{length} tokens"):
        follows = runner.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new
        )[:, length:]  # fmt: skip
        for name, prefill in prefills.items():
            cache = runner.new_cache(1)
            began = time.perf_counter()
            last, depth = prefill(prompt, cache)
            first = runner.logits(last)
            seconds[name].append(time.perf_counter() - began)
            depths[name].append(depth)
            states = runner.run(TokenBatch(follows[:, :-1]), 0, runner.n_layers, cache=cache)
            found = torch.cat([first, runner.logits(states[0])]).argmax(-1)
            differs[name].append(float((found != follows[0]).float().mean()))
    return [
        {
            "prompt": length, "thresholds": name, "seconds": round(median(seconds[name]), 4),
            "speedup": round(median(seconds[FULL]) / median(seconds[name]), 3),
            "depth": round(sum(depths[name]) / len(prompts) / runner.n_layers, 4),
            "disagreement": round(sum(differs[name]) / len(prompts), 4),
            "prompts_that_differ": sum(d > 0 for d in differs[name]),
        }
        for name in prefills
    ]  # fmt: skip


if __name__ == "__main__":
    main()
