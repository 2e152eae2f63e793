"""Whether to draft, decided by the gain that drafts are expected to bring. Knows no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

_ON, _OFF = 1.03, 1.01  # mean expected gain above which drafting goes on, below which off
_LEAST = 64  # steps before drafting may go off
_WAIT = 4, 512  # steps until drafts that do not pay are tried: at first, and at most


@dataclass
class DraftSwitch:
    """Switches drafting on and off, for about one number of requests.

    While it is on, drafts are looked for in every step, and used where they pay. While it is off,
    nothing is looked for. Either way drafts are tried again now and then, ever more rarely, since
    acceptance and costs change.

    Attributes:
        on: whether drafts are looked for.
        gain: expected throughput with the drafts found, in that without, mean over some steps.
        net: the same over all steps in which drafts were looked for, less what that costs.
        seconds: that looking for drafts takes, mean over some steps.
    """

    on: bool = True
    gain: float = 1.0
    net: float = 1.0
    seconds: float = 0.0
    _steps: int = 0  # with drafts found, since it was switched
    _looked: int = 0  # steps in which drafts were looked for, since it was switched
    _idle: int = 0  # steps since drafts were last used or tried
    _wait: int = _WAIT[0]

    def begin(self) -> bool:
        """Begin a step; whether to look for drafts in it."""
        self._idle += 1
        return self.on or self._idle >= self._wait

    def decide(self, gain: float, looking: float = 0.0) -> str:
        """What to do with the drafts found in this step: "drafted", "does_not_pay" or "probe".

        Args:
            gain: throughput expected with these drafts, in that without.
            looking: what it cost to look for them, in steps without drafts.
        """
        self._steps += 1
        self._look(max(gain, 1.0) - looking)
        # Drafts that do not pay are not used, so they gain nothing and lose nothing.
        weight = max(1 / self._steps, 0.02) if self.on else 0.2
        self.gain += weight * (max(gain, 1.0) - self.gain)
        if self.on:
            switches = self.gain < _OFF and self._steps >= _LEAST
        else:
            switches = self.gain > _ON and self.net > 1.0
        if switches:
            self._switch()
        if self.on and gain > _OFF:
            self._idle = 0
            return "drafted"
        if self._idle < self._wait:
            return "does_not_pay"
        self._tried()
        return "probe"

    def looked(self, seconds: float) -> None:
        """Record how long it took to look for drafts; an outlier is due to the machine."""
        usual = min(seconds, 2 * self.seconds) if self.seconds else seconds
        self.seconds += 0.05 * (usual - self.seconds) if self.seconds else usual

    def found_none(self, looking: float = 0.0) -> None:
        """Drafts were looked for in this step, and there was none; see `decide`."""
        self._look(1.0 - looking)
        if not self.on:
            self._tried()

    def _look(self, net: float) -> None:
        """Learn what looking for drafts brings, and stop where that is a loss."""
        self._looked += 1
        self.net += max(1 / self._looked, 0.02 if self.on else 0.2) * (net - self.net)
        if self.on and self.net < 1.0 and self._looked >= _LEAST:
            self._switch()

    def _switch(self) -> None:
        self.on, self._steps, self._looked = not self.on, 0, 0
        self._wait = _WAIT[0] if self.on else self._wait

    def _tried(self) -> None:
        self._idle, self._wait = 0, min(2 * self._wait, _WAIT[1])
