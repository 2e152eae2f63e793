"""Drift: whether the bound of a certificate still holds while it is served. No model inside.

The drift monitor is a bettor who stakes on each sequence having lost more than the certified bound.
If the bound holds, the wealth seldom ever reaches 1 / delta, however long it serves (Ville's
inequality). A part of the wealth starts to bet at each sequence, so that losses before a drift do
not hide it (mixtures over change points: Shin, Ramdas and Rinaldo, "E-detectors").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tide.errors import ConfigError

REACTIONS = ("warn", "full_depth")


def require_audits(rate: float, kv_cache_strategy: str) -> None:
    """Raise for an audit rate that is none, or by which drift would never be detected."""
    if not 0 <= rate <= 1 or (rate == 0 and kv_cache_strategy != "deferred"):
        raise ConfigError(
            f"audit_rate is {rate!r}; with a risk and kv_cache_strategy={kv_cache_strategy!r} it "
            "must be above 0 and at most 1: 5 % of sequences is 0.05."
        )


class DriftWarning(UserWarning):
    """Exited tokens differ from full depth more often than the certified bound allows."""


@dataclass
class DriftMonitor:
    """An anytime-valid test that the mean loss of sequences is at most `risk`.

    Attributes:
        risk: the certified bound.
        delta: chance of a false alarm, ever.
        sequences: how many were seen.
        wealth: the bettor's, of 1 at the start.
        fired: whether it has reached 1 / delta.
    """

    risk: float
    delta: float = 0.05
    sequences: int = 0
    wealth: float = 1.0
    fired: bool = False
    _invested: float = field(default=0.0, repr=False)
    _sum: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    def add(self, loss: float) -> bool:
        """Take in the loss of a sequence, between 0 and 1; returns whether it has fired by now."""
        # The stake depends on what came before only: the excess so far over its spread.
        n = self.sequences + 1
        mean = (self.risk + self._sum) / n
        spread = (self.risk * (1 - self.risk) + self._squares) / n
        edge = max(mean - self.risk, 0.1 * self.risk)
        stake = min(edge / (spread + edge**2), 0.5 / self.risk)
        # Of the 1 at the start, 1 / (n (n + 1)) bets from here on, and 1 / (n + 1) is kept for
        # later. If all of it bet from the start, many good sequences would use it up.
        self._invested = (self._invested + 1 / (n * (n + 1))) * (1 + stake * (loss - self.risk))
        self.wealth = self._invested + 1 / (n + 1)
        self.sequences, self._sum = n, self._sum + loss
        self._squares += (loss - mean) ** 2
        self.fired |= self.wealth >= 1 / self.delta
        return self.fired

    @property
    def estimate(self) -> float | None:
        """Mean loss of the sequences seen; None if there was none."""
        return self._sum / self.sequences if self.sequences else None

    def reset(self) -> None:
        """Start again, as after a new certificate."""
        self.sequences, self.wealth, self.fired = 0, 1.0, False
        self._invested = self._sum = self._squares = 0.0


class InOrder:
    """Losses in the order in which sequences began.

    Short answers end first, and may be wrong more often than others: in the order in which
    sequences end, a batch would look worse than it is, and then better.
    """

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._next = 0

    def end(self, number: int, loss: float) -> list[float]:
        """Take in the loss of a sequence, numbered from 0, for all that are known up to a gap."""
        self._losses[number] = loss
        known = []
        while self._next in self._losses:
            known.append(self._losses.pop(self._next))
            self._next += 1
        return known


class CircuitBreaker:
    """Feeds a drift monitor with what the audit finds, and reacts when it fires.

    Args:
        monitor: the test.
        on_drift: "warn", "full_depth" (exits are off from then on), or a callable, which is given
            the monitor.

    Attributes:
        tripped: whether exits are off.
    """

    def __init__(
        self, monitor: DriftMonitor, on_drift: str | Callable[[DriftMonitor], Any] = "warn"
    ) -> None:
        if not callable(on_drift) and on_drift not in REACTIONS:
            raise ConfigError(
                f"on_drift is {on_drift!r}; it must be one of {', '.join(REACTIONS)}, or a "
                "function of the drift monitor."
            )
        self.monitor, self.on_drift, self.tripped = monitor, on_drift, False

    def add(self, losses: Iterable[float]) -> None:
        """Take in the losses of sequences that have ended."""
        for loss in losses:
            if not self.monitor.fired and self.monitor.add(loss):
                self._fire()

    def reset(self) -> None:
        """Start again, exits on."""
        self.monitor.reset()
        self.tripped = False

    def _fire(self) -> None:
        if callable(self.on_drift):
            self.on_drift(self.monitor)
            return
        self.tripped = self.on_drift == "full_depth"
        now = (
            "Exits are off until engine.circuit_breaker.reset()."
            if self.tripped
            else "Exits stay on."
        )
        monitor = self.monitor
        warnings.warn(
            "Exited tokens differ from full depth more often than certified. Of all tokens in "
            f"{monitor.sequences} sequences, before and after the drift, {monitor.estimate:.2%} "
            f"differed; the certified bound is {monitor.risk:.2%}. {now} Certify on prompts like "
            "these with `tide certify`.",
            DriftWarning,
            stacklevel=2,
        )
