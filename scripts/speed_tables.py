"""The tables of the docs that report speed, each from a result file."""

from __future__ import annotations

from typing import Any

from results import conditions, percent, read, table, times

PER_PROMPT = "per-prompt speed-up p20 / p50 / p80"


def runner_overhead() -> str:
    found = read("runner_overhead")
    rows = [(r["dtype"], r["batch"], f"{r['ratio']:.3f}") for r in found["results"]]
    head = ("dtype", "batch", "runner / HF forward pass")
    return table(head, rows) + conditions(found["conditions"])


def decode_limit(name: str) -> str:
    found = read(name)
    rows = [
        (r["dtype"], r["batch"], s["exit_schedule"], f"{s['speedup']:.3f}",
         f"{s['ideal_speedup']:.3f}", f"{s['share_of_ideal']:.3f}",
         f"{s['layer_calls']} of {s['layer_calls_full']}")
        for r in found["results"]
        for s in r["exit_schedules"]
    ]  # fmt: skip
    head = ("dtype", "batch", "exit schedule", "speed-up", "ideal speed-up", "share of ideal",
            "layer calls")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def lossless(name: str = "lossless") -> str:
    found = read(name)
    rows = [
        (m["method"], m["ms_per_token"], times(m["speedup"]), _per_prompt(m),
         m.get("tokens_per_pass", ""), m["exact_match_outputs"])
        for m in found["results"]["methods"]
    ]  # fmt: skip
    gap = found["results"]["logit_gap_where_outputs_diverge"]
    head = ("method", "ms/token", "speed-up", PER_PROMPT, "tokens per pass", "exact-match outputs")
    note = "" if not gap["count"] else (
        f"\n\nWhere outputs diverge, the logits of the two likeliest tokens differ by "
        f"{gap['median']} in the median and by {gap['largest']} at most."
    )  # fmt: skip
    return table(head, rows) + note + conditions(found["conditions"])


def assisted() -> str:
    return lossless("assisted")


def lossless_by_category() -> str:
    methods = read("lossless")["results"]["methods"][1:]
    rows = [
        (category, *(times(method["by_category"][category]) for method in methods))
        for category in methods[0]["by_category"]
    ]
    return table(("category", *(method["method"] for method in methods)), rows)


def bench() -> str:
    """What `tide bench` measured on the smallest model."""
    found = read("bench_smollm2")
    rows = []
    for m in found["results"]:
        ours, certificate = "layers_run" in m, m.get("certificate")
        if m["method"] == "assisted generation":
            continue  # by an exit of the model itself; by a good small model, see `assisted`
        rows.append((
            m["method"], m["ms_per_token"], times(m["speedup"]), _per_prompt(m),
            percent(1 - m["layers_run"] / m["layers_full"]) if ours else "",
            percent(m["exit_rate"]) if ours else "",
            percent(m["disagreement"], 2) if ours else "",
            f"{100 * certificate['risk']:g} %" if certificate else "",
        ))  # fmt: skip
    head = ("method", "ms/token", "speed-up", PER_PROMPT, "layer calls saved", "exit rate",
            "disagreement (audited)", "certified bound")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def compiled(name: str = "compiled") -> str:
    found = read(name)
    rows = [
        (m["dtype"], m["batch"], m["method"], m["tokens_per_second"],
         " / ".join(f"{q:.2f}" for q in m["speedup_p20_p50_p80"]), m["same_batches"],
         m["first_call_seconds"])
        for m in found["results"]["methods"]
    ]  # fmt: skip
    head = ("dtype", "batch", "method", "tokens/s",
            "speed-up over HF compiled p20 / p50 / p80", "same text as HF eager",
            "first call, s")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def compiled_exits() -> str:
    found = read("compiled")
    rows = [
        (m["dtype"], percent(m["exits"], 0), m["ms_per_token"], m["limit_ms_per_token"],
         " / ".join(f"{q:.2f}" for q in m["share_of_limit_p20_p50_p80"]))
        for m in found["results"]["exits"]
    ]  # fmt: skip
    head = ("dtype", "tokens that exit at half depth", "ms/token", "limit, ms/token",
            "share of the limit p20 / p50 / p80")  # fmt: skip
    return table(head, rows)


