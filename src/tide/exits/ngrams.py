"""N-gram predictions: what a sequence's own text and the table predict next. Knows no model.

An n-gram prediction is a feature beside what an exit head predicts. It depends on the tokens up to
its position and on nothing else: not on drafts, on other sequences, or on how fast anything ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tide.exits.table import ContinuationTable


class NGramPrediction(NamedTuple):
    """What might follow a position.

    Attributes:
        context: what followed the latest earlier occurrence of the last tokens; -1 if nothing.
        matched: how many of the last tokens that occurrence shares: 3, 2, 1; 0 if nothing.
        table: the table's prediction; -1 if nothing.
        chance: how likely the table has it.
    """

    context: int = -1
    matched: int = 0
    table: int = -1
    chance: float = 0.0


class NGramIndex:
    """Where n-grams of one sequence last occurred: a look-up costs the same at any length."""

    orders = (3, 2, 1)

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it
        self._indexed = 0

    def grow(self, tokens: Sequence[int], committed: int) -> None:
        """Take in the n-grams of the first `committed` tokens that have a follower among them."""
        for end in range(self._indexed, committed):
            for n in self.orders:
                if end >= n:
                    self._follows[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, committed)

    def after(self, ngram: Sequence[int]) -> int | None:
        """The position after the latest occurrence of `ngram`; None if there is none."""
        return self._follows.get(tuple(ngram))


class NGramPredictor:
    """N-gram predictions along one sequence.

    Args:
        table: the artifact's; None if it has none.
        index: of the sequence, if somebody else uses it too.
    """

    def __init__(self, table: ContinuationTable | None, index: NGramIndex | None = None) -> None:
        self.table = table
        self._index = index or NGramIndex()

    def at(self, tokens: Sequence[int], position: int, committed: int) -> NGramPrediction:
        """The prediction for what follows `tokens[position]`.

        Args:
            committed: how many tokens are final, at most `position + 1`; the others are drafts.
        """
        return self.after(tokens, committed, tokens[committed : position + 1])

    def after(
        self, tokens: Sequence[int], committed: int, drafts: Sequence[int]
    ) -> NGramPrediction:
        """The prediction for what follows `drafts`, which follow the `committed` first tokens."""
        self._index.grow(tokens, committed)
        start = max(0, committed - max(self._index.orders))
        tail = [*tokens[start:committed], *drafts]
        found = self.table.next(tail[-3:]) if self.table else None
        for n in self._index.orders:
            if len(tail) < n:
                continue
            key = tail[-n:]
            # Drafts may be rolled back, so their n-grams are looked for, not remembered.
            for end in range(len(tail) - 1, max(committed - start, n) - 1, -1):
                if tail[end - n : end] == key:
                    return NGramPrediction(tail[end], n, *(found or ()))
            if (follower := self._index.after(key)) is not None:
                return NGramPrediction(tokens[follower], n, *(found or ()))
        return NGramPrediction(-1, 0, *(found or ()))
