"""A simulation of certified thresholds and drift monitors: how often they fail at a known risk.

    python bench/risk_simulation.py --out bench/results/risk_simulation.json

Sequences have a known risk at each threshold. Errors cluster in sequences: each has an error rate
of its own, drawn from a beta distribution; one that is hard at one threshold is hard at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from measure import write
from rich.progress import track
from scipy.stats import beta

from tide.calibration.bounds import betting, hoeffding_bentkus, learn_then_test
from tide.drift import DriftMonitor

RISK, DELTA = 0.02, 0.05
CURVE = np.geomspace(0.001, 0.08, 24)  # true risk of each threshold, safest first
CONCENTRATION = 12.0  # of the beta distribution
GOOD = 3000  # sequences at half the bound before a drift

Choose = Callable[[np.ndarray], int | None]


def sequences(draw: np.random.Generator, risks: np.ndarray, n: int, tokens: int = 64) -> np.ndarray:
    """Losses of `n` sequences at each threshold, `[thresholds, n]`."""
    hard, coins = draw.random(n), np.sort(draw.random((n, tokens)), axis=1)
    a, b = CONCENTRATION * risks[:, None], CONCENTRATION * (1 - risks[:, None])
    rates = beta.ppf(hard, a, b)  # [thresholds, n]
    errors = [np.searchsorted(coins[k], rates[:, k]) for k in range(n)]
    return np.stack(errors, axis=1) / tokens


def best_looking(losses: np.ndarray) -> int | None:
    """The most aggressive threshold whose mean loss is within the risk: what people do by hand."""
    good = np.flatnonzero(losses.mean(1) <= RISK)
    return int(good[-1]) if len(good) else None


def certified(p_value: Callable[[np.ndarray, float], float]) -> Choose:
    """Learn-then-test with some p-value."""
    return lambda losses: learn_then_test(losses, RISK, DELTA, p_value)


def violations(choose: Choose, runs: int = 500, n: int = 300) -> tuple[float, float]:
    """Share of calibrations whose chosen threshold exceeds the risk; its mean true risk."""
    draw, exceeded, risks = np.random.default_rng(0), 0, []
    for _ in track(range(runs), description="calibrations"):
        picked = choose(sequences(draw, CURVE, n))
        if picked is not None:
            exceeded += CURVE[picked] > RISK
            risks.append(CURVE[picked])
    return float(exceeded / runs), float(np.mean(risks)) if risks else 0.0


def alarms(true_risk: float, runs: int, n: int, good: int = 0) -> list[int | None]:
    """For each run, after how many sequences the drift monitor fires; None if it never does.

    Args:
        true_risk: of the sequences that are counted.
        n: how many of them there are.
        good: sequences at half the bound that come first and are not counted.
    """
    draw, found = np.random.default_rng(3), []
    for _ in track(range(runs), description="runs"):
        monitor = DriftMonitor(RISK, DELTA)
        for loss in sequences(draw, np.array([RISK / 2]), good)[0].tolist() if good else ():
            monitor.add(loss)
        losses = sequences(draw, np.array([true_risk]), n)[0].tolist()
        found.append(next((k for k, loss in enumerate(losses, 1) if monitor.add(loss)), None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {}
    for name, choose in (
        ("betting", certified(betting)),
        ("hoeffding-bentkus", certified(hoeffding_bentkus)),
        ("best looking", best_looking),
    ):
        share, mean = violations(choose)
        rows[name] = {"violations": share, "mean_true_risk": round(mean, 5)}
    in_control = alarms(RISK, 1000, 5000)
    after = {
        good: {
            str(times): median(k or 5000 for k in alarms(times * RISK, 200, 5000, good))
            for times in (1.5, 2, 4)
        }
        for good in (0, GOOD)
    }
    document = {
        "what": "simulated calibrations and drift monitors with a known risk",
        "conditions": {
            "risk": RISK, "delta": DELTA, "calibrations": 500, "sequences": 300, "tokens": 64,
            "thresholds": len(CURVE), "concentration": CONCENTRATION,
        },
        "thresholds": rows,
        "false_alarms": {
            "runs": 1000, "sequences": 5000,
            "share": sum(k is not None for k in in_control) / 1000,
        },
        "median_sequences_until_noticed": after[0],
        "noticed_after_good_sequences": {"good": GOOD, **after[GOOD]},
    }  # fmt: skip
    write(document, args.out)


if __name__ == "__main__":
    main()
