"""Compiled segments against the fastest way to run the model without us.

    python bench/compiled.py $(python scripts/weights.py) --out bench/results/compiled.json
    python bench/compiled.py QWEN --dtype bfloat16 --batch 1 --prompts 8 --out OUT.json

Spec-Bench prompts through every method in turn. "HF compiled" is transformers' documented way: a
static cache and `torch.compile`, the cache as long as each call needs. Exits at half depth are
scripted; the limit is what their passes cost by themselves, compiled, in the same process. Lossless
methods draft chains where they do not say trees.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from decode_limit import Run, needed_passes
from measure import chat, parser, report, spec_bench
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.bench.baselines import compiled_generate
from tide.bench.compare import WARM_UP
from tide.calibration.answers import end_tokens, until_end
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy
from tide.models.costs import measure_passes
from tide.models.fingerprint import Fingerprint

NEW = 96
SHARES = (0.3, 0.6, 0.9)
VOCABULARY = 8192  # tokens that the scripted exits' heads read
FASTEST = "HF compiled"
CHAINS = TIDEConfig(mode="lossless", max_tree=0)


def exiting(model: Any, share: float) -> TIDE:
    """Exits at half depth by a script."""
    n = model.config.num_hidden_layers
    checkpoint = Checkpoint(n // 2 - 1, ExitHead("identity", model.config.hidden_size))
    made = Artifact(
        Fingerprint("", "", ""), model.config.hidden_size, [checkpoint],
        vocabulary=torch.arange(VOCABULARY),
    )  # fmt: skip
    return TIDE(
        model, made, TIDEConfig(min_layers=0, drafts=()), policy=ScriptedPolicy.share(share),
        allow_mismatch=True, check=False, compile=True,
    )  # fmt: skip


def methods_of(model: Any, options: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Every method, from a batch of prompts to the generated ids."""
    engines = {
        "lossless": TIDE(model, config=CHAINS),
        "off, compiled": TIDE(model, config=TIDEConfig(mode="off"), check=False, compile=True),
        "lossless, compiled": TIDE(model, config=CHAINS, check=False, compile=True),
        "lossless, trees": TIDE(model),
        "lossless, trees, compiled": TIDE(model, compile=True),
    }
    methods: dict[str, Callable[[Any], Any]] = {
        "HF eager": lambda batch: model.generate(**batch, **options),
        FASTEST: compiled_generate(model, options),
        "prompt lookup": lambda batch: model.generate(
            **batch, **options, prompt_lookup_num_tokens=10
        ),
    }
    for name, engine in engines.items():
        methods[name] = lambda batch, engine=engine: engine.generate(**batch, **options)
    return methods


def compare(model: Any, tokenizer: Any, size: int, prompts: int) -> list[dict[str, Any]]:
    """One dtype and batch size: every method in turn."""
    texts = [row["text"] for row in spec_bench(prompts)]
    batches = [chat(tokenizer, texts[k : k + size]) for k in range(0, len(texts), size)]
    ends = end_tokens(model)
    options = {
        "max_new_tokens": NEW, "do_sample": False, "pad_token_id": tokenizer.pad_token_id
    }  # fmt: skip
    methods = methods_of(model, options)
    if size > 1:
        del methods["prompt lookup"]  # transformers has it for one sequence only
    first: dict[str, float] = {}
    warm_up = chat(tokenizer, [WARM_UP] * size)
    for name, run in methods.items():
        began = time.perf_counter()
        run(warm_up)
        first[name] = time.perf_counter() - began
    rates: dict[str, list[float]] = {name: [] for name in methods}
    outputs: dict[str, list[Any]] = {name: [] for name in methods}
    order = list(methods)
    for turn, batch in enumerate(track(batches, description=f"{model.dtype}, batch {size}")):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            began = time.perf_counter()
            ids = methods[name](batch)
            seconds = time.perf_counter() - began
            new = ids[:, batch["input_ids"].shape[1] :].tolist()
            rates[name].append(sum(len(until_end(answer, ends)) for answer in new) / seconds)
            outputs[name].append(new)
    rows = []
    for name in methods:
        ratios = [a / b for a, b in zip(rates[name], rates[FASTEST], strict=True)]
        same = [a == b for a, b in zip(outputs[name], outputs["HF eager"], strict=True)]
        rows.append({
            "method": name, "dtype": str(model.dtype).split(".")[1], "batch": size,
            "tokens_per_second": round(statistics.median(rates[name]), 2),
            "speedup_p20_p50_p80": spread(ratios),
            "same_batches": f"{sum(same)} of {len(same)}",
            "first_call_seconds": round(first[name], 1),
        })  # fmt: skip
        print(rows[-1])
    return rows


