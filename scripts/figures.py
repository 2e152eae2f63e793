"""The figures within sentences of the docs, each from a result file.

`scripts/tables.py` writes them into the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import model_tables as models
import reference
from headline_tables import CERTIFIED
from results import percent, read, times


def _method(of: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(method for method in of if method["method"] == name)


def _bench(method: str) -> dict[str, Any]:
    return _method(read("bench_smollm2")["results"], method)


def _exits(drafts: bool) -> dict[str, Any]:
    return _bench("exit, threshold scale 1" if drafts else "exit without drafts")


def _saved(method: dict[str, Any]) -> str:
    return percent(1 - method["layers_run"] / method["layers_full"])


def _lossless(method: str) -> dict[str, Any]:
    return _method(read("lossless")["results"]["methods"], method)


def _span(values: list[float], form: str = "{:.2f}") -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"


def _in_layers(part: str, source: str = "calibration_smollm2") -> str:
    costs = read(source)["costs"]
    return f"{costs[part] / costs['layer']:.2g}"


def _limits() -> list[dict[str, Any]]:
    names = ("decode_limit_smollm2", "decode_limit_random")
    return [row for name in names for row in read(name)["results"]]


def _off() -> str:
    """Mode "off" against HF generate, over dtypes, batch sizes and two models."""
    return _span([r["exit_schedules"][0]["speedup"] for r in _limits()])


def _batch_of_four() -> str:
    """Scripted exits of 30 and 60 % at half depth at batch 4, against HF generate."""
    found = [r["exit_schedules"] for r in _limits() if r["batch"] == 4]
    return _span([s["speedup"] for schedules in found for s in schedules[1:3]])


def _noise(dtype: str) -> list[float]:
    return [100 * r["share"] for r in read("noise_floor")["results"] if r["read"].startswith(dtype)]


def _certified(source: str, served: str, threshold_scale: float) -> str:
    """Measured share of tokens that differ, on fresh prompts, at one threshold scale."""
    rows = [r for r in read(f"certificates_{source}")["results"]
            if r["certificate"]["threshold_scale"] == threshold_scale]  # fmt: skip
    found = [r[where] for r in rows for where in ("same_source", "other_source") if where in r]
    return percent(next(at["measured"] for at in found if at["source"] == served), 2)


def _attack(goal: str) -> dict[str, Any]:
    return next(r for r in read("attack")["results"] if r["goal"] == goal)


def _compiled(method: str, dtype: str, name: str = "compiled", batch: int = 1) -> str:
    """Median speed-up over HF generate, compiled."""
    rows = [r for r in read(name)["results"]["methods"]
            if (r["dtype"], r["batch"]) == (dtype, batch)]  # fmt: skip
    return times(_method(rows, method)["speedup_p20_p50_p80"][1])


def _one_branch(method: str) -> str:
    found = read("trees_one_branch")["results"]["methods"]
    return next(f"{m['tokens_per_pass']:.2f}" for m in found if m["method"] == method)


def _trees() -> dict[str, dict[str, Any]]:
    return {m["method"]: m for m in read("trees_speed")["results"]["methods"]}


def _over(baseline: str, source: str, method: str) -> str:
    """Tokens per second over those of a baseline, in one run."""
    found = read(source)["results"]["methods"]
    ours, theirs = (_method(found, name)["tokens_per_second"] for name in (method, baseline))
    return times(ours / theirs)


def _quickstart() -> str:
    """What each command of the README took."""
    found = read("quickstart")
    threads = found["conditions"]["threads"]
    took = ", ".join(f"{seconds} s" for seconds in found["results"].values())
    plural = "s" if threads > 1 else ""
    return f"{took} on {threads} thread{plural} of a shared {found['conditions']['processor']}"


def _vllm(name: str, batch: int, method: str) -> dict[str, Any]:
    found = next(r for r in read(name)["results"] if r["batch"] == batch)
    return _method(found["methods"], method)


def _minutes() -> str:
    """What calibration took for the smallest model, after its answers."""
    took = read("depth_smollm2")["seconds"]
    seconds = sum(s for stage, s in took.items() if stage != "collect")
    return f"{seconds / 60:.0f} minutes"


def _gate(answer: str) -> float:
    """What a gate of SmolLM2 costs in layers, not compiled."""
    return read("gate_costs_smollm2")["results"]["uncompiled"][answer]


_SMALL = "modes_smollm2_batch_1"
_GEMMA, _CODER, _LARGER = "gemma3_270m", "qwen2_5_coder_0_5b", "qwen2_5_coder_1_5b"


def _of_run(method: str, source: str) -> dict[str, Any]:
    return _method(read(source)["results"], f"{method}, compiled")


def _with_auto() -> list[models.Choice]:
    """Of exits in all compiled runs, where mode "auto" was one of the methods."""
    found = [choice for run in models.runs() for choice in models.choices(run)]
    return [choice for choice in found if choice.compiled and "auto" in choice.ways]


def _perfect_gates() -> list[float]:
    """What gates that know which tokens may exit are expected to add to drafts alone."""
    gains = [choice.expected("perfect") for choice in _with_auto()]
    return [gain for gain in gains if gain is not None]


def _expected(source: str) -> str:
    """What exits were expected to add to drafts alone in a run with mode "auto"."""
    expected = next(models.choices(read(source))).expected("both")
    assert expected is not None
    return times(expected)


def _measured_and_expected() -> str:
    """What exits add to drafts alone over what was expected of them, compiled."""
    found = [
        gain / expected
        for run in models.runs()
        for choice in models.choices(run)
        if choice.compiled and (expected := choice.expected("both")) is not None
        for gain in models.gains(run, choice)
    ]
    return models.span(found)


def _eight(source: str) -> str:
    """The time of a pass of eight tokens in that of one, at batch 1."""
    whole = read(source)["loop_costs"][0]["whole"]
    return times(whole["8"] / whole["1"])


def _gain(
    source: str,
    *,
    certified: bool = False,
    speed: Callable[[dict[str, Any]], float] = models.p50,
) -> str:
    """What exits add to drafts alone in a run."""
    run = read(source)
    found = [
        gain
        for choice in models.choices(run)
        if choice.compiled and (choice.risk is not None) == certified
        for gain in models.gains(run, choice, speed)
    ]
    return models.span(found)


def _expected_and_measured(what: str) -> str:
    """Of lossless, compiled: tokens of a step, and its time in steps of mode "off"."""
    auto, off, lossless = (_of_run(m, CERTIFIED) for m in ("auto, risk 0.02", "off", "lossless"))
    tokens = auto["expected_tokens_per_step"]["lossless"], lossless["tokens_per_step"]
    gains = (
        auto["expected"]["lossless"],
        off["decoding_ms_per_token"] / lossless["decoding_ms_per_token"],
    )
    costs = [n / gain for n, gain in zip(tokens, gains, strict=True)]
    return "{:.2f} and {:.2f}".format(*(tokens if what == "tokens" else costs))


def _load(rate: float) -> str:
    """Tokens per second of a server under load, over those of vLLM."""
    found = [row for row in read("vllm_load")["results"] if row["requests_per_second"] == rate]
    own, theirs = (
        next(row["tokens_per_second"] for row in found if row["server"] == server)
        for server in ("tide serve", "vLLM")
    )
    return times(own / theirs)


def _assisted(method: str) -> str:
    """In the run with a smaller model of the family as draft model, not compiled."""
    return times(_method(read("assisted")["results"]["methods"], method)["speedup"])


FIGURES: dict[str, Callable[[], str]] = {
    # What exits add to drafts alone, in one run of a model.
    "gain_small": lambda: _gain(_SMALL),
    **{
        f"gain_{name}_{batch}": lambda model=model, batch=batch: _gain(
            f"modes_{model}_bf16_batch_{batch}"
        )
        for name, model, batch in (
            ("gemma", _GEMMA, 1),
            ("coder", _CODER, 1),
            ("coder", _CODER, 4),
            ("larger", _LARGER, 1),
            ("larger", _LARGER, 4),
        )
    },
    "gain_larger_by_time": lambda: _gain(
        f"modes_{_LARGER}_bf16_batch_1", speed=lambda of: 1 / of["ms_per_token"]
    ),
    "gain_coder_certified": lambda: _gain(f"modes_{_CODER}_bf16_certified", certified=True),
    "gain_larger_certified": lambda: _gain(f"modes_{_LARGER}_bf16_certified", certified=True),
    "measured_over_expected": _measured_and_expected,
    "expected_gemma": lambda: _expected(f"modes_{_GEMMA}_bf16_batch_1"),
    "coder_amx_exits": lambda: percent(
        _of_run("exit, threshold scale 1", f"modes_{_CODER}_bf16_batch_1")["exit_rate"], 0
    ),
    "coder_tokens": lambda: " and ".join(
        f"{_of_run(method, f'modes_{_CODER}_bf16_certified')['tokens_per_step']:.2f}"
        for method in ("lossless", "exit, risk 0.02")
    ),
    "coder_head": lambda: _in_layers("head", "depth_qwen2_5_coder_0_5b_bf16"),
    "amx_eight": lambda: _eight("depth_qwen2_5_coder_1_5b_bf16"),
    "perfect_gates": lambda: models.span(_perfect_gates()),
    "auto_least": lambda: f"{min(c.auto_of_fastest for c in _with_auto()):.2f}",
    "certified_off": lambda: times(models.median(read(CERTIFIED), "off, compiled")),
    "batch_4_off": lambda: _compiled("off, compiled", "bfloat16", batch=4),
    "certified_tokens": lambda: _expected_and_measured("tokens"),
    "certified_cost": lambda: _expected_and_measured("cost"),
    "load_8": lambda: _load(8.0),
    "assisted": lambda: _assisted("assisted generation"),
    "assisted_ours": lambda: _assisted("context"),
    "compiled_lookup": lambda: _over(
        "prompt lookup", "compiled_qwen2_5_coder_0_5b", "lossless, compiled"
    ),
    "compiled_cold": lambda: str(
        _method(read("compiled_cold")["results"]["methods"], "off, compiled")["first_call_seconds"]
    ),
    "commits_off": lambda: times(read("commits_speed_off")["results"][0]["speedup_p20_p50_p80"][1]),
    **{
        f"vllm_{name}_{batch}": lambda batch=batch, method=method: times(
            _vllm("vllm_drafts", batch, method)["tokens_per_second"]
            / _vllm("vllm_drafts", batch, "vLLM")["tokens_per_second"]
        )
        for name, method in (("drafts", "drafts"), ("shared", "drafts, cross-request"))
        for batch in (1, 8, 32)
    },
    **{
        f"vllm_ahead_{batch}": lambda batch=batch: times(
            _vllm("vllm_drafts", batch, "drafts, cross-request")["speedup"]
        )
        for batch in (1, 8, 32)
    },
    **{
        f"vllm_no_amx_{batch}": lambda batch=batch: times(
            _vllm("vllm_drafts_no_amx", batch, "drafts")["speedup_over_vllm"]
        )
        for batch in (1, 8, 32)
    },
    "vllm_no_amx_32_median": lambda: times(
        _vllm("vllm_drafts_no_amx_32", 32, "drafts")["speedup_over_vllm"]
    ),
    "vllm_long": lambda: times(_vllm("vllm_long_prompts", 1, "drafts")["speedup"]),
    "vllm_long_decoding": lambda: times(
        _vllm("vllm_long_prompts", 1, "drafts")["decode_only_speedup"]
    ),
    "vllm_no_amx_tokens": lambda: (
        f"{_vllm('vllm_drafts_no_amx', 1, 'drafts')['tokens_per_step']:.2f}"
    ),
    "trees_tokens": lambda: (
        f"{_method(read('trees')['results']['methods'], 'tree, 32 nodes')['tokens_per_pass']:.2f}"
    ),
    **{
        f"vllm_{name}_{batch}": lambda method=method, batch=batch: times(
            _vllm("vllm_exits_no_amx", batch, method)["speedup"]
        )
        for name, method in (("no_exits", "gates on, no exits"), ("exits", "calibrated exits"))
        for batch in (1, 8, 32)
    },
    "vllm_exit_share_1": lambda: (
        f"{_vllm('vllm_exits', 1, 'all exit at half depth')['share_of_ideal']:.2f}"
    ),
    "trees_bf16": lambda: _compiled("lossless, trees, compiled", "bfloat16", "trees_speed"),
    "trees_over_eager": lambda: _over("HF eager", "trees_speed", "lossless, trees, compiled"),
    "trees_uncompiled_no_amx": lambda: _over("HF eager", "compiled_no_amx", "lossless, trees"),
    "one_branch": lambda: _one_branch("one branch, 10 nodes"),
    "one_branch_chain": lambda: _one_branch("chain"),
    "one_branch_prompts": lambda: str(read("trees_one_branch")["conditions"]["prompts"]),
    "trees_off": lambda: _compiled("off, compiled", "bfloat16", "trees_speed"),
    "trees_uncompiled": lambda: _compiled("lossless, trees", "bfloat16", "trees_speed"),
    "trees_first_call": lambda: (
        f"{_trees()['lossless, trees, compiled']['first_call_seconds']:.0f} s"
    ),
    "quickstart": _quickstart,
    "families": reference.families,
    "hero_calls": lambda: (
        f"{read('hero')['results']['layers_run']} of {read('hero')['results']['layers_full']}"
    ),
    "targets": lambda: str(len({row["target"] for row in read("kernels")["compiled"]})),
    "serve_start": lambda: f"{read('vllm_load')['conditions']['seconds_to_start']['tide serve']} s",
    "exits_alone": lambda: times(_exits(drafts=False)["speedup"]),
    "exits_saved": lambda: _saved(_exits(drafts=False)),
    "exits_drafts_differ": lambda: percent(_exits(drafts=True)["disagreement"]),
    "identical_lookup": lambda: _lossless("prompt lookup")["exact_match_outputs"],
    "identical_context": lambda: _lossless("context")["exact_match_outputs"],
    "off": _off,
    "four_rows": _batch_of_four,
    "overhead": lambda: _span([r["ratio"] for r in read("runner_overhead")["results"]], "{:.3f}"),
    "gate_no": lambda: f"{_gate('no'):.2f}",
    "gate_yes": lambda: f"{_gate('yes'):.2f}",
    "exported_draft": lambda: times(_bench("assisted generation")["speedup"]),
    "router_layers": lambda: _in_layers("router"),
    "exit_head_layers": lambda: _in_layers("exit_head"),
    "head_layers": lambda: _in_layers("head"),
    "noise_bf16": lambda: f"{_span(_noise('bf16'))} %",
    "noise_fp32": lambda: f"{max(_noise('fp32 against fp32')):.2f} %",
    "safest_spec_bench": lambda: _certified("gsm8k", "spec_bench", 0.125),
    "safest_gsm8k": lambda: _certified("gsm8k", "gsm8k", 0.125),
    "attack_start": lambda: percent(_attack("wrong")["start"]["mean"]),
    "attack_end": lambda: percent(_attack("wrong")["end"]["mean"]),
    "attack_promised": lambda: percent(_attack("wrong")["served"]["certified_bound"]),
    "attack_fired": lambda: str(_attack("wrong")["served"]["drift_detected_after"]),
    "attack_deep": lambda: percent(_attack("deep")["end"]["mean"]),
    "depth_tokens": lambda: f"{sum(read('depth_smollm2')['tokens'].values()):,}",
    "depth_fitted": _minutes,
}


def figure(name: str) -> str:
    """A figure by its name, not to be broken before its sign."""
    return FIGURES[name]().replace(" %", "\u00a0%").replace(" s", "\u00a0s")
