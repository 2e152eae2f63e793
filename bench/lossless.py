"""A benchmark of lossless decoding on real weights, against HF generate and prompt lookup.

    TIDE_DATA=... python bench/lossless.py $(python scripts/weights.py) --artifact DIR \\
        --out bench/results/lossless.json

Transformers' prompt lookup drafts 10 tokens whenever it finds a match; TIDE chooses the length by
the drafts accepted so far, also on earlier prompts. With `--artifact`, it also drafts from the
artifact's table. With `--assistant`, transformers' assisted generation drafts by a smaller model,
as many tokens as it chooses by default.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from measure import compare, parser, report, spec_bench
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.bench.compare import BASELINE, EngineMethods
from tide.calibration.data import load_prompts
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact


def first_difference(model: Any, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any] | None:
    """Where two outputs diverge, and how close to a tie the model's own logits are there."""
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
    options.add_argument("--assistant", type=Path, help="a smaller model with the same tokenizer")
    options.add_argument("--data", help="prompts, as tide calibrate takes them, for Spec-Bench's")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    greedy = {"max_new_tokens": args.new, "do_sample": False}
    made = Artifact.load(args.artifact) if args.artifact else None
    drafts = {
        "context": ("context",),
        **({"context + table": ("context", "table")} if made else {}),
    }
    engines = {
        name: TIDE(model, made, TIDEConfig(mode="lossless", drafts=sources))
        for name, sources in drafts.items()
    }
    methods: dict[str, Any] = {
        BASELINE: lambda batch: model.generate(**batch, **greedy),
        "prompt lookup": lambda batch: model.generate(
            **batch, **greedy, prompt_lookup_num_tokens=10
        ),
    }
    if args.assistant:
        small = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=model.dtype)
        methods["assisted generation"] = lambda batch: model.generate(
            **batch, **greedy, assistant_model=small
        )
    ours = EngineMethods(engines, greedy)
    methods |= ours.methods
    exact = dict.fromkeys(methods, 0)
    gaps: list[float] = []

    def after(out: dict[str, torch.Tensor]) -> None:
        ours.add()
        for name in methods:
            difference = first_difference(model, out[name], out[BASELINE])
            exact[name] += difference is None
            if difference is not None:
                gaps.append(difference["logit_gap"])

    if args.data:
        questions = [
            {"text": prompt.text, "category": prompt.category}
            for prompt in load_prompts(args.data, args.prompts)
        ]
    else:
        questions = spec_bench(args.prompts)
    rows = compare(methods, tokenizer, questions, after)
    for row in rows:
        name = row["method"]
        row["exact_match_outputs"] = f"{exact[name]} of {len(questions)}"
        if name in engines:
            row["tokens_per_pass"] = round(
                row["tokens"] * model.config.num_hidden_layers / ours.counted(name)["layers_run"], 3
            )
    report(
        "lossless decoding at batch 1, against HF generate",
        args,
        {
            "methods": rows,
            "logit_gap_where_outputs_diverge": {
                "count": len(gaps),
                "median": round(statistics.median(gaps), 4) if gaps else None,
                "largest": max(gaps, default=None),
            },
        },
        dtype=args.dtype,
        prompts=args.prompts,
        new_tokens=args.new,
        table_tokens=made.record["tokens"]["fit"] if made else 0,
        **({"assistant": args.assistant.name} if args.assistant else {}),
        data=Path(args.data).stem if args.data else "Spec-Bench",
    )


if __name__ == "__main__":
    main()
