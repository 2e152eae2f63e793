"""Waterlines: how many tokens of each sequence have passed each segment. No model inside.

    token:      0  1  2  3  4  5  6  7
    segment 0   #  #  #  #  #  #  #  #     waterline 8
    segment 1   #  #  #  #  #  .  .  .     waterline 5   pending before it: 5 6 7
    segment 2   #  #  #  .  .  .  .  .     waterline 3   pending before it: 3 4

Waterlines never rise with depth. The states of tokens that have passed segment s - 1 but not s are
pending before s.
"""

from __future__ import annotations

from collections.abc import Sequence


class Waterlines:
    """The waterlines of a batch.

    Args:
        sequences: sequences of the batch.
        segments: parts into which the checkpoints cut the depth.
        cap: most tokens of a sequence that may be pending after a step, before all segments
            together.
    """

    def __init__(self, sequences: int, segments: int, cap: int) -> None:
        self.segments, self.cap = segments, cap
        self.passed = [[0] * segments for _ in range(sequences)]  # [sequence][segment]

    def waiting(self, sequence: int, segment: int, known: int) -> range:
        """Tokens that wait before `segment`, of the `known` tokens of a sequence."""
        above = known if segment == 0 else self.passed[sequence][segment - 1]
        return range(self.passed[sequence][segment], above)

    def pending(self, sequence: int) -> int:
        """Tokens that have passed the first segment but not the last."""
        return self.passed[sequence][0] - self.passed[sequence][-1]

    def full(self, sequence: int) -> bool:
        """Whether a sequence must go deep before another of its tokens may wait."""
        return self.pending(sequence) >= self.cap

    def advance(self, segment: int, counts: Sequence[int]) -> None:
        """Let the first `counts[s]` tokens that wait before `segment` pass it."""
        for sequence, count in enumerate(counts):
            passed = self.passed[sequence]
            if count < 0 or (segment and passed[segment] + count > passed[segment - 1]):
                raise ValueError(
                    f"sequence {sequence}: {count} tokens cannot pass segment {segment} at {passed}"
                )
            passed[segment] += count

    def rollback(self, sequence: int, length: int) -> None:
        """Forget every token of a sequence from the `length`-th on."""
        self.passed[sequence] = [min(passed, length) for passed in self.passed[sequence]]

    def keep(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self.passed = [self.passed[sequence] for sequence in sequences]
