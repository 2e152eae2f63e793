"""The modes: what a prediction at a checkpoint means.

Off evaluates no gate. Exit commits what an exit head predicts. Lossless takes it for a draft, which
full depth verifies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tide.decode.batch import BatchState
from tide.decode.drafter import Drafter
from tide.decode.verify import Verifier


class Mode(Protocol):
    """What the loop needs of a mode."""

    def start_step(self, batch: BatchState) -> None:
        """Get ready for a step."""

    def evaluates(self, batch: BatchState) -> bool:
        """Whether the gate of the next checkpoint is to be evaluated."""
        ...

    def candidates(self, batch: BatchState, i: int, span: range) -> Sequence[int]:
        """Of the tokens of a sequence in a pass, positions of those that may exit at its end."""
        ...

    def apply(self, batch: BatchState, verifier: Verifier) -> None:
        """Do with exits what they mean in this mode."""

    def goes_deeper(self, batch: BatchState, i: int) -> bool:
        """Whether a sequence needs the next segment in this step."""
        ...

    def reached_full_depth(self, batch: BatchState) -> None:
        """Note that a step has ended at full depth."""

    def stop_exits(self, batch: BatchState) -> None:
        """From the next token on, let full depth predict everything."""


class Off:
    """Full depth, token by token."""

    def start_step(self, batch: BatchState) -> None:
        """Nothing to do."""

    def evaluates(self, batch: BatchState) -> bool:
        """Never."""
        return False

    def candidates(self, batch: BatchState, i: int, span: range) -> Sequence[int]:
        """None."""
        return ()

    def apply(self, batch: BatchState, verifier: Verifier) -> None:
        """Nothing exits."""

    def goes_deeper(self, batch: BatchState, i: int) -> bool:
        """Always."""
        return True

    def reached_full_depth(self, batch: BatchState) -> None:
        """Nothing to note."""

    def stop_exits(self, batch: BatchState) -> None:
        """Nothing exits."""


class Exit(Off):
    """A token that exits is committed as its exit head predicts."""

    def __init__(self) -> None:
        self._exits_on = True

    def evaluates(self, batch: BatchState) -> bool:
        """Always, unless the circuit breaker has tripped."""
        return self._exits_on

    def candidates(self, batch: BatchState, i: int, span: range) -> Sequence[int]:
        """Tokens that have not exited, and whose successor may still be committed."""
        sequence = batch.sequences[i]
        return [at for at in sequence.possible() if at in span and at not in sequence.exits]

    def apply(self, batch: BatchState, verifier: Verifier) -> None:
        """Commit what has exited."""
        verifier.commit_exits(batch)

    def goes_deeper(self, batch: BatchState, i: int) -> bool:
        """Whether the newest token has no committed successor yet, or no room to wait."""
        sequence = batch.sequences[i]
        if sequence.finished:
            return False
        return batch.passed(i, 0) >= sequence.committed or batch.full(i)

    def stop_exits(self, batch: BatchState) -> None:
        """Also forgets exits on top of drafts, which are not committed yet."""
        self._exits_on = False
        for sequence in batch.sequences:
            sequence.exits.clear()


class Lossless(Off):
    """What an exit head predicts is a draft, made on the newest token, verified by a deep pass.

    From one deep pass to the next is a cycle. Whether exit heads draft in it is decided when it
    starts, by comparing cycles with and without.

    Args:
        drafter: keeps the comparison.
        exit_drafts: whether exit heads may draft at all.
        clock: by which cycles are compared.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        exit_drafts: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter, self._may_draft, self._clock = drafter, exit_drafts, clock
        self._cycle: tuple[float, int] | None = None  # when it began, tokens committed then
        self._drafts = False

    def start_step(self, batch: BatchState) -> None:
        """Start a cycle after a deep pass."""
        if self._cycle is None:
            self._cycle = self._clock(), batch.committed
            self._drafts = self._may_draft and (
                self._drafter.fixed or self._drafter.exit_drafts.choose()
            )

    def evaluates(self, batch: BatchState) -> bool:
        """Whether an exit head may draft for any sequence."""
        return self._drafts and any(self._open(batch, i) for i in range(len(batch.sequences)))

    def candidates(self, batch: BatchState, i: int, span: range) -> Sequence[int]:
        """The newest token, unless it is on top of another source's draft."""
        newest = len(batch.sequences[i].tokens) - 1
        return (newest,) if newest in span and self._open(batch, i) else ()

    def apply(self, batch: BatchState, verifier: Verifier) -> None:
        """Take the predictions for drafts."""
        for i, sequence in enumerate(batch.sequences):
            exited = sequence.exits.pop(len(sequence.tokens) - 1, None)
            # The last token that there is room for need not be drafted: nothing follows it.
            if exited is not None and sequence.room > 1:
                batch.draft(i, [exited.token], "exit")

    def goes_deeper(self, batch: BatchState, i: int) -> bool:
        """Whether no draft follows the newest token, or no more tokens may wait."""
        sequence = batch.sequences[i]
        if sequence.finished:
            return False
        drafted = sequence.draft_type == "exit"
        known = len(sequence.tokens) if drafted else sequence.committed
        return batch.passed(i, 0) >= known or batch.full(i)

    def reached_full_depth(self, batch: BatchState) -> None:
        """End the cycle, and compare."""
        assert self._cycle is not None
        began, committed = self._cycle
        # Drafts of other sources are accepted in both arms, and would only add noise.
        others = sum(s.accepted for s in batch.sequences if s.draft_type not in (None, "exit"))
        tokens = batch.committed - committed - others
        if self._may_draft:
            seconds = self._clock() - began
            self._drafter.exit_drafts.record(self._drafts, tokens, seconds)
        self._cycle = None

    def _open(self, batch: BatchState, i: int) -> bool:
        sequence = batch.sequences[i]
        drafted = sequence.open_drafts > 0 and sequence.draft_type != "exit"
        return self._drafts and not drafted and not batch.full(i)
