"""Measures lossless decoding on real weights against bare `generate` and prompt lookup.

    TIDE_DATA=... python bench/lossless.py $(python scripts/weights.py) --artifact DIR \\
        --out bench/results/lossless.json

Transformers' prompt lookup guesses 10 tokens whenever it finds a match; ours chooses the length by
what it has paid so far, also on earlier prompts. With `--artifact`, once more with its table.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from measure import parser, race, report, spec_bench
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.bench.race import Entrants
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact


def first_difference(model: Any, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any] | None:
    """Where two outputs part, and how near a tie that was for the plain model."""
    length = min(ours.shape[1], theirs.shape[1])
    differs = (ours[0, :length] != theirs[0, :length]).nonzero()
    if not len(differs):
        return None
    at = int(differs[0])
    with torch.no_grad():
        top = model(theirs[:, :at]).logits[0, -1].float().topk(2).values
    return {"at": at, "logit_gap": round(float(top[0] - top[1]), 4)}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--prompts", type=int, default=48)
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--artifact", type=Path, help="an artifact whose table is used as well")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    plain = {"max_new_tokens": args.new, "do_sample": False}
    made = Artifact.load(args.artifact) if args.artifact else None
    drafts = {
        "context": ("context",),
        **({"context + table": ("context", "table")} if made else {}),
    }
    engines = {
        name: TIDE(model, made, TIDEConfig(mode="lossless", drafts=sources))
        for name, sources in drafts.items()
    }
    sides: dict[str, Any] = {
        "bare": lambda batch: model.generate(**batch, **plain),
        "prompt lookup": lambda batch: model.generate(
            **batch, **plain, prompt_lookup_num_tokens=10
        ),
    }
    ours = Entrants(engines, plain)
    sides |= ours.sides
    identical = dict.fromkeys(sides, 0)
    gaps: list[float] = []

    def after(out: dict[str, torch.Tensor]) -> None:
        ours.add()
        for name in sides:
            difference = first_difference(model, out[name], out["bare"])
            identical[name] += difference is None
            if difference is not None:
                gaps.append(difference["logit_gap"])

    questions = spec_bench(args.prompts)
    rows = race(sides, tokenizer, questions, after)
    for row in rows:
        name = row["side"]
        row["identical_outputs"] = f"{identical[name]} of {len(questions)}"
        if name in engines:
            row["tokens_per_pass"] = round(
                row["tokens"] * model.config.num_hidden_layers / ours.counted(name)["layers_run"], 3
            )
    report(
        "lossless decoding of Spec-Bench prompts at batch 1, against bare generate",
        args,
        {
            "sides": rows,
            "logit_gap_where_outputs_part": {
                "count": len(gaps),
                "median": round(statistics.median(gaps), 4) if gaps else None,
                "largest": max(gaps, default=None),
            },
        },
        dtype=args.dtype,
        prompts=args.prompts,
        new_tokens=args.new,
        table_tokens=made.record["tokens"]["fit"] if made else 0,
    )


if __name__ == "__main__":
    main()
