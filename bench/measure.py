"""The shared part of the benchmark scripts: conditions, interleaved timing, prompts, the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from rich.progress import track

import tide
from tide.bench import compare as comparison
from tide.cli.loading import processor


def parser(doc: str) -> argparse.ArgumentParser:
    """Options that all benchmark scripts share."""
    out = argparse.ArgumentParser(description=doc.splitlines()[0])
    out.add_argument("model", help="a model folder or hub id")
    out.add_argument("--threads", type=int, default=2)
    out.add_argument("--out", type=Path, help="write the result here as JSON")
    return out


def interleave(
    methods: dict[str, Callable[[], Any]], repeats: int, title: str
) -> dict[str, list[float]]:
    """Seconds of each method, run in turn `repeats` times after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in track(range(repeats + 1), description=title):
        for name in list(methods)[:: -1 if turn % 2 else 1]:  # none always after the same other
            began = time.perf_counter()
            methods[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    if len(seconds) == 1:
        return {"p50_ms": round(1e3 * seconds[0], 3)}
    cuts = statistics.quantiles(seconds, n=10, method="inclusive")
    return {f"p{p}_ms": round(1e3 * cuts[p // 10 - 1], 3) for p in (20, 50, 80)}


class Stopwatch:
    """Seconds spent in functions, from the time it is made; what one calls counts for both.

    Args:
        parts: by the name under which they are counted, methods as the class and their name.
        within: the part in which the others must be called to count; None to count them always.
    """

    def __init__(
        self, parts: Mapping[str, Sequence[tuple[type, str]]], within: str | None = None
    ) -> None:
        self.seconds: Counter[str] = Counter()
        self._within, self._running = within, within is None
        for part, methods in parts.items():
            for owner, name in methods:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            if part == self._within:
                self._running = True
            try:
                return function(*args)
            finally:
                if self._running:
                    self.seconds[part] += time.perf_counter() - began
                if part == self._within:
                    self._running = False

        return call


class MemorySlope:
    """Resident memory of some processes while work goes on, and how it grows.

    Args:
        processes: that are looked at; asked for anew each time.
    """

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self._samples: list[tuple[int, dict[str, float]]] = []

    def sample(self, done: int) -> None:
        """Note the memory after so much work."""
        found: dict[str, float] = {}
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[f"{process.name()} {process.pid}"] = process.memory_info().rss / 1e6
        self._samples.append((done, found))

    def summary(self, warm_up: float = 0.3) -> dict[str, Any]:
        """Megabytes for each 1000 pieces of work, with its standard error, after a warm-up."""
        from scipy.stats import linregress

        warm = self._samples[int(warm_up * len(self._samples)) :]
        work = [done for done, _ in warm]
        if len(set(work)) < 3:
            return {"samples": len(self._samples)}
        total = [sum(of.values()) for _, of in warm]
        fit = linregress(work, total)
        slopes = {
            name: round(1e3 * linregress(work, [of.get(name, 0.0) for _, of in warm]).slope, 3)
            for name in warm[-1][1]
        }
        return {
            "samples": len(self._samples), "warm_up": warm_up,
            "mb_after_warm_up": round(total[0]), "mb_at_the_end": round(total[-1]),
            "mb_most": round(max(total)), "mb_per_1000": round(1e3 * fit.slope, 3),
            "standard_error": round(1e3 * fit.stderr, 3), "mb_per_1000_by_process": slopes,
        }  # fmt: skip


def rows_of(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file in the data folder."""
    data = os.environ.get("TIDE_DATA")
    if not data:
        raise SystemExit(f"Set TIDE_DATA to a folder that has {path}.")
    return [json.loads(line) for line in (Path(data) / path).read_text().splitlines()]


# Categories of MT-Bench, whose questions are one of the six tasks of Spec-Bench.
_MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip


def spec_bench(count: int, *, tasks: bool = False) -> list[dict[str, str]]:
    """First turns of Spec-Bench, `count` of them spread evenly over its categories, in order.

    Args:
        tasks: spread them over its six tasks instead, as its published results are weighed.
    """
    by_category: dict[str, list[str]] = {}
    for row in rows_of("spec_bench/question.jsonl"):
        of_task = tasks and row["category"] in _MT_BENCH
        category = "conversation" if of_task else row["category"]
        by_category.setdefault(category, []).append(row["turns"][0])
    if tasks:  # the data has the eight categories of MT-Bench one after the other
        talk = by_category["conversation"]
        by_category["conversation"] = [text for k in range(10) for text in talk[k::10]]
    picked: list[dict[str, str]] = []
    while len(picked) < count:
        turn = len(picked) // len(by_category)
        picked += [{"category": c, "text": texts[turn]} for c, texts in by_category.items()]
    return picked[:count]


def _all_but_maths() -> list[str]:
    rows = rows_of("spec_bench/question.jsonl")
    return [row["turns"][0] for row in rows if not row["category"].startswith("math")]


def _gsm8k() -> list[str]:
    return [row["question"] for row in rows_of("gsm8k/test.jsonl")]


def shuffled(texts: list[str]) -> list[str]:
    """In random order, the same every time."""
    return random.Random(0).sample(texts, len(texts))


def short_prompts(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """The beginnings of real prompts, of mixed lengths up to `tokens`."""
    texts = shuffled([row["turns"][0] for row in rows_of("spec_bench/question.jsonl")])
    ids = [tokenizer(text).input_ids for text in texts[:count]]
    return [some[: 4 + 7 * k % (tokens - 4)] for k, some in enumerate(ids)]


# Sources of prompts. That for models of code has the problems of GSM8K, and nothing else in common.
SOURCES: dict[str, Callable[[], list[str]]] = {
    "spec_bench": lambda: shuffled(_all_but_maths()),
    "gsm8k": lambda: shuffled(_gsm8k()),
    "gsm8k_code": lambda: [
        f"Write a Python function that solves this problem:\n{text}" for text in shuffled(_gsm8k())
    ],
}


def chat(tokenizer: Any, texts: list[str]) -> Any:
    """Prompts through the tokenizer's template, left-padded."""
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def compare(
    methods: dict[str, comparison.Method],
    tokenizer: Any,
    questions: list[dict[str, str]],
    after: Callable[[dict[str, torch.Tensor]], None] = lambda out: None,
) -> list[dict[str, Any]]:
    """Questions through every method in turn; see `tide.bench.compare`."""
    prompts = [chat(tokenizer, [question["text"]]) for question in questions]
    categories = [question["category"] for question in questions]
    warm_up = chat(tokenizer, [comparison.WARM_UP])
    rows = comparison.compare(methods, prompts, after, categories=categories, warm_up=warm_up)
    for row in rows:
        print(f"{row['method']}: {row['speedup']:.3f}x {rows[0]['method']}")
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
            "processor": processor(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tide": tide.__version__,
        },
        "results": results,
    }
    write(document, args.out)


def write(document: dict[str, Any], out: Path | None) -> None:
    """Print a result as one JSON line, and write it to a file if one is named."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))
