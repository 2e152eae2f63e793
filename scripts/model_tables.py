"""The tables of the docs that compare models of several sizes; what was not measured has no row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headline_tables import BASELINE, COMPILED
from results import RESULTS, conditions, percent, read, table, times

# Millions of parameters of each, and layers.
MODELS = {"smollm2": (135, 30), "gemma3_270m": (268, 18), "qwen2_5_coder_0_5b": (494, 24),
          "qwen2_5_coder_1_5b": (1544, 28)}  # fmt: skip
RISKS = ("0.01", "0.02", "0.05")
# Runs of `tide bench`, and the sources of their prompts.
RUNS = ("modes_{}_batch_1", "modes_{}_batch_4", "modes_{}_certified")
PROMPTS = {
    "question.jsonl": "Spec-Bench",
    "code.jsonl": "HumanEval",
    "problems.jsonl": "GSM8K, as code",
    "unused.jsonl": "GSM8K, as code",
}
# In bfloat16.
RUNS_BF16 = ("modes_{}_bf16_batch_1", "modes_{}_bf16_batch_4")
BASELINES = {COMPILED: "`generate`, compiled", BASELINE: "`generate`, eager"}
DEPTHS = (0.5, 0.75, 0.9)


def measured(form: str) -> dict[str, dict[str, Any]]:
    """The result files there are, by model."""
    names = {model: form.format(model) for model in MODELS}
    found = {model: read(name) for model, name in names.items()
             if (RESULTS / f"{name}.json").exists()}  # fmt: skip
    if not found:
        raise FileNotFoundError(2, "No such file", f"{form.format('smollm2')}.json")
    return found


def one_run_each() -> dict[str, dict[str, Any]]:
    """A run of each model at batch 1: in bfloat16, where there is one."""
    return measured("modes_{}_batch_1") | measured("modes_{}_bf16_batch_1")


def median(run: dict[str, Any], method: str) -> float:
    """Speed-up of a method over the fastest way without TIDE, the median of prompts."""
    found = next(of for of in run["results"] if of["method"] == method)
    return found["per_prompt_speedup"]["p50"]


def gate_costs() -> str:
    """What gates cost, uncompiled and in compiled segments."""
    found = measured("gate_costs_{}")
    rows = [
        (name(of), way, f"{1e3 * cost['layer_seconds']:.2f}", f"{cost['no']:.2f}",
         "{:.2f} to {:.2f}".format(*cost["no_range"]), f"{cost['yes']:.2f}")
        for of in found.values() for way, cost in of["results"].items()
    ]  # fmt: skip
    head = ("model", "segments", "a layer, ms", "a gate in layers, token continues",
            "range over builds", "token exits")  # fmt: skip
    return table(head, rows) + conditions(_shared(found.values()))


def few_tokens() -> str:
    """What the linear maps of a pass cost by the number of tokens, as a multiple of one token."""
    found = measured("few_tokens_{}")
    rows = []
    for of in found.values():
        times = of["results"]
        one = times["1"]["torch_ms"]
        for way, label in (("torch", "torch"), ("tide", "`tide::linear`")):
            rows.append((name(of), label, f"{one:.0f}",
                         *(f"{by[f'{way}_ms'] / one:.2f}" for by in times.values())))  # fmt: skip
    tokens = next(iter(found.values()))["results"]
    head = ("model", "linear maps by", "one token, ms", *tokens)
    return table(head, rows) + conditions(_shared(found.values()))


def depth(form: str = "depth_{}") -> str:
    """What calibration found, by model."""
    rows, found = [], measured(form)
    for model, of in found.items():
        n_layers, costs, heads = MODELS[model][1], of["costs"], of["heads"]
        exits = [_chosen(of, risk) for risk in RISKS]
        yes = costs["prefilter"] + costs["exit_head"]
        rows.append(
            (name(of), n_layers, f"{sum(of['tokens'].values()):,}",
             *(percent(_agreement(heads, share * n_layers), 0) for share in DEPTHS),
             *(f"{percent(c['exit_rate'])}, {percent(c['depth_saved'])}" for c in exits),
             f"{costs['prefilter'] / costs['layer']:.2f}, {yes / costs['layer']:.2f}")
        )  # fmt: skip
    head = (
        "model", "layers", "own tokens", *(f"heads agree at {d:.0%} of the depth" for d in DEPTHS),
        *(f"exit rate and depth saved at {float(risk):.0%}" for risk in RISKS),
        "a gate in layers: token continues, exits",
    )  # fmt: skip
    return table(head, rows) + conditions(_shared(found.values()))


def speed(forms: Iterable[str] = RUNS) -> str:
    """What the modes gave, by model, prompts and batch."""
    names = [form.format(model) for model in MODELS for form in forms]
    runs = [read(name) for name in names if (RESULTS / f"{name}.json").exists()]
    if not runs:
        raise FileNotFoundError(2, "No such file", f"{names[0]}.json")
    rows = [
        (name(run), PROMPTS[run["conditions"]["data"]], run["conditions"]["batch"], *cells)
        for run in runs
        for cells in _modes(run["results"])
    ]
    head = ("model", "prompts", "batch", "TIDE", "fastest without it", "speed-up",
            "p20 to p80 of calls", "over `generate`, eager", "tokens that differ",
            "certified risk")  # fmt: skip
    shared = {key: value for key, value in _shared(runs).items() if value is not None}
    return table(head, rows) + conditions(shared)


def _modes(methods: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """What each mode of TIDE gave; speed-ups are medians of prompts."""
    eager = methods[0]["per_prompt_speedup"]["p50"]
    for of in methods:
        shown = _shown(of["method"])
        if shown is None:
            continue
        low, middle, high = (of["per_prompt_speedup"][at] for at in ("p20", "p50", "p80"))
        certificate, baseline = of["certificate"], of["baseline"]
        yield (
            shown, BASELINES.get(baseline, baseline), times(middle), f"{low:.2f} to {high:.2f}",
            times(middle / eager), percent(of["disagreement"]),
            f"{certificate['risk']:.0%}" if certificate else "",
        )  # fmt: skip


def _shown(method: str) -> str | None:
    """How a method is called in the table; None if it is not there."""
    if (uncompiled := method.removesuffix(", compiled")) != method:
        shown = _shown(uncompiled)
        return None if shown is None else f"{shown}, compiled"
    mode, _, risk = method.partition(", risk ")
    names = {
        "lossless": "lossless", "exit without drafts": "exits alone",
        "exit": "exits and drafts", "exit, threshold scale 1": "exits and drafts", "auto": "`auto`",
    }  # fmt: skip
    if mode not in names:
        return None
    return f"{names[mode]}, {float(risk):.0%}" if risk else names[mode]


def _agreement(heads: dict[str, Any], after: float) -> float:
    """Of the exit head whose checkpoint is next to a depth."""
    pairs = zip(heads["layers"], heads["agreement"], strict=True)
    return min(pairs, key=lambda pair: abs(pair[0] + 1 - after))[1]


def _chosen(of: dict[str, Any], risk: str) -> dict[str, Any]:
    """The exits that were taken for a risk."""
    return next(choice for choice in of["exits"][risk] if choice["best"])


def name(of: dict[str, Any]) -> str:
    """The model of a result file."""
    return of["conditions"]["model"].removesuffix("-Instruct")


def _shared(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The conditions in which all runs agree."""
    first, *others = [of["conditions"] for of in documents]
    return {key: value for key, value in first.items() if all(value == o[key] for o in others)}
