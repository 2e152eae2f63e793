"""The cost of a step in vLLM: measured at start-up, corrected by steps observed. Knows no vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np

# In shares of a step of one token, for a model whose steps were not measured.
_ASSUMED = {1: 1.0, 64: 1.0 + 0.015 * 63}
_FAR = 1 << 20  # more tokens than a step can have
_LONGEST = 60.0  # seconds of a step; a clock that shows more has jumped
_RECENT = 31  # steps that count: without drafts, for a median that a stall hardly moves; or any
_SOME = 0.2  # what drafts usually add to a step: a line is trusted where it was observed
_REFRESH = 8, 128  # drafted steps after which one without drafts is due: at first, and at most
_CLOSE = 1.1, 16  # below this gain, a step without drafts is due after so many at most


@dataclass
class _Comparison:
    """When a step without drafts is due, for one number of requests.

    Attributes:
        since: drafted steps since the last one without drafts.
        refresh: number of them after which one without drafts is due.
    """

    since: int = 0
    refresh: int = _REFRESH[0]

    def add(self, drafted: bool) -> None:
        if drafted:
            self.since += 1
        else:
            self.since, self.refresh = 0, min(2 * self.refresh, _REFRESH[1])

    def due(self, gain: float) -> bool:
        return self.since >= (min(self.refresh, _CLOSE[1]) if gain < _CLOSE[0] else self.refresh)


@dataclass
class _Drafted:
    """What drafted steps cost more than undrafted ones, as a line over what the curve expects.

    All in shares of an undrafted step.

    Attributes:
        sums: of 1, x, y, x * x, x * y; x is what the curve expects, y what was observed.
    """

    sums: np.ndarray = field(default_factory=lambda: np.zeros(5))

    def add(self, x: float, y: float) -> None:
        self.sums = 0.99 * self.sums + (1, x, y, x * x, x * y)

    def line(self, trust: float) -> tuple[float, float]:
        """The fixed part, and the factor on what the curve expects.

        Args:
            trust: the curve counts as so many steps without drafts, and as many with some.
        """
        known = np.array([4 + 2 * trust, _SOME, _SOME, _SOME**2, _SOME**2])
        known[1:] *= trust
        n, x, y, xx, xy = self.sums + known
        factor = max((n * xy - x * y) / (n * xx - x * x), 0.0)
        return (y - factor * x) / n, factor

    def price(self, more: np.ndarray, trust: float) -> np.ndarray:
        """What drafted steps cost, by what the curve expects that drafts add."""
        fixed, factor = self.line(trust)
        return 1 + np.maximum(fixed + factor * more, 0.0)


class StepCost:
    """What a step costs, by its requests and tokens.

    A step without drafts costs what such steps took with as many requests. Drafts add what the
    curve expects for their tokens, corrected by what drafted steps really took: a fixed part, such
    as rejection sampling, and a factor. In a step that reads prompts too, the curve may be steeper:
    few more tokens cost little only while a step waits for the weights.

    Args:
        curve: seconds of a step by its tokens, measured at start-up; empty if nothing was.
    """

    def __init__(self, curve: Mapping[int, float] | None = None) -> None:
        self.measured = curve is not None and len(curve) > 1
        known = sorted((curve if curve and self.measured else _ASSUMED).items())
        tokens = np.array([n for n, _ in known])
        seconds = np.maximum.accumulate([s for _, s in known])  # more tokens cost no less
        # Beyond what was measured, a token costs what the last ones did, or the average one.
        slope = max((seconds[-1] - seconds[i]) / (tokens[-1] - tokens[i]) for i in (0, -2))
        # A measured curve is trusted; an assumed one gives way to some observed steps.
        self._trust = 10.0 if self.measured else 0.02
        self._tokens = np.append(tokens, _FAR)
        self._seconds = np.append(seconds, seconds[-1] + slope * (_FAR - tokens[-1]))
        # Seconds of recent steps, by the number of requests.
        self._undrafted: dict[int, deque[float]] = {}
        self._comparisons: dict[int, _Comparison] = {}  # by the same
        self._drafted: dict[int, _Drafted] = {}  # by the binary length of the number of requests
        self._prompts = deque([0], _RECENT)  # tokens of prompts that recent steps read

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Record a step; an outlier is due to the machine, and counts less."""
        if not 0 < seconds < _LONGEST:
            return
        known, drafted = self.undrafted(requests), self._drafted_steps(requests)
        self._comparisons.setdefault(requests, _Comparison()).add(tokens > requests)
        if tokens == requests:
            if requests not in self._undrafted:
                # What others took counts as one; but the curve knows neither attention nor host.
                first = [known] if self._undrafted and known is not None else []
                self._undrafted[requests] = deque(first, _RECENT)
            self._undrafted[requests].append(_clip(seconds, seconds if known is None else known))
            return
        if self._undrafted and known is not None:
            more = self._more(requests, tokens)
            expected = float(drafted.price(more, self._trust))
            drafted.add(float(more), _clip(seconds / known, expected) - 1)

    def add_prompts(self, tokens: int) -> None:
        """Record how many tokens of prompts a step read; 0 counts too."""
        self._prompts.append(tokens)

    def undrafted(self, requests: int) -> float | None:
        """Seconds of a step without drafts; None if nothing is known yet."""
        if requests in self._undrafted:
            return median(self._undrafted[requests])
        here = float(self._curve(requests))
        if not self._undrafted:
            return here if self.measured else None
        near = min(self._undrafted, key=lambda known: abs(known - requests))
        seconds, there = median(self._undrafted[near]), float(self._curve(near))
        return max(seconds + here - there, here) if self.measured else seconds * here / there

    def needs_undrafted(self, requests: int, gain: float = 1.0) -> bool:
        """Whether a step without drafts is due, to know what drafts are compared with.

        Args:
            requests: in the step.
            gain: throughput expected with drafts, in that without. If it is close to 1, what they
                are compared with decides, so it is measured more often.
        """
        comparison = self._comparisons.get(requests, _Comparison())
        return comparison.due(gain) or self.undrafted(requests) is None

    def ratio(self, requests: int, tokens: int | np.ndarray) -> np.ndarray:
        """What a drafted step of so many tokens costs, in steps without drafts.

        Without the prompts that it reads; but where recent steps read some, drafts are priced as
        what comes on top.
        """
        more = self._more(requests, tokens, self._prompts)
        return self._drafted_steps(requests).price(more, self._trust)

    def _more(
        self, requests: int, tokens: int | np.ndarray, prompts: Iterable[int] = (0,)
    ) -> np.ndarray:
        """What the curve expects that more tokens add, in steps without drafts.

        Args:
            requests: in the step.
            tokens: in the step, without those of prompts.
            prompts: tokens of prompts in steps over which the mean is taken.
        """
        beside, steps = np.unique(list(prompts), return_counts=True)
        added = self._curve(np.add.outer(tokens, beside)) - self._curve(requests + beside)
        # An assumed curve has no seconds of its own.
        undrafted = self.undrafted(requests) if self.measured else None
        return added @ steps / steps.sum() / (undrafted or self._curve(requests))

    def _curve(self, tokens: int | np.ndarray) -> np.ndarray:
        return np.interp(tokens, self._tokens, self._seconds)

    def _drafted_steps(self, requests: int) -> _Drafted:
        size = requests.bit_length()
        if size not in self._drafted:
            near = min(self._drafted, key=lambda known: abs(known - size), default=None)
            start = np.zeros(5) if near is None else 0.25 * self._drafted[near].sums
            self._drafted[size] = _Drafted(start)
        return self._drafted[size]


def _clip(seconds: float, expected: float) -> float:
    return min(max(seconds, expected / 2), 2 * expected)
