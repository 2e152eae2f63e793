"""The schedule: which tokens run which segments next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tide.decode.batch import BatchState
from tide.decode.pack import pack_tokens
from tide.models.runner import DepthRunner, Then
from tide.models.tokens import NOTES


@dataclass(frozen=True)
class Pass:
    """Tokens that run through segments `first` to `last` together.

    Attributes:
        spans: for each sequence, its tokens in the pass; empty for none.
    """

    first: int
    last: int
    spans: Sequence[range]

    @property
    def longest(self) -> int:
        """Tokens of the sequence that has most in the pass."""
        return max(map(len, self.spans))

    def blank_notes(self) -> np.ndarray:
        """Notes of its tokens, to be filled in, `[sequences, longest, NOTES]`."""
        return np.zeros((len(self.spans), self.longest, NOTES), np.int64)


def next_pass(batch: BatchState, segment: int, *, stops: bool) -> Pass:
    """The pass over all that waits before `segment`.

    It runs on through the next segments, as far as nothing waits or is evaluated between.

    Args:
        stops: whether a gate is to be evaluated at the next checkpoint.
    """
    last = segment
    while last < batch.last and not stops and not any(batch.waiting(last + 1)):
        last += 1
    return Pass(segment, last, batch.waiting(segment))


def run_pass(
    runner: DepthRunner,
    batch: BatchState,
    work: Pass,
    then: Then | None = None,
    notes: np.ndarray | None = None,
) -> tuple[Tensor, Any]:
    """Run a pass.

    Args:
        then: what to do with the states, as part of the pass.
        notes: what `then` is to know of the tokens, `[sequences, longest span, notes]`.

    Returns:
        States after its last segment, `[sequences, longest span, hidden]`, and what `then` makes
        of them.
    """
    hidden = batch.take(work.first, work.spans)
    tokens = pack_tokens(batch.sequences, work.spans, notes=notes)
    layers = batch.segments[work.first][0], batch.segments[work.last][1]
    states, result = runner.run_then(then, tokens, layers, cache=batch.cache, hidden=hidden)
    batch.advance(work.first, work.last, work.spans, states)
    return states, result
