"""The table of the README: TIDE against the fastest way without it, each in one run.

Also what the chart of methods shows (`charts.py`), so that both have the same values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from results import percent, read, table, times

# Methods of the result files that are not ours.
OTHERS = ("HF eager", "HF generate", "HF compiled", "prompt lookup", "vLLM", "ngram", "suffix")
CERTIFIED = "modes_qwen2_5_coder_0_5b_certified"
LARGER = "modes_qwen2_5_coder_1_5b_bf16_certified"
BASELINE, COMPILED = "HF generate", "HF generate, compiled"


class Headline(NamedTuple):
    """One comparison.

    Attributes:
        engine: transformers or vLLM.
        model, dtype, batch: under which it was measured.
        method: ours.
        baseline: the fastest without us in the same run.
        speedup: over it.
        low, high: the range of the speed-up; None where it was recorded over another baseline.
        output: how the output compares with undrafted full depth.
        source: the result file.
    """

    engine: str
    model: str
    dtype: str
    batch: int
    method: str
    baseline: str
    speedup: float
    low: float | None
    high: float | None
    output: str
    source: str


def _compiled(source: str, dtype: str, batch: int, method: str, name: str) -> Headline:
    """Of a run against HF compiled."""
    found = read(source)
    methods = {
        m["method"]: m
        for m in found["results"]["methods"]
        if (m["dtype"], m["batch"]) == (dtype, batch)
    }
    fastest = max(
        (n for n in methods if n in OTHERS), key=lambda n: methods[n]["tokens_per_second"]
    )
    ours = methods[method]
    low, speedup, high = ours["speedup_p20_p50_p80"]
    if fastest != "HF compiled":  # ratios of prompts are recorded over HF compiled only
        speedup = ours["tokens_per_second"] / methods[fastest]["tokens_per_second"]
        low = high = None
    output = f"exact: {ours['same_batches']}" + (" batches" if batch > 1 else "")
    if methods["HF compiled"]["same_batches"].split()[0] != ours["same_batches"].split()[-1]:
        output += f" (HF compiled: {methods['HF compiled']['same_batches'].split()[0]})"
    return Headline("HF", found["conditions"]["model"], dtype, batch, name, fastest, speedup, low,
                    high, output, source)  # fmt: skip


def _certified(method: str, name: str, source: str = CERTIFIED) -> Headline:
    """Of a model of code, on prompts like those that its exits were certified on."""
    found = read(source)
    ours = next(m for m in found["results"] if m["method"] == method)
    spread = ours["per_prompt_speedup"]
    output = f"exact: {ours['exact_match_outputs']} of {ours['outputs']}"
    if certificate := ours["certificate"]:
        output = (
            f"at most {100 * certificate['risk']:g} % of tokens differ, certified at "
            f"{100 - 100 * certificate['delta']:g} % (tested: {percent(certificate['estimate'])}; "
            f"here: {percent(ours['disagreement'])})"
        )
    return Headline(
        "HF", found["conditions"]["model"], found["conditions"]["dtype"], 1, name,
        "HF compiled" if ours["baseline"] == COMPILED else ours["baseline"], spread["p50"],
        spread["p20"], spread["p80"], output, source,
    )  # fmt: skip


def _vllm(batch: int, method: str, name: str) -> Headline:
    found = read("vllm_drafts")
    methods = next(r["methods"] for r in found["results"] if r["batch"] == batch)
    ours = next(m for m in methods if m["method"] == method)
    fastest = next(m for m in methods if m["fastest_without_us"])
    output = (
        f"exact: {ours['exact_match_outputs']} of {ours['outputs']} "
        f"({fastest['method']}: {fastest['exact_match_outputs']})"
    )
    return Headline("vLLM", found["conditions"]["model"], found["conditions"]["dtype"], batch, name,
                    fastest["method"], ours["speedup"], *ours["range_over_rounds"], output,
                    "vllm_drafts")  # fmt: skip


def headlines() -> list[Headline]:
    """The comparisons, the best one first."""
    trees, chains = "lossless, trees, compiled", "lossless, compiled"
    return [
        _compiled("trees_speed", "bfloat16", 1, trees, trees),
        _compiled("compiled", "bfloat16", 4, chains, "lossless, chains, compiled"),
        _certified("lossless, compiled", "lossless, trees and table, compiled"),
        _certified("exit, risk 0.05, compiled", "exits and drafts, compiled"),
        _certified("lossless, compiled", "lossless, trees and table, compiled", LARGER),
        *(_vllm(batch, "drafts", "drafts") for batch in (1, 8)),
        _vllm(1, "drafts, cross-request", "drafts, cross-request"),
    ]


def headline() -> str:
    rows = [
        (h.engine, f"{h.model.removesuffix('-Instruct')}, {short(h.dtype)}", h.batch, h.method,
         h.baseline, times(h.speedup), _range(h), h.output)
        for h in headlines()
    ]  # fmt: skip
    head = ("engine", "model", "batch", "TIDE", "fastest without it", "speed-up", "range", "output")
    return table(head, rows) + f"\n\n*{_conditions()}*"


def short(dtype: str) -> str:
    """A dtype as it is called in prose."""
    return {"bfloat16": "bf16", "float32": "fp32"}[dtype]


def _range(of: Headline) -> str:
    return "not recorded" if of.low is None else f"{of.low:.2f} to {of.high:.2f}"


def _conditions() -> str:
    """What all runs share; a run that does not share it is an error."""
    sources = {h.source: read(h.source)["conditions"] for h in headlines()}
    shared: dict[str, Any] = {}
    for name in ("device", "threads", "torch", "transformers", "tide"):
        values = {str(of[name]) for of in sources.values()}
        if len(values) > 1:
            raise SystemExit(f"The runs of the README's table differ in {name}: {values}.")
        shared[name] = values.pop()
    coder, processor = sources.pop(CERTIFIED), sources["trees_speed"]["processor"]
    larger = sources[LARGER]
    if any(of.get("processor", processor) != processor for of in sources.values()):
        raise SystemExit("The runs of the README's table had different processors.")
    return (
        f"{processor}, {shared['threads']} threads, shared with others; torch {shared['torch']}, "
        f"transformers {shared['transformers']}, vLLM {sources['vllm_drafts']['vllm']}, "
        f"TIDE {shared['tide']}; greedy; Spec-Bench, nothing calibrated. Qwen2.5-Coder: "
        f"calibrated, {larger['prompts']} unseen problems of GSM8K as programs; "
        f"0.5B: {coder['prompts']}, {coder['processor']}."
    )
