"""Gives the watch: does the promised risk still hold while serving? No model inside.

A bettor stakes on each sequence having lost more than the promise. If the promise holds, the wealth
seldom ever reaches 1 / delta, however long it serves (Ville's inequality).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tide.errors import ConfigError

REACTIONS = ("warn", "full_depth")


class DriftWarning(UserWarning):
    """Early tokens differ from full depth more often than was promised."""


@dataclass
class Watch:
    """An anytime-valid test that the mean loss of sequences is at most `risk`.

    Attributes:
        risk: the promise.
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
    _sum: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    def add(self, loss: float) -> bool:
        """Take in the loss of a sequence, between 0 and 1; says whether it has fired by now."""
        # The stake depends on what came before only: the excess so far over its spread.
        n = self.sequences + 1
        mean = (self.risk + self._sum) / n
        spread = (self.risk * (1 - self.risk) + self._squares) / n
        edge = max(mean - self.risk, 0.1 * self.risk)
        stake = min(edge / (spread + edge**2), 0.5 / self.risk)
        self.wealth *= 1 + stake * (loss - self.risk)
        self.sequences, self._sum = n, self._sum + loss
        self._squares += (loss - mean) ** 2
        self.fired |= self.wealth >= 1 / self.delta
        return self.fired

    @property
    def estimate(self) -> float | None:
        """Mean loss of the sequences seen; None if there was none."""
        return self._sum / self.sequences if self.sequences else None

    def reset(self) -> None:
        """Begin anew, as after a new certificate."""
        self.sequences, self.wealth, self.fired = 0, 1.0, False
        self._sum = self._squares = 0.0


class Guard:
    """Feeds a watch with what the audit says, and does what was asked for when it fires.

    Args:
        watch: the test.
        on_drift: "warn", "full_depth" (exits are off from then on), or a callable, which is given
            the watch.

    Attributes:
        tripped: whether exits are off.
    """

    def __init__(self, watch: Watch, on_drift: str | Callable[[Watch], Any] = "warn") -> None:
        if not callable(on_drift) and on_drift not in REACTIONS:
            raise ConfigError(
                f"on_drift is {on_drift!r}; it must be one of {', '.join(REACTIONS)}, or a "
                "function of the watch."
            )
        self.watch, self.on_drift, self.tripped = watch, on_drift, False

    def add(self, losses: Iterable[float]) -> None:
        """Take in the losses of sequences that have ended."""
        for loss in losses:
            if not self.watch.fired and self.watch.add(loss):
                self._fire()

    def reset(self) -> None:
        """Begin anew, exits on."""
        self.watch.reset()
        self.tripped = False

    def _fire(self) -> None:
        if callable(self.on_drift):
            self.on_drift(self.watch)
            return
        self.tripped = self.on_drift == "full_depth"
        now = "Exits are off until engine.guard.reset()." if self.tripped else "Exits stay on."
        warnings.warn(
            f"Early tokens differed from full depth in {self.watch.estimate:.2%} of tokens over "
            f"{self.watch.sequences} sequences; {self.watch.risk:.2%} were promised. {now} Certify "
            "on prompts like these with `tide certify`.",
            DriftWarning,
            stacklevel=2,
        )