def commits() -> str:
    found = read("commits_speed")
    rows = [
        (m["dtype"], m["batch"], m["mode"], m["old_tokens_per_second"], m["new_tokens_per_second"],
         " / ".join(f"{q:.2f}" for q in m["speedup_p20_p50_p80"]))
        for m in found["results"]
    ]  # fmt: skip
    head = ("dtype", "batch", "mode", "before, tokens/s", "after, tokens/s",
            "ratio p20 / p50 / p80")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def vllm(name: str) -> str:
    found = read(name)
    rows = []
    for r in found["results"]:
        for m in r["methods"]:
            drafted = m.get("drafted_tokens")
            rows.append((
                r["batch"], r["rounds"], m["method"], m["tokens_per_second"], times(m["speedup"]),
                times(m["decode_only_speedup"]),
                _over_rounds(m, r["rounds"]),
                times(m["ideal_speedup"]) if "ideal_speedup" in m else "",
                f"{m['share_of_ideal']:.2f}" if "share_of_ideal" in m else "",
                f"{m['accepted_tokens']} of {drafted}" if drafted else "",
                f"{m['tokens_per_step']:.2f}" if drafted else "",
                f"{m['exact_match_outputs']} of {m['outputs']}",
            ))  # fmt: skip
    head = ("batch", "repeats", "method", "tokens/s", "speed-up", "decode-only speed-up",
            "range over rounds", "ideal speed-up",
            "share of ideal", "draft tokens accepted", "tokens per step",
            "exact-match outputs")  # fmt: skip
    keep = [i for i, _ in enumerate(head) if any(str(row[i]) for row in rows)]
    return table([head[i] for i in keep], ([row[i] for i in keep] for row in rows)) + conditions(
        found["conditions"]
    )


def _over_rounds(method: dict[str, Any], rounds: int) -> str:
    """The spread of a speed-up; of few rounds all, since quantiles would hide most of it."""
    wide, narrow = method.get("range_over_rounds"), method.get("p20_p80_of_rounds")
    all_of_them = narrow is None or (wide is not None and rounds < 5)
    low, high = wide if all_of_them else narrow
    return f"{low:.2f} to {high:.2f} ({'all' if all_of_them else 'p20 to p80'})"


def vllm_load() -> str:
    found = read("vllm_load")
    rows = [
        (
            f"{r['requests_per_second']:g}", r["server"],
            f"{r['answered']} of {r['requests']}", r["aborted_by_client"],
            sum(r["errors"].values()), r["tokens_per_second"],
            " / ".join(map(str, r["first_token_ms_p50_p99"])),
            " / ".join(map(str, r["per_token_ms_p50_p99"])),
        )
        for r in found["results"]
    ]  # fmt: skip
    head = ("requests/s", "server", "answered", "aborted by the client", "lost, crossed or cut",
            "tokens/s", "first token, ms, p50 / p99", "per token, ms, p50 / p99")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def _per_prompt(method: dict[str, Any]) -> str:
    return " / ".join(f"{method['per_prompt_speedup'][p]:.2f}" for p in ("p20", "p50", "p80"))


def step_costs() -> str:
    found = read("step_costs")
    rows = []
    for of in found["results"]:
        ms = of["ms_per_token"]
        whole = sum(ms.values())
        parts = [f"{spent:.2f}" for spent in (*ms.values(), whole)]
        rows.append((of["method"], of["tokens_per_step"], *parts, percent(ms["host"] / whole)))
    names = [f"{part}, ms" for part in found["results"][0]["ms_per_token"]]
    head = ("method", "tokens per step", *names, "a token, ms", "of it the host")
    return table(head, rows) + conditions(found["conditions"])