def limits(model: Any, tokenizer: Any, prompts: int) -> list[dict[str, Any]]:
    """Scripted exits against what their passes cost by themselves, at batch 1."""
    n = model.config.num_hidden_layers
    batches = [chat(tokenizer, [row["text"]]) for row in spec_bench(prompts)]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    engines = {share: exiting(model, share) for share in SHARES}
    took: dict[float, list[float]] = {share: [] for share in SHARES}
    least: dict[float, list[float]] = {share: [] for share in SHARES}
    for turn, batch in enumerate([batches[0], *batches]):
        for share, engine in engines.items():
            runs = []
            for new in (NEW, 1):  # the second is the prefill
                began = time.perf_counter()
                engine.generate(**batch, **{**options, "max_new_tokens": new})
                runs.append(time.perf_counter() - began)
            if not turn:
                continue
            took[share].append(runs[0] - runs[1])
            stages = engine._machinery.exits.stages(n)
            run = Run(1, batch["input_ids"].shape[1], NEW)
            script = ScriptedPolicy.share(share).script
            passes = needed_passes(script, run, n, engine.config.max_pending)
            lengths = sorted({tokens for lo, _, tokens in passes if lo} | {1})
            reads, skips = (
                measure_passes(engine.runner, stages, lengths=lengths, wanted=wanted, seconds=0.5)
                for wanted in (True, False)
            )
            deep = sum(1 for lo, *_ in passes if lo)
            exits = NEW - 1 - deep
            seconds = exits * reads[1][0] + deep * skips[1][0]
            seconds += sum(reads[tokens][1] for lo, _, tokens in passes if lo)
            least[share].append(seconds)
    rows = []
    for share in SHARES:
        shares = [b / a for a, b in zip(took[share], least[share], strict=True)]
        rows.append({
            "exits": share, "dtype": str(model.dtype).split(".")[1], "batch": 1,
            "ms_per_token": round(1e3 * statistics.median(took[share]) / (NEW - 1), 2),
            "limit_ms_per_token": round(1e3 * statistics.median(least[share]) / (NEW - 1), 2),
            "share_of_limit_p20_p50_p80": spread(shares),
        })  # fmt: skip
        print(rows[-1])
    return rows


def spread(ratios: list[float]) -> list[float]:
    if len(ratios) < 2:
        return [round(ratios[0], 3)] * 3
    cuts = statistics.quantiles(ratios, n=10, method="inclusive")
    return [round(cuts[k], 3) for k in (1, 4, 7)]


def add(args: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows beside those of other dtypes and batch sizes that are in the file already."""
    torch.compiler.reset()
    results: dict[str, Any] = {"methods": [], "exits": []}
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text())["results"]
    new = {(row["dtype"], row["batch"]) for row in rows}
    kept = [row for row in results[name] if (row["dtype"], row["batch"]) not in new]
    results[name] = sorted(kept + rows, key=lambda row: (row["dtype"] != "float32", row["batch"]))
    report(
        "compiled segments against HF generate, compiled", args, results, prompts=args.prompts,
        prompts_with_exits=args.exits, new_tokens=NEW,
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options.add_argument("--prompts", type=int, default=24)
    options.add_argument("--exits", type=int, default=8, help="prompts for the scripted exits")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    for dtype in args.dtype:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype))
        for size in args.batch:
            add(args, "methods", compare(model, tokenizer, size, args.prompts))
        if args.exits:
            add(args, "exits", limits(model, tokenizer, args.exits))


if __name__ == "__main__":
    main()
