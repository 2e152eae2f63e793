"""Gives the ledges: hidden states of tokens that wait before a segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Ledges:
    """For each row and segment, the states of the waiting tokens, `[waiting, hidden]`, in order."""

    def __init__(self, rows: int, segments: int) -> None:
        self._states: list[list[Tensor | None]] = [[None] * segments for _ in range(rows)]

    def put(self, row: int, segment: int, states: Tensor) -> None:
        """Add states behind those that wait."""
        held = self._states[row][segment]
        self._states[row][segment] = states if held is None else torch.cat([held, states])

    def look(self, row: int, segment: int) -> Tensor:
        """States that wait before `segment`."""
        states = self._states[row][segment]
        assert states is not None
        return states

    def take(self, row: int, segment: int, count: int) -> Tensor:
        """Remove the first `count` states and return them."""
        states = self.look(row, segment)
        self._states[row][segment] = states[count:] if count < len(states) else None
        return states[:count]

    def cut(self, row: int, segment: int, count: int) -> None:
        """Keep only the first `count` states."""
        states = self._states[row][segment]
        if states is not None and len(states) > count:
            self._states[row][segment] = states[:count] if count else None

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._states = [self._states[row] for row in rows]
