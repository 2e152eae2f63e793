"""Compares gates on the same held-out answers: AUC, exit rate at a few error rates, and cost.

Today's gate lets the router reject tokens before the exit head is read; the candidate gate lets the
logits of a few candidates do it. Both then decide by the confidence model, which reads the head.

    python bench/gates.py MODEL --data prompts.jsonl --samples 1548 --out gates.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measure import parser, report
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.calibration.choose import follow, one_scorer
from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.components import FitPlan, fit_components
from tide.calibration.confidence import fit_confidence_model, fit_prefilter
from tide.calibration.costs import Costs, measure_costs
from tide.calibration.data import load_prompts, split_documents
from tide.calibration.fit import HeadFit, RouterFit, as_served, choose_vocabulary
from tide.calibration.pipeline import checkpoint_layers, frozen
from tide.calibration.report import RISKS
from tide.calibration.scores import Scores
from tide.config import TIDEConfig
from tide.models.attach import attach
from tide.models.fingerprint import dtype_name, fingerprint
from tide.models.runner import DepthRunner
from tide.progress import Stages, bars

GATES = {"router": "router", "candidates": "prefilter"}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--data", default="wikitext", help="prompts, as tide calibrate takes them")
    options.add_argument("--samples", type=int, default=2000, help="prompts, at most")
    options.add_argument("--new-tokens", type=int, default=160)
    options.add_argument("--max-prompt", type=int, default=512)
    options.add_argument("--interval", type=int, default=4, help="layers between checkpoints")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--candidates", type=int, nargs="+", default=[128])
    options.add_argument("--vocabulary", type=int, default=8192)
    options.add_argument("--work", type=Path, help="keep the collected states here")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    with TemporaryDirectory() as folder, bars(False) as bar, frozen(model.eval()):
        runner = attach(model)
        collection = collect(runner, tokenizer, args, args.work or Path(folder), bar)
        hidden = runner.config.hidden_size
        plan = FitPlan(
            vocabulary=args.vocabulary, candidates=args.candidates[0], table_bytes=4 << 20,
            strategy="affine", heads=HeadFit(),
            routers=RouterFit(hidden_size=hidden, bottleneck=128),
        )  # fmt: skip
        fitted = fit_components(collection, runner, plan, Stages(), bar)
        costs = measure_costs(
            runner, fitted.readout, as_served(fitted.heads, fitted.readout)[0], fitted.routers[0]
        )
        results = []
        for count in args.candidates:
            size = runner.config.vocab_size
            fitted.candidates = choose_vocabulary(collection, count, size)
            results += compare(fitted.scores(collection), costs, runner.n_layers, count)
    tokens = {split: sum(map(len, collection.answers(split))) for split in ("fit", "tuning")}
    report(
        "gates on the same held-out answers", args, results, dtype=dtype_name(model), tokens=tokens,
        new_tokens=args.new_tokens, vocabulary=args.vocabulary, costs=costs.to_dict(),
    )  # fmt: skip


def collect(
    runner: DepthRunner, tokenizer: Any, args: argparse.Namespace, folder: Path, bar: Any
) -> Collection:
    """The model's own answers to prompts, split by document, with its states at checkpoints."""
    documents = split_documents(load_prompts(args.data, args.samples), seed=0)
    identity = fingerprint(runner.model, runner.parts)
    plan = CollectPlan(
        layers=checkpoint_layers(TIDEConfig(checkpoint_interval=args.interval), runner.n_layers),
        on_policy=True, new_tokens=args.new_tokens, max_tokens=args.max_prompt, seed=0,
        documents=documents.fingerprint, model=f"{identity.head}{identity.layers}",
        dtype=dtype_name(runner.model),
    )  # fmt: skip
    collection = Collection(folder, plan, documents)
    collection.collect(runner, tokenizer, progress=bar("Answers and states"))
    return collection


def compare(
    scores: list[Scores], costs: Costs, n_layers: int, candidates: int
) -> list[dict[str, Any]]:
    """Each gate at each checkpoint, chosen on some documents and reported on others."""
    rows = []
    for at in scores:
        fit_confidence_model(at)
        fit_prefilter(at)
        to_choose, to_report = at.part("choose"), at.part("report")
        for gate, stage in GATES.items():
            row: dict[str, Any] = {
                "layer": at.layer,
                "gate": gate,
                "candidates": candidates if stage == "prefilter" else None,
                "agreement": float(to_report.correct.mean()),
                "auc": to_report.auc(stage),
                "auc_with_head": to_report.auc("confidence"),
            }
            for risk in RISKS:
                row[str(risk)] = at_risk(to_choose, to_report, stage, risk, costs, n_layers)
            rows.append(row)
            print(row)
    return rows


def at_risk(
    to_choose: Scores, to_report: Scores, stage: str, risk: float, costs: Costs, n_layers: int
) -> dict[str, float]:
    """What a gate that is chosen for its speed does on other documents."""
    chosen = one_scorer(to_choose, "confidence", risk, costs, n_layers, first_stage=stage)
    found = follow([to_report], chosen.thresholds, costs, n_layers)
    return {
        "exit_rate": found.exit_rate, "error_rate": found.error_rate,
        "read_rate": found.read_rate, "speedup": found.speedup,
    }  # fmt: skip


if __name__ == "__main__":
    main()
