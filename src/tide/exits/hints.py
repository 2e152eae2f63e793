"""Gives hints: what a row's own text and the table would say next. Knows no model.

A hint is a second opinion on a token that an exit head wants to say. It depends on the tokens up to
its position and on nothing else: not on guesses, on batch mates, or on how fast anything ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tide.exits.table import ContinuationTable


class Hint(NamedTuple):
    """What might follow a position.

    Attributes:
        context: what followed the latest earlier occurrence of the last tokens; -1 if nothing.
        matched: how many of the last tokens that occurrence shares: 3, 2, 1; 0 if nothing.
        table: what the table says; -1 if nothing.
        chance: how likely the table has it.
    """

    context: int = -1
    matched: int = 0
    table: int = -1
    chance: float = 0.0


class NGramIndex:
    """Where the n-grams of one row last occurred: to look one up costs the same at any length."""

    orders = (3, 2, 1)

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token after it
        self._indexed = 0

    def grow(self, tokens: Sequence[int], settled: int) -> None:
        """Take in the n-grams of the first `settled` tokens that have a follower among them."""
        for end in range(self._indexed, settled):
            for n in self.orders:
                if end >= n:
                    self._follows[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, settled)

    def after(self, ngram: Sequence[int]) -> int | None:
        """The place after the latest occurrence of `ngram`; None if there is none."""
        return self._follows.get(tuple(ngram))


class RowHints:
    """Hints along one row.

    Args:
        table: the artifact's; None if it has none.
    """

    def __init__(self, table: ContinuationTable | None) -> None:
        self.table = table
        self._index = NGramIndex()

    def at(self, tokens: Sequence[int], position: int, settled: int) -> Hint:
        """The hint for what follows `tokens[position]`.

        Args:
            settled: how many tokens are final, at most `position + 1`; the others are guesses.
        """
        self._index.grow(tokens, settled)
        found = self.table.next(tokens[max(0, position - 2) : position + 1]) if self.table else None
        for n in self._index.orders:
            place = self._place(tokens, position, settled, n)
            if place is not None:
                return Hint(tokens[place], n, *(found or ()))
        return Hint(-1, 0, *(found or ()))

    def _place(self, tokens: Sequence[int], position: int, settled: int, n: int) -> int | None:
        if position + 1 < n:
            return None
        key = tuple(tokens[position + 1 - n : position + 1])
        # Guesses may be taken back, so their n-grams are looked for, not remembered.
        for end in range(position, max(settled, n) - 1, -1):
            if tuple(tokens[end - n : end]) == key:
                return end
        return self._index.after(key)
