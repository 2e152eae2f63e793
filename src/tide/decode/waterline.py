"""Gives the waterlines: how many tokens of each row have passed each segment. No model inside.

    token:      0  1  2  3  4  5  6  7
    segment 0   #  #  #  #  #  #  #  #     waterline 8
    segment 1   #  #  #  #  #  .  .  .     waterline 5   ledge: 5 6 7
    segment 2   #  #  #  .  .  .  .  .     waterline 3   ledge: 3 4

Waterlines never rise with depth. Tokens that have passed segment s - 1 but not s wait on the ledge
before s.
"""

from __future__ import annotations

from collections.abc import Sequence


class Waterlines:
    """The waterlines of a batch.

    Args:
        rows: rows of the batch.
        segments: parts into which the checkpoints cut the depth.
        cap: most tokens that may wait, on all ledges of a row together.
    """

    def __init__(self, rows: int, segments: int, cap: int) -> None:
        self.segments, self.cap = segments, cap
        self.passed = [[0] * segments for _ in range(rows)]  # [row][segment]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.passed)

    def ledge(self, row: int, segment: int, known: int) -> range:
        """Tokens of `row` that wait before `segment`, of the `known` tokens it has."""
        above = known if segment == 0 else self.passed[row][segment - 1]
        return range(self.passed[row][segment], above)

    def pending(self, row: int) -> int:
        """Tokens that have passed the first segment of `row` but not the last."""
        return self.passed[row][0] - self.passed[row][-1]

    def full(self, row: int) -> bool:
        """Whether `row` must go deep before another token may wait."""
        return self.pending(row) >= self.cap

    def advance(self, segment: int, counts: Sequence[int]) -> None:
        """Let the first `counts[row]` tokens on each ledge before `segment` pass it."""
        for row, count in enumerate(counts):
            passed = self.passed[row]
            if count < 0 or (segment and passed[segment] + count > passed[segment - 1]):
                raise ValueError(
                    f"row {row}: {count} tokens cannot pass segment {segment} at {passed}"
                )
            passed[segment] += count

    def fall_back(self, row: int, length: int) -> None:
        """Forget every token of `row` from the `length`-th on."""
        self.passed[row] = [min(passed, length) for passed in self.passed[row]]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.passed = [self.passed[row] for row in rows]
