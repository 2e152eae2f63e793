"""The tables of the docs that compare models of several sizes; what was not measured has no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from headline_tables import BASELINE, COMPILED, short
from results import RESULTS, conditions, percent, read, table, times

# Millions of parameters of each, and layers.
MODELS = {"smollm2": (135, 30), "gemma3_270m": (268, 18), "qwen2_5_coder_0_5b": (494, 24),
          "qwen2_5_coder_1_5b": (1544, 28)}  # fmt: skip
RISKS = ("0.01", "0.02", "0.05")
# Runs of `tide bench`, and the sources of their prompts.
RUNS = ("modes_{}_batch_1", "modes_{}_batch_4", "modes_{}_certified",
        "modes_{}_bf16_batch_1", "modes_{}_bf16_batch_4", "modes_{}_bf16_certified")  # fmt: skip
PROMPTS = {
    "question.jsonl": "Spec-Bench",
    "code.jsonl": "HumanEval",
    "problems.jsonl": "GSM8K, as code",
    "unused.jsonl": "GSM8K, as code",
}
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
    return p50(next(of for of in run["results"] if of["method"] == method))


def gate_costs(form: str = "gate_costs_{}") -> str:
    """What gates cost, uncompiled and in compiled segments."""
    found = measured(form)
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


def p50(of: dict[str, Any]) -> float:
    """Speed-up over the fastest way without TIDE, the median of prompts."""
    return of["per_prompt_speedup"]["p50"]


class Choice(NamedTuple):
    """What a run gave for a choice of exits.

    Attributes:
        compiled: what the names of its methods end with.
        risk: for which the exits are certified; None: as calibrated.
        ways: "lossless", "exits alone", "both" and, where it was run, "auto".
    """

    compiled: str
    risk: float | None
    ways: dict[str, dict[str, Any]]

    @property
    def auto_of_fastest(self) -> float:
        """How fast mode "auto" was in terms of the fastest."""
        return p50(self.ways["auto"]) / max(map(p50, self.ways.values()))

    def expected(self, way: str) -> float | None:
        """What the replay behind mode "auto" expected a way to add to drafts alone."""
        found = self.ways.get("auto", {}).get("expected", {})
        return found[way] / found["lossless"] if way in found else None


def runs() -> list[dict[str, Any]]:
    """Of all modes, those that there are."""
    names = [form.format(model) for model in MODELS for form in RUNS]
    found = [read(name) for name in names if (RESULTS / f"{name}.json").exists()]
    if not found:
        raise FileNotFoundError(2, "No such file", f"{names[0]}.json")
    return found


def choices(run: dict[str, Any]) -> Iterator[Choice]:
    """Of exits in a run, compiled and not."""
    found = {of["method"]: of for of in run["results"]}
    risks = sorted({of["certificate"]["risk"] for of in found.values() if of.get("certificate")})
    for compiled in ("", ", compiled"):
        if f"lossless{compiled}" not in found:
            continue
        for risk in (None, *risks):
            at = compiled if risk is None else f", risk {risk:g}{compiled}"
            both = f"exit{', threshold scale 1' if risk is None else ''}{at}"
            names = {"lossless": f"lossless{compiled}", "exits alone": f"exit without drafts{at}",
                     "both": both, "auto": f"auto{at}"}  # fmt: skip
            ways = {way: found[name] for way, name in names.items() if name in found}
            yield Choice(compiled, risk, ways)


def speed() -> str:
    """What the modes gave: a line for each run, and in it for each choice of exits."""
    found = runs()
    rows = [(name(run), *_line(run, choice)) for run in found for choice in choices(run)]
    head = ("model", "run", "exits", "fastest without TIDE", "lossless", "exits alone", "both",
            "`auto`", "both / lossless", "expected", "with perfect gates", "`auto` / fastest mode",
            "tokens that differ")  # fmt: skip
    shared = {key: value for key, value in _shared(found).items() if value is not None}
    return table(head, rows) + conditions(shared)


def _line(run: dict[str, Any], choice: Choice) -> tuple[str, ...]:
    of, ways = run["conditions"], choice.ways
    both, baseline = ways["both"], ways["lossless"]["baseline"]
    return (
        f"{PROMPTS[of['data']]}, batch {of['batch']}, {short(of['dtype'])}{choice.compiled}",
        "as calibrated" if choice.risk is None else f"certified, {percent(choice.risk, 0)}",
        BASELINES.get(baseline, baseline),
        *(_with_range(ways[way]) if way in ways else ""
          for way in ("lossless", "exits alone", "both", "auto")),
        span(gains(run, choice)),
        *("" if gain is None else times(gain)
          for gain in (choice.expected("both"), choice.expected("perfect"))),
        f"{choice.auto_of_fastest:.2f}" if "auto" in ways else "",
        percent(both["disagreement"]),
    )  # fmt: skip


def gains(
    run: dict[str, Any], choice: Choice, speed: Callable[[dict[str, Any]], float] = p50
) -> list[float]:
    """What exits add to drafts alone in one run: each result of both over each of drafts alone."""
    both = [choice.ways["both"]]
    auto = choice.ways.get("auto")
    if auto is not None and auto["mode"] == "exit" and auto["drafts"]:
        both.append(auto)
    alone = [
        of
        for of in run["results"]
        if of["method"].endswith(", compiled") == bool(choice.compiled)
        and (of["method"].startswith("lossless") or of.get("plan", "").startswith("lossless:"))
    ]
    return [speed(exits) / speed(drafts) for drafts in alone for exits in both]


def span(values: Sequence[float]) -> str:
    """From the least to the greatest of some speed-ups."""
    low, high = (times(f(values)) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _with_range(of: dict[str, Any]) -> str:
    low, middle, high = (of["per_prompt_speedup"][at] for at in ("p20", "p50", "p80"))
    return f"{times(middle)} ({low:.2f} to {high:.2f})"


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
