"""Writes the tables of the docs from the result files that the benchmarks wrote, and from the code.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a figure within a sentence between
`<!-- figure: NAME -->` and `<!-- end -->`; nothing between them is typed by hand. `--check` only
says whether they are up to date. What comes from the code is made in `reference.py`, figures in
`figures.py`.

    python scripts/tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (\w+) -->).*?(<!-- end -->)")
MODELS = ("smollm2", "gemma3_270m", "qwen2_5_coder_0_5b")


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(of: dict[str, Any]) -> str:
    """One line in small print under a table."""
    parts = [f"{name.replace('_', ' ')}: {value}" for name, value in of.items()]
    return f"\n\n*{'; '.join(parts)}.*"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def runner_overhead() -> str:
    found = read("runner_overhead")
    rows = [(r["dtype"], r["rows"], f"{r['ratio']:.3f}") for r in found["results"]]
    return table(("dtype", "rows", "runner / bare model call"), rows) + conditions(
        found["conditions"]
    )


def _limit(name: str) -> str:
    found = read(name)
    rows = [
        (r["dtype"], r["rows"], p["profile"], f"{p['speedup']:.3f}", f"{p['limit']:.3f}",
         f"{p['reached']:.3f}", f"{p['layer_calls']} of {p['layer_calls_full']}")
        for r in found["results"]
        for p in r["profiles"]
    ]  # fmt: skip
    head = ("dtype", "rows", "profile", "speed-up", "limit", "reached", "layer calls")
    return table(head, rows) + conditions(found["conditions"])


def lossless() -> str:
    found = read("lossless")
    rows = [
        (s["side"], s["ms_per_token"], f"{s['speedup']:.2f}x",
         " / ".join(f"{s['speedup_of_a_prompt'][p]:.2f}" for p in ("p20", "p50", "p80")),
         s.get("tokens_per_pass", ""), s["identical_outputs"])
        for s in found["results"]["sides"]
    ]  # fmt: skip
    gap = found["results"]["logit_gap_where_outputs_part"]
    head = ("side", "ms/token", "speed-up", "of a prompt, p20 / p50 / p80", "tokens per pass",
            "identical to bare")  # fmt: skip
    note = (
        f"\n\nWhere two outputs part, the two likeliest tokens are {gap['median']} apart in the "
        f"median and {gap['largest']} at most (logits)."
    )
    return table(head, rows) + note + conditions(found["conditions"])


def lossless_by_category() -> str:
    sides = read("lossless")["results"]["sides"][1:]
    rows = [
        (category, *(f"{side['by_category'][category]:.2f}x" for side in sides))
        for category in sides[0]["by_category"]
    ]
    return table(("category", *(side["side"] for side in sides)), rows)


def bench(*, short: bool = False) -> str:
    """What `tide bench` measured; in short without the uncertified points of the curve."""
    found = read("bench_smollm2")
    rows = []
    for s in found["results"]:
        ours, certificate = "layers_run" in s, s.get("certificate")
        if short and ours and s["mode"] == "exit" and not certificate:
            continue
        rows.append((
            s["side"], s["ms_per_token"], f"{s['speedup']:.2f}x",
            " / ".join(f"{s['speedup_of_a_prompt'][p]:.2f}" for p in ("p20", "p50", "p80")),
            percent(1 - s["layers_run"] / s["layers_full"]) if ours else "",
            percent(s["exit_rate"]) if ours else "",
            _fine(s["disagreement"]) if ours else "",
            f"{100 * certificate['risk']:g} %" if certificate else "",
        ))  # fmt: skip
    head = ("side", "ms/token", "speed-up", "of a prompt, p20 / p50 / p80", "layer calls saved",
            "tokens that left", "differ from full depth", "promised")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def calibration_heads() -> str:
    heads = read("calibration_smollm2")["heads"]
    rows = [
        (layer + 1, percent(fitted), percent(plain))
        for layer, fitted, plain in zip(
            heads["layers"], heads["agreement"], heads["identity"], strict=True
        )
    ]
    note = f"\n\nThe vocabulary read holds {percent(heads['coverage'])} of the full model's tokens."
    return table(("after layers", "affine head agrees", "identity head agrees"), rows) + note


def calibration_gates() -> str:
    found = read("calibration_smollm2")
    rows = []
    for row in found["gates"]:
        cells = [
            f"{percent(at['leave'])} ({percent(at['wrong'])} wrong)"
            for at in (row[risk] for risk in ("0.01", "0.02", "0.05"))
        ]
        rows.append((row["layer"] + 1, row["head"], row["gate"], f"{row['auc']:.3f}", *cells))
    head = ("after layers", "head", "gate", "AUC", "leave, for 1 %", "for 2 %", "for 5 %")
    return table(head, rows)


def calibration_exits() -> str:
    found = read("calibration_smollm2")
    rows = []
    for risk, options in found["exits"].items():
        for at in options:
            after = ", ".join(str(layer + 1) for layer in at["layers"])
            rows.append(
                (f"{float(risk):.0%}", after, percent(at["leave"]), percent(at["wrong"]),
                 percent(at["depth_saved"]), f"{at['speedup']:.3f}")
            )  # fmt: skip
    head = ("for risk", "exits after layers", "leave", "wrong", "depth saved", "expected speed-up")
    return table(head, rows)


def calibration_stages() -> str:
    found = read("calibration_smollm2")
    rows = [
        (stage, seconds, found["peak_mb"][stage]) for stage, seconds in found["seconds"].items()
    ]
    head = ("stage", "seconds", "peak memory so far, MB")
    return table(head, rows) + conditions(
        {**found["conditions"], "documents": found["documents"], "tokens": found["tokens"]}
    )


def assess() -> str:
    found = [read(f"assess_{name}") for name in MODELS]
    rows = [
        (f["conditions"]["model"], f["n_layers"],
         next(k + 1 for k, share in enumerate(f["agreement"]) if share >= 0.5),
         percent(f["agreement"][-2]),
         f"{percent(min(f['without'][2:-2]))} to {percent(max(f['without'][2:-2]))}",
         ", ".join(str(layer + 1) for layer in f["checkpoints"]), f"{f['ceiling']:.2f}x",
         f"{f['costs']['head'] / f['costs']['layer']:.1f}", f["tokens"])
        for f in found
    ]  # fmt: skip
    head = ("model", "layers", "half agree after", "agree one layer before the end",
            "same without one middle layer", "checkpoints suggested", "ceiling, no training",
            "head costs, in layers", "tokens")  # fmt: skip
    return table(head, rows) + conditions({k: v for k, v in found[0]["conditions"].items()
                                           if k != "model"})  # fmt: skip


def calibration_others() -> str:
    rows, made = [], [read(f"calibration_{name}") for name in MODELS[1:]]
    for found in made:
        heads = found["heads"]
        for layer, fitted, plain in zip(
            heads["layers"], heads["agreement"], heads["identity"], strict=True
        ):
            rows.append(
                (found["conditions"]["model"], layer + 1, percent(fitted), percent(plain),
                 found["tokens"]["fit"], f"{sum(found['seconds'].values()):.0f}")
            )  # fmt: skip
    head = ("model", "after layers", "affine head agrees", "identity head agrees",
            "tokens fitted on", "seconds in all")  # fmt: skip
    return table(head, rows)


def risk_simulation() -> str:
    found = read("risk_simulation")
    rows = [
        (name, percent(row["violations"]), f"{100 * row['mean_true_risk']:.2f} %")
        for name, row in found["thresholds"].items()
    ]
    head = ("threshold chosen by", "breaks the risk", "mean true risk of the threshold")
    alarms, noticed = found["false_alarms"], found["median_sequences_until_noticed"]
    note = (
        f"\n\nThe watch: false alarms in {percent(alarms['share'])} of {alarms['runs']} runs of "
        f"{alarms['sequences']} sequences at the promised risk. Sequences until it fires, median: "
        + ", ".join(f"{n:g} at {times} times the risk" for times, n in noticed.items())
        + "."
    )
    return table(head, rows) + note + conditions(found["conditions"])


def _fine(share: float) -> str:
    return f"{100 * share:.2f} %"


def certificates() -> str:
    rows, of = [], [read(f"certificates_{name}") for name in ("spec_bench", "gsm8k")]
    for found in of:
        for row in found["results"]:
            made = row["certificate"]
            for at in (row[where] for where in ("same_source", "other_source") if where in row):
                after = at.get("after_the_breaker")
                rows.append((
                    found["conditions"]["certified_on"], _fine(made["risk"]),
                    f"{made['boldness']:g}", f"{_fine(made['estimate'])} of {made['sequences']}",
                    at["source"],
                    f"{_fine(at['measured'])} ± {_fine(at['standard_error'])} of {at['sequences']}",
                    f"after {at['watch_fired_after']}" if at["watch_fired_after"] else "silent",
                    f"{after['identical']} of {after['sequences']}, {after['early_tokens']} early"
                    if after else "",
                ))  # fmt: skip
    head = ("certified on", "promised", "boldness", "measured there", "fresh prompts of",
            "measured", "watch", "then identical to full depth, tokens that left")  # fmt: skip
    missing = [
        f"{_fine(risk)} on {found['conditions']['certified_on']}"
        for found in of
        for risk in found["conditions"]["risks"]
        if risk not in [row["certificate"]["risk"] for row in found["results"]]
    ]
    note = f"\n\nNot shown to hold at any setting: {', '.join(missing)}." if missing else ""
    return table(head, rows) + note + "".join(conditions(found["conditions"]) for found in of)


def noise_floor() -> str:
    found = read("noise_floor")
    rows = [(r["read"], _fine(r["share"]), r["differs"]) for r in found["results"]]
    head = ("read again as", "differs", "tokens")
    return table(head, rows) + conditions(found["conditions"])


def attack() -> str:
    found = read("attack")
    rows = []
    for r in found["results"]:
        served = r.get("served", {})
        after = served.get("after_the_breaker")
        rows.append((
            r["goal"], r["tried"], percent(r["start"]["mean"]), percent(r["end"]["mean"]),
            percent(r["end"]["best"]), percent(served["promised"]) if served else "",
            f"after {served['watch_fired_after']}" if served.get("watch_fired_after") else "silent",
            f"{after['identical']} of {after['sequences']}, {after['early_tokens']} early"
            if after else "",
        ))  # fmt: skip
    head = ("goal", "prompts tried", "at the start, mean", "found, mean", "found, best",
            "promised", "watch", "then identical to full depth, tokens that left")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def vllm(name: str) -> str:
    found = read(name)
    rows = []
    for r in found["results"]:
        for s in r["sides"]:
            drafted = s.get("drafted_tokens")
            rows.append((
                r["batch"], s["side"], s["tokens_per_second"], f"{s['speedup']:.2f}x",
                f"{s['speedup_of_decoding']:.2f}x",
                " to ".join(f"{s['speedup_of_a_round'][k]:.2f}" for k in ("least", "most")),
                f"{s['reached']:.2f} of {s['limit']:.2f}x" if "limit" in s else "",
                f"{s['accepted_tokens']} of {drafted}" if drafted else "",
                f"{s['tokens_per_step']:.2f}" if drafted else "",
                f"{s['identical_outputs']} of {s['outputs']}",
            ))  # fmt: skip
    head = (
        "batch", "side", "tokens/s", "speed-up", "of decoding", "of a round",
        "reached of the limit", "drafts accepted", "tokens per step", "identical to stock",
    )  # fmt: skip
    keep = [i for i, _ in enumerate(head) if any(str(row[i]) for row in rows)]
    return table([head[i] for i in keep], ([row[i] for i in keep] for row in rows)) + conditions(
        found["conditions"]
    )


def lm_eval() -> str:
    found, rows = read("lm_eval"), []
    for r in found["results"]:
        counts = r["generated"] or r["scored"]
        rows.append((
            r["task"], r["side"],
            "; ".join(
                f"{name} {m['value']:.3f} ± {m['standard_error']:.3f}"
                for name, m in r["metrics"].items()
            ),
            f"{r['same_as_stock']} of {r['documents']}",
            percent(counts["exit_rate"]) if counts.get("exited_tokens") else "",
            percent(counts["layers_saved"]) if counts else "",
            percent(counts["differed"] / counts["total_tokens"]) if counts.get("audited") else "",
        ))  # fmt: skip
    head = ("task", "side", "metrics, ± standard error", "answers as stock", "tokens that left",
            "layers saved", "tokens said that differ from full depth")  # fmt: skip
    return table(head, rows) + conditions(found["conditions"])


def from_code(name: str) -> Callable[[], str]:
    """A table that `reference.py` makes; it imports the library, so it is imported when needed."""
    return lambda: getattr(import_module("reference"), name)()


TABLES: dict[str, Callable[[], str]] = {
    "runner_overhead": runner_overhead,
    "decode_limit": lambda: _limit("decode_limit_smollm2"),
    "decode_limit_random": lambda: _limit("decode_limit_random"),
    "decode_limit_random_bf16": lambda: _limit("decode_limit_random_bf16"),
    "lossless": lossless,
    "lossless_by_category": lossless_by_category,
    "bench": bench,
    "bench_short": lambda: bench(short=True),
    "calibration_heads": calibration_heads,
    "calibration_gates": calibration_gates,
    "calibration_exits": calibration_exits,
    "calibration_stages": calibration_stages,
    "assess": assess,
    "calibration_others": calibration_others,
    "risk_simulation": risk_simulation,
    "certificates": certificates,
    "noise_floor": noise_floor,
    "attack": attack,
    "lm_eval": lm_eval,
    "vllm_exits": lambda: vllm("vllm_exits"),
    "vllm_drafts": lambda: vllm("vllm_drafts"),
    "models": from_code("models"),
    "refused": from_code("refused"),
    "refused_options": from_code("refused_options"),
    "settings": from_code("settings"),
    "sequences": from_code("sequences"),
    "commands": from_code("commands"),
}


def made(name: str) -> str:
    try:
        return TABLES[name]()
    except FileNotFoundError as error:
        return f"*Not measured yet: there is no {Path(error.filename).name}.*"


def filled(page: str) -> str:
    """A page with its tables and figures as they should be."""
    if re.search(r"^ *<!-- figure:", page, re.MULTILINE):
        raise SystemExit("A figure begins a line, which Markdown takes for a block of HTML.")
    page = SECTION.sub(lambda m: f"{m[1]}{made(m[2])}\n{m[3]}", page)
    return FIGURE.sub(lambda m: f"{m[1]}{import_module('figures').figure(m[2])}{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    for page in PAGES:
        before = page.read_text()
        after = filled(before)
        if before != after and args.check:
            raise SystemExit(f"{page.relative_to(ROOT)} is not what scripts/tables.py writes.")
        page.write_text(after)


if __name__ == "__main__":
    main()
