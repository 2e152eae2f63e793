"""Measures early exit with calibrated gates on real weights against bare `generate`.

    TIDE_DATA=... python bench/exits.py $(python scripts/weights.py) DIR \\
        --out bench/results/exits.json

The audit counts every early token: each row ends with a deep pass over what still waits, which is
part of the time. With `--boldness 0.125 0.5 1 2 6 --sides "exits and drafts"` it gives the curve of
risk and speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from measure import parser, race, report, spec_bench
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.bench.race import Entrants
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact

SIDES: dict[str, tuple[str, ...]] = {"exits": (), "exits and drafts": ("context", "table")}


def measure(model: Any, tokenizer: Any, made: Artifact, questions: Any, args: Any) -> Any:
    """All sides over all prompts, in one dtype."""
    plain = {"max_new_tokens": args.new, "do_sample": False}
    lossless = TIDEConfig(mode="lossless", drafts=("context", "table"))
    engines = {"lossless": TIDE(model, made, lossless, check=False)}
    boldness: dict[str, float] = {}
    for side in args.sides:
        for bold in args.boldness:
            name = side if args.boldness == [1.0] else f"{side}, boldness {bold:g}"
            config = TIDEConfig(
                exit_threshold=None, min_layers=0, drafts=SIDES[side], audit_tail=True
            )
            engines[name] = TIDE(model, made, config, boldness=bold, check=False)
            boldness[name] = bold
    ours = Entrants(engines, plain)
    sides: dict[str, Any] = {"bare": lambda batch: model.generate(**batch, **plain), **ours.sides}
    rows = race(sides, tokenizer, questions, ours.add)
    for row in rows:
        if count := ours.counts.get(row["side"]):
            row |= count | {"boldness": boldness.get(row["side"])}
            row["exit_rate"] = round(count["exited_tokens"] / count["total_tokens"], 4)
            # Over all tokens, as risk is counted; not over the early ones alone.
            row["disagreement"] = round(count["differed"] / count["total_tokens"], 4)
            row["layer_calls_saved"] = round(1 - count["layers_run"] / count["layers_full"], 4)
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    options.add_argument("--prompts", type=int, default=48)
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--boldness", type=float, nargs="+", default=[1.0])
    options.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    made = Artifact.load(args.artifact)
    results = []
    for dtype in args.dtype:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype))
        sides = measure(model, tokenizer, made, spec_bench(args.prompts), args)
        results.append({"dtype": dtype, "sides": sides})
    report(
        "early exit on Spec-Bench prompts at batch 1, against bare generate",
        args,
        results,
        prompts=args.prompts,
        new_tokens=args.new,
        chosen_for_risk=made.record["risk"],
        exits_after=[checkpoint.layer + 1 for checkpoint in made.checkpoints],
        calibrated_in=made.record["dtype"],
    )


if __name__ == "__main__":
    main()
