"""Draws the pictures of the docs from the result files that the benchmarks wrote.

python scripts/plots.py
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from tables import ROOT, read


def risk_speed() -> None:
    """Speed-up over the share of tokens that differ, with certified risks marked."""
    found = read("risk_speed")
    sides = [s for s in found["results"][0]["sides"] if "disagreement" in s]
    risks = [100 * s["disagreement"] for s in sides]
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    axes.plot(risks, [s["speedup"] for s in sides], "o-", color="#0b6e99", label="mean")
    low, high = ([s["speedup_of_a_prompt"][p] for s in sides] for p in ("p20", "p80"))
    axes.fill_between(risks, low, high, color="#0b6e99", alpha=0.15, label="p20 to p80 of prompts")
    for side, risk in zip(sides, risks, strict=True):
        name = "lossless" if side["boldness"] is None else f"{side['boldness']:g}"
        axes.annotate(name, (risk, side["speedup"]), (3, 6), textcoords="offset points", fontsize=8)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(
        xlabel="tokens that differ from full depth, %", ylabel="speed-up over generate",
        title=f"{found['conditions']['model']}, bf16, batch 1 (points: boldness)",
    )  # fmt: skip
    axes.legend(loc="lower right")
    figure.savefig(ROOT / "docs" / "risk_speed.png", dpi=120)


if __name__ == "__main__":
    risk_speed()
