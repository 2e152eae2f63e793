"""Matches: earlier places of a text at which its last tokens occurred. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 8  # tokens that a match counts
_ORDERS = (3, 2, 1)  # n-grams that are looked up
_HELD = 8  # latest occurrences that are kept of each


class ContextMatches:
    """Finds what followed the longest and latest matches in a text that grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions after it
        self._indexed = 0

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that have a follower."""
        for end in range(self._indexed, len(tokens)):
            for n in _ORDERS:
                if end >= n:
                    held = self._ends.setdefault(tuple(tokens[end - n : end]), [])
                    held.append(end)
                    if len(held) > _HELD:
                        del held[0]
        self._indexed = max(self._indexed, len(tokens))

    def followers(self, tokens: Sequence[int], tail: Sequence[int]) -> dict[int, int]:
        """Tokens that followed the end of `tail` in the text, each with its longest match.

        Args:
            tokens: the text.
            tail: its last tokens, and what is drafted after them.
        """
        found: dict[int, int] = {}
        for n in _ORDERS:
            if len(tail) < n or not (ends := self._ends.get(tuple(tail[-n:]))):
                continue
            for end in reversed(ends):
                length, most = n, min(len(tail), end)
                while length < most and tokens[end - 1 - length] == tail[-1 - length]:
                    length += 1
                if length > found.get(tokens[end], 0):
                    found[tokens[end]] = length
            if found:
                break
        return found
