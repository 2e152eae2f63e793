"""Pending states: hidden states of tokens that wait before a segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tide.models.chunk import upload


class PendingStates:
    """For each sequence and segment, the states that wait, `[waiting, hidden]`, in order."""

    def __init__(self, sequences: int, segments: int) -> None:
        self._states: list[list[Tensor | None]] = [[None] * segments for _ in range(sequences)]

    def put(self, sequence: int, segment: int, states: Tensor) -> None:
        """Add states behind those that wait."""
        held = self._states[sequence][segment]
        self._states[sequence][segment] = states if held is None else torch.cat([held, states])

    def look(self, sequence: int, segment: int) -> Tensor:
        """States that wait before `segment`."""
        states = self._states[sequence][segment]
        assert states is not None
        return states

    def take(self, sequence: int, segment: int, count: int) -> Tensor:
        """Remove the first `count` states and return them."""
        states = self.look(sequence, segment)
        self._states[sequence][segment] = states[count:] if count < len(states) else None
        return states[:count]

    def pick(self, sequence: int, segment: int, places: Sequence[int]) -> None:
        """Keep only the states at these places, in this order."""
        states = self.look(sequence, segment)
        self._states[sequence][segment] = states[upload(np.array(places), states.device)]

    def cut(self, sequence: int, segment: int, count: int) -> None:
        """Keep only the first `count` states."""
        states = self._states[sequence][segment]
        if states is not None and len(states) > count:
            self._states[sequence][segment] = states[:count] if count else None

    def keep(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self._states = [self._states[sequence] for sequence in sequences]
