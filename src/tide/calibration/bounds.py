"""Tests of a risk: is the mean of losses between 0 and 1 below a bound? Knows no model.

`tide.certify` uses the betting bound; Hoeffding-Bentkus is here for comparison in simulation.

Hoeffding-Bentkus is due to Bates, Angelopoulos, Lei, Malik and Jordan, "Distribution-free,
risk-controlling prediction sets", 2021; the betting bound to Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting", 2023; learn-then-test to Angelopoulos, Bates, Candes,
Jordan and Lei, 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

# From losses, `[n]`, and a risk to the p-value of "the mean loss is above the risk".
PValue = Callable[[np.ndarray, float], float]


def hoeffding_bentkus(losses: np.ndarray, risk: float) -> float:
    """The smaller of Hoeffding's and Bentkus' p-values; depends on the mean loss only."""
    from scipy.stats import binom

    n, mean = len(losses), float(np.mean(losses))
    if mean >= risk:
        return 1.0
    hoeffding = np.exp(-n * _divergence(mean, risk))
    bentkus = np.e * binom.cdf(np.ceil(n * mean - 1e-9), n, risk)
    return float(min(1.0, hoeffding, bentkus))


def betting(losses: np.ndarray, risk: float) -> float:
    """The p-value of a bettor who wins when losses are small; tighter when they vary little.

    The stake before each loss depends on the losses before it only, so the wealth is a martingale
    if the mean is the risk, and the inverse of its peak is a p-value (Ville).
    """
    n = len(losses)
    before = np.arange(n)
    sums = np.concatenate([[0.0], np.cumsum(losses)[:-1]])
    means = (0.5 + sums) / (before + 1)
    squares = np.concatenate([[0.0], np.cumsum((losses - means) ** 2)[:-1]])
    variances = (0.25 + squares) / (before + 1)
    # The authors' stake for fixed n, capped so that the wealth stays positive for any loss.
    stakes = np.minimum(np.sqrt(2 * np.log(1 / 0.05) / (n * variances)), 0.99 / (1 - risk))
    wealth = np.cumsum(np.log1p(-stakes * (losses - risk)))
    return float(min(1.0, np.exp(-max(0.0, wealth.max(initial=0.0)))))


def learn_then_test(
    losses: Iterable[np.ndarray], risk: float, delta: float, p_value: PValue = betting
) -> int | None:
    """The last setting, ordered from safest to most aggressive, that is shown to keep the risk.

    Tests settings in order, each at level `delta`, and stops at the first that fails: with
    probability at least 1 - delta no setting that exceeds the risk is returned.

    Args:
        losses: of each setting on the same sequences, `[n]` each; read one by one, so settings
            after the first that fails are never computed.
        p_value: the test.
    """
    last = None
    for setting, measured in enumerate(losses):
        if p_value(measured, risk) > delta:
            break
        last = setting
    return last


def fewest_sequences(risk: float, delta: float) -> int:
    """The number of sequences needed to show a risk by betting if every loss is 0.

    The risk may come from rare sequences that are entirely wrong; `n` draws contain none of them
    with probability `(1 - risk) ** n`, so no test needs much less.
    """
    fewest = int(np.ceil(np.log(delta) / np.log1p(-risk)))
    while betting(np.zeros(fewest), risk) > delta:
        fewest += 1
    return fewest


def _divergence(a: float, b: float) -> float:
    """KL divergence of a Bernoulli variable with mean `a` from one with mean `b`."""
    first = a * np.log(a / b) if a > 0 else 0.0
    second = (1 - a) * np.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return float(first + second)
