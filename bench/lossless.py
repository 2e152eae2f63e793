"""Measures lossless decoding on real weights against bare `generate` and prompt lookup.

    TIDE_DATA=... python bench/lossless.py $(python scripts/smollm2.py) \\
        --out bench/results/lossless.json

Every prompt goes through every side in turn, in one process; who goes first changes. With
`--table N`, a table of continuations is first made from the model's own answers to N other prompts
(GSM8K train and WikiText-2). Transformers' prompt lookup guesses 10 tokens whenever it finds a
match; ours chooses the length by what it has paid so far, also on earlier prompts.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import parser, report, spec_bench
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.models.fingerprint import Fingerprint


def chat(tokenizer: Any, texts: list[str]) -> Any:
    """Prompts through the tokenizer's template, left-padded."""
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def other_prompts(count: int) -> list[str]:
    """Prompts of other sources than Spec-Bench's own use of them: GSM8K train, in order."""
    data = Path(os.environ["TIDE_DATA"])
    lines = (data / "gsm8k" / "train.jsonl").read_text().splitlines()
    maths = [json.loads(line)["question"] for line in lines[: (count + 1) // 2]]
    text = _wikitext(data)
    asks = [f"Continue this text:\n{part}" for part in text[: count // 2]]
    return [prompt for pair in zip(maths, asks, strict=False) for prompt in pair][:count]


def _wikitext(data: Path) -> list[str]:
    import gzip

    with gzip.open(data / "wikitext2" / "train.raw.gz", "rt") as file:
        return [line.strip()[:200] for line in file if len(line) > 300]


def answers(model: Any, tokenizer: Any, texts: list[str], new: int) -> list[list[int]]:
    """The model's own answers, half greedy and half sampled, in batches."""
    out: list[list[int]] = []
    torch.manual_seed(0)
    for start in track(range(0, len(texts), 16), description="answers for the table"):
        batch = chat(tokenizer, texts[start : start + 16])
        sample = bool(start // 16 % 2)
        options = {"do_sample": sample, **({"temperature": 0.7} if sample else {})}
        ids = model.generate(**batch, max_new_tokens=new, **options)
        for row in ids[:, batch["input_ids"].shape[1] :].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else None
            out.append(row[:end])
    return out


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
    options.add_argument("--table", type=int, default=0, metavar="N", help="prompts for the table")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    hidden = model.config.hidden_size
    plain = {"max_new_tokens": args.new, "do_sample": False}
    context = TIDE(model, config=TIDEConfig(mode="lossless", drafts=("context",)))
    sides: dict[str, Any] = {
        "bare": lambda batch: model.generate(**batch, **plain),
        "prompt lookup": lambda batch: model.generate(
            **batch, **plain, prompt_lookup_num_tokens=10
        ),
        "context": lambda batch: context.generate(**batch, **plain),
    }
    engines = {"context": context}
    table_tokens = 0
    if args.table:
        said = answers(model, tokenizer, other_prompts(args.table), 160)
        table_tokens = sum(map(len, said))
        tensors = build_table(said, model.config.vocab_size)
        with_table = Artifact(Fingerprint("", "", ""), hidden, table=tensors)
        both = TIDE(
            model, with_table, TIDEConfig(mode="lossless", drafts=("context", "table")),
            allow_mismatch=True,
        )  # fmt: skip
        sides["context + table"] = lambda batch: both.generate(**batch, **plain)
        engines["context + table"] = both

    questions = spec_bench(args.prompts)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = dict.fromkeys(sides, 0)
    calls = dict.fromkeys(engines, 0)
    identical = dict.fromkeys(sides, 0)
    gaps: list[float] = []
    for turn in track(range(-1, len(questions)), description="prompts"):
        batch = chat(tokenizer, [questions[max(turn, 0)]["text"]])
        given = batch["input_ids"].shape[1]
        out: dict[str, torch.Tensor] = {}
        order = list(sides)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            began = time.perf_counter()
            out[name] = sides[name](batch)
            if turn >= 0:  # the first goes round once more than the others, to warm up
                seconds[name].append(time.perf_counter() - began)
                tokens[name] += out[name].shape[1] - given
        if turn < 0:
            continue
        for name, tide in engines.items():
            calls[name] += tide.last_stats.layers_run
        for name in sides:
            difference = first_difference(model, out[name], out["bare"])
            identical[name] += difference is None
            if difference is not None:
                gaps.append(difference["logit_gap"])
    per_token = {name: sum(seconds[name]) / tokens[name] for name in sides}
    rows = []
    for name in sides:
        ratios = [b / s for b, s in zip(seconds["bare"], seconds[name], strict=True)]
        by_category: dict[str, list[float]] = {}
        for question, ratio in zip(questions, ratios, strict=True):
            by_category.setdefault(question["category"], []).append(ratio)
        p20, p50, p80 = (statistics.quantiles(ratios, n=10)[k] for k in (1, 4, 7))
        row = {
            "side": name,
            "ms_per_token": round(1e3 * per_token[name], 2),
            "speedup": round(per_token["bare"] / per_token[name], 3),
            "speedup_of_a_prompt": {
                "p20": round(p20, 3),
                "p50": round(p50, 3),
                "p80": round(p80, 3),
            },
            "by_category": {c: round(statistics.mean(r), 3) for c, r in by_category.items()},
            "tokens": tokens[name],
            "identical_outputs": f"{identical[name]} of {len(questions)}",
        }
        if name in engines:
            row["tokens_per_pass"] = round(
                tokens[name] * model.config.num_hidden_layers / calls[name], 3
            )
        rows.append(row)
        print(f"{name}: {row['speedup']}x bare generate")
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
        table_prompts=args.table,
        table_tokens=table_tokens,
    )


if __name__ == "__main__":
    main()
