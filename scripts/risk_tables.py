"""The tables of the docs that report risk, drift and quality, each from a result file."""

from __future__ import annotations

from typing import Any

from results import conditions, percent, read, table

AFTER_FALLBACK = ("exact-match outputs after fallback", "exited tokens after fallback")


def simulation() -> str:
    found = read("risk_simulation")
    rows = [
        (name, percent(row["violations"]), percent(row["mean_true_risk"], 2))
        for name, row in found["thresholds"].items()
    ]
    head = ("threshold chosen by", "exceeds the risk", "mean true risk of the threshold")
    alarms, noticed = found["false_alarms"], found["median_sequences_until_noticed"]
    late = dict(found["noticed_after_good_sequences"])
    good = late.pop("good")
    note = (
        f"\n\nDrift monitor: false alarms in {percent(alarms['share'])} of {alarms['runs']} runs "
        f"of {alarms['sequences']} sequences at the certified bound. Median number of sequences "
        f"until it detects drift: {_noticed(noticed)}; if it begins after {good} sequences at half "
        f"the bound: {_noticed(late)}."
    )
    return table(head, rows) + note + conditions(found["conditions"])


def certify_simulation() -> str:
    found = read("certify_simulation")
    return _certified(found) + conditions(found["conditions"])


def vllm_simulation() -> str:
    found = read("vllm_simulation")
    rows = [
        (f"{row['times_the_bound']:g} times the bound", *_fired(row["vllm"]), *_fired(row["alone"]))
        for row in found["monitor"]
    ]
    head = ("true risk", "fired in vLLM", "after requests", "fired alone", "after requests")
    return _certified(found) + "\n\n" + table(head, rows) + conditions(found["conditions"])


def _certified(found: dict[str, Any]) -> str:
    """Which settings were certified, and how often that broke the bound."""
    given = found["conditions"]
    rows = [
        (
            percent(float(risk)) if float(risk) else "none certified", count,
            "yes" if float(risk) > given["risk"] else "no",
        )
        for risk, count in found["certified_by_true_risk"].items()
    ]  # fmt: skip
    head = ("true risk of the certified setting", "certifications", "bound broken")
    return table(head, rows) + (
        f"\n\nBroken in {found['broken']} of {given['certifications']} certifications; on average, "
        f"delta allows {percent(given['delta'])}."
    )


def _fired(of: dict[str, Any]) -> tuple[str, str]:
    """How often monitors fired, and after how many requests in the median."""
    after = of["median_requests_until_fired"]
    return percent(of["share_that_fired"]), "" if after is None else f"{after:.0f}"


def certificates(*names: str) -> str:
    rows, sources = [], [read(f"certificates_{name}") for name in names]
    for found in sources:
        for row in found["results"]:
            made = row["certificate"]
            for at in (row[where] for where in ("same_source", "other_source") if where in row):
                measured, error = percent(at["measured"], 2), percent(at["standard_error"], 2)
                rows.append((
                    found["conditions"]["certified_on"], percent(made["risk"], 2),
                    f"{made['threshold_scale']:g}",
                    f"{percent(made['estimate'], 2)} of {made['sequences']}", at["source"],
                    f"{measured} ± {error} of {at['sequences']}", *_drift(at),
                ))  # fmt: skip
    head = (
        "certified on", "certified bound", "threshold scale", "measured in certification",
        "fresh prompts from", "measured on them", "drift detected", *AFTER_FALLBACK,
    )  # fmt: skip
    missing = []
    for run, found in enumerate(sources, 1):
        held = [row["certificate"]["risk"] for row in found["results"]]
        risks = [percent(risk, 2) for risk in found["conditions"]["risks"] if risk not in held]
        if risks:
            missing.append(
                f"run {run} ({found['conditions']['certified_on']}) for {', '.join(risks)}"
            )
    note = f"\n\nNo setting could be certified in {'; in '.join(missing)}." if missing else ""
    return table(head, rows) + note + "".join(conditions(f["conditions"]) for f in sources)


def noise_floor() -> str:
    found = read("noise_floor")
    rows = [(r["read"], percent(r["share"], 2), r["differs"]) for r in found["results"]]
    head = ("tokens per pass", "disagreement", "tokens that differ")
    return table(head, rows) + conditions(found["conditions"])


def attack() -> str:
    found = read("attack")
    rows = []
    for r in found["results"]:
        served = r.get("served", {})
        rows.append((
            r["goal"], r["tried"], percent(r["start"]["mean"]), percent(r["end"]["mean"]),
            percent(r["end"]["best"]), percent(served["certified_bound"]) if served else "",
            *_drift(served),
        ))  # fmt: skip
    head = ("goal", "prompts tried", "mean at the start", "mean found", "best found",
            "certified bound", "drift detected", *AFTER_FALLBACK)  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def lm_eval() -> str:
    found, rows = read("lm_eval"), []
    for r in found["results"]:
        counts = r["generated"] or r["scored"]
        rows.append((
            r["task"], r["method"],
            "; ".join(
                f"{name} {m['value']:.3f} ± {m['standard_error']:.3f}"
                for name, m in r["metrics"].items()
            ),
            f"{r['same_as_hf_generate']} of {r['documents']}",
            percent(counts["exit_rate"]) if counts.get("exited_tokens") else "",
            percent(counts["layers_saved"]) if counts else "",
            percent(counts["differed"] / counts["total_tokens"]) if counts.get("audited") else "",
        ))  # fmt: skip
    head = ("task", "method", "metrics ± standard error", "same answers as HF generate",
            "exit rate", "layers saved", "disagreement (audited)")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def _noticed(sequences: dict[str, float]) -> str:
    """After how many sequences drift was detected, by how far the bound was exceeded."""
    return ", ".join(f"{n:.0f} at {factor} times the bound" for factor, n in sequences.items())


def _drift(served: dict[str, Any]) -> tuple[str, str, str]:
    """When drift was detected, and what was served after the fallback to full depth."""
    noticed, after = served.get("drift_detected_after"), served.get("after_fallback")
    return (
        f"after {noticed}" if noticed else "no",
        f"{after['exact_match']} of {after['sequences']}" if after else "",
        str(after["exited_tokens"]) if after else "",
    )
