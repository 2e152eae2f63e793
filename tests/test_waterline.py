"""The bookkeeping holds for any sequence of exit decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide.decode.waterline import Waterlines


@given(
    segments=st.integers(1, 4),
    cap=st.integers(1, 5),
    rows=st.integers(1, 3),
    data=st.data(),
)
def test_any_sequence_of_exit_decisions(
    segments: int, cap: int, rows: int, data: st.DataObject
) -> None:
    """As the loop does it: one token per row and step; all ledges ride along; rows fall back."""
    lines = Waterlines(rows, segments, cap)
    known = [0] * rows
    passes: list[dict[tuple[int, int], int]] = [
        {} for _ in range(rows)
    ]  # (token, segment) -> times
    for _ in range(data.draw(st.integers(1, 20), label="steps")):
        known = [n + 1 for n in known]
        for segment in range(segments):
            spans = [lines.ledge(row, segment, known[row]) for row in range(rows)]
            lines.advance(segment, [len(span) for span in spans])
            for row, span in enumerate(spans):
                for token in span:
                    passes[row][token, segment] = passes[row].get((token, segment), 0) + 1
            for row in range(rows):
                passed = lines.passed[row]
                assert passed == sorted(passed, reverse=True)  # never rises with depth
                assert lines.pending(row) <= cap
            sure = data.draw(st.booleans(), label="all sure")
            if sure and not any(lines.full(row) for row in range(rows)):
                break
        if data.draw(st.booleans(), label="fall back"):
            row = data.draw(st.integers(0, rows - 1), label="row")
            known[row] = data.draw(st.integers(0, known[row]), label="length")
            lines.fall_back(row, known[row])
            passes[row] = {k: n for k, n in passes[row].items() if k[0] < known[row]}
    assert all(times == 1 for row in passes for times in row.values())  # at most once


def test_tokens_cannot_pass_a_segment_before_the_one_above() -> None:
    lines = Waterlines(rows=2, segments=2, cap=4)
    lines.advance(0, [3, 1])
    with pytest.raises(ValueError, match="row 1: 2 tokens cannot pass segment 1"):
        lines.advance(1, [3, 2])


def test_rows_leave() -> None:
    lines = Waterlines(rows=3, segments=2, cap=4)
    lines.advance(0, [1, 2, 3])
    lines.keep([2, 0])
    assert lines.passed == [[3, 0], [1, 0]]
    assert lines.pending(0) == 3
