"""Gives what every benchmark script needs: conditions, interleaved timing, prompts, the report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

import tide


def parser(doc: str) -> argparse.ArgumentParser:
    """Options that all benchmark scripts share."""
    out = argparse.ArgumentParser(description=doc.splitlines()[0])
    out.add_argument("model", help="a model folder or hub id")
    out.add_argument("--threads", type=int, default=2)
    out.add_argument("--out", type=Path, help="write the result here as JSON")
    return out


def interleave(
    sides: dict[str, Callable[[], Any]], repeats: int, title: str
) -> dict[str, list[float]]:
    """Seconds of each side, run in turn `repeats` times after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in track(range(repeats + 1), description=title):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    if len(seconds) == 1:
        return {"p50_ms": round(1e3 * seconds[0], 3)}
    cuts = statistics.quantiles(seconds, n=10, method="inclusive")
    return {f"p{p}_ms": round(1e3 * cuts[p // 10 - 1], 3) for p in (20, 50, 80)}


def spec_bench(count: int) -> list[dict[str, str]]:
    """First turns of Spec-Bench, `count` of them spread evenly over its categories, in order."""
    data = os.environ.get("TIDE_DATA")
    if not data:
        raise SystemExit("Set TIDE_DATA to a folder that has spec_bench/question.jsonl.")
    lines = (Path(data) / "spec_bench" / "question.jsonl").read_text().splitlines()
    by_category: dict[str, list[str]] = {}
    for line in lines:
        row = json.loads(line)
        by_category.setdefault(row["category"], []).append(row["turns"][0])
    picked: list[dict[str, str]] = []
    while len(picked) < count:
        turn = len(picked) // len(by_category)
        picked += [{"category": c, "text": texts[turn]} for c, texts in by_category.items()]
    return picked[:count]


def chat(tokenizer: Any, texts: list[str]) -> Any:
    """Prompts through the tokenizer's template, left-padded."""
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


Side = Callable[[Any], torch.Tensor]


def race(
    sides: dict[str, Side],
    tokenizer: Any,
    questions: list[dict[str, str]],
    after: Callable[[dict[str, torch.Tensor]], None] = lambda out: None,
) -> list[dict[str, Any]]:
    """Every prompt through every side in turn; who goes first changes.

    Args:
        sides: from an encoded prompt to the ids that come out; the first is the baseline.
        after: called with what each side has made of a prompt.

    Returns:
        For each side, milliseconds per token and the speed-up over the baseline.
    """
    order, first = list(sides), next(iter(sides))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    for turn in track(range(-1, len(questions)), description="prompts"):
        batch = chat(tokenizer, [questions[max(turn, 0)]["text"]])
        given = batch["input_ids"].shape[1]
        out: dict[str, torch.Tensor] = {}
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            began = time.perf_counter()
            out[name] = sides[name](batch)
            if turn >= 0:  # the first goes round once more than the others, to warm up
                seconds[name].append(time.perf_counter() - began)
                tokens[name].append(out[name].shape[1] - given)
        if turn >= 0:
            after(out)
    per_token = {name: sum(seconds[name]) / sum(tokens[name]) for name in sides}
    rates = {  # outputs may differ in length, so a prompt's speed is per token too
        name: [t / s for t, s in zip(tokens[name], seconds[name], strict=True)] for name in sides
    }
    rows = []
    for name in sides:
        ratios = [ours / bare for ours, bare in zip(rates[name], rates[first], strict=True)]
        by_category: dict[str, list[float]] = {}
        for question, ratio in zip(questions, ratios, strict=True):
            by_category.setdefault(question["category"], []).append(ratio)
        deciles = statistics.quantiles(ratios, n=10)
        speedup = per_token[first] / per_token[name]
        rows.append(
            {
                "side": name,
                "ms_per_token": round(1e3 * per_token[name], 2),
                "speedup": round(speedup, 3),
                "speedup_of_a_prompt": {
                    f"p{p}": round(deciles[p // 10 - 1], 3) for p in (20, 50, 80)
                },
                "by_category": {c: round(statistics.mean(r), 3) for c, r in by_category.items()},
                "tokens": sum(tokens[name]),
            }
        )
        print(f"{name}: {speedup:.3f}x {first}")
    return rows


def report(what: str, args: argparse.Namespace, results: Any, **conditions: Any) -> None:
    """Print the result as one JSON line, with its conditions, and write it to `--out`."""
    document = {
        "what": what,
        "conditions": {
            "model": Path(args.model).name,
            **conditions,
            "threads": args.threads,
            "device": "cpu",
            "processor": _processor(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tide": tide.__version__,
        },
        "results": results,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
