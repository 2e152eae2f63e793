"""The cost of a step in vLLM, learned from measured steps. Knows no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class _DraftedSteps:
    """Steps with drafts, of one number of requests.

    Attributes:
        sums: of 1, tokens and seconds, older steps fading.
        variance: sum of squared deviations of tokens from their mean.
        covariance: sum of deviations of tokens times relative deviations of seconds.
    """

    sums: np.ndarray = field(default_factory=lambda: np.zeros(3))
    variance: float = 0.0
    covariance: float = 0.0


@dataclass
class StepCost:
    """Seconds of a step: without drafts, and with drafts as a line over its tokens.

    Both are kept for each number of requests. Having any draft in a step has a cost of its own, so
    a step without drafts is not a point of the line. Steps of one size vary by more than a token
    costs, so the price of a token, as a share of a step, is averaged over many steps and, where few
    are known, taken from other numbers of requests.

    Attributes:
        fade: weight of what was known before each new step.
        price_fade: the same for the price of a token.
        assumed: that price in a step without other tokens, before anything is known.
        weight: of that assumption, as a variance in tokens squared.
    """

    fade: float = 0.98
    price_fade: float = 0.998
    assumed: float = 0.015
    weight: float = 1500.0
    _drafted: dict[int, _DraftedSteps] = field(default_factory=dict)
    _undrafted: dict[int, float] = field(default_factory=dict)

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Record a step."""
        if tokens == requests:
            old = self._undrafted.get(requests, seconds)
            self._undrafted[requests] = old + 0.2 * (min(seconds, 2 * old) - old)
            return
        steps = self._drafted.setdefault(requests, _DraftedSteps())
        if steps.sums[0] > 4:
            _, mean_tokens, mean_seconds = steps.sums / steps.sums[0]
            base, price = self._line(steps)
            # A slow outlier is due to the machine, not to the step.
            seconds = min(seconds, 2 * (base + price * tokens))
            more = tokens - mean_tokens
            steps.variance = self.price_fade * steps.variance + more**2
            steps.covariance = self.price_fade * steps.covariance + more * (
                seconds / mean_seconds - 1
            )
        steps.sums *= self.fade
        steps.sums += 1, tokens, seconds

    def undrafted(self, requests: int) -> float | None:
        """Seconds of a step without drafts; None if nothing is known yet."""
        return self._undrafted.get(requests)

    def line(self, requests: int) -> tuple[float, float] | None:
        """Seconds of a step without tokens, and of each token; None if nothing is known yet."""
        nearest = min(self._drafted, key=lambda known: abs(known - requests), default=None)
        if nearest is None:
            return None
        base, price = self._line(self._drafted[nearest])
        return base * (requests / nearest) ** 0.5, price

    def _line(self, steps: _DraftedSteps) -> tuple[float, float]:
        every = self._drafted.values()
        _, tokens, seconds = steps.sums / steps.sums[0]
        share = self._share(
            sum(one.variance for one in every),
            sum(one.covariance for one in every),
            self.assumed / (1 + self.assumed * tokens),  # as a share of a step of so many tokens
        )
        price = self._share(steps.variance, steps.covariance, share) * seconds
        return max(seconds - price * tokens, 0.0), price

    def _share(self, variance: float, covariance: float, assumed: float) -> float:
        return max((covariance + self.weight * assumed) / (variance + self.weight), 0.0)
