"""Recycled predictions: what full depth lately predicted after a token, to draft from.

A pass that verifies drafts predicts what follows each of them, accepted or not. The likeliest
tokens after each are kept, to be drafted when the same token comes again (Luo et al., "Turning
Trash into Treasure: Token Recycling", 2024). They are kept where trees are grown, on the host, and
come with the copy that brings the predictions themselves. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence


class RecycledPredictions:
    """The likeliest successors of tokens, and of pairs of tokens, as full depth last had them.

    Args:
        most: pairs remembered. The older half is forgotten at once. Of single tokens there are no
            more than the vocabulary has.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._half = most // 2
        self._tokens: dict[int, Sequence[int]] = {}
        self._pairs: dict[tuple[int, int], Sequence[int]] = {}
        self._old_pairs: dict[tuple[int, int], Sequence[int]] = {}

    def learn(self, before: int, token: int, successors: Sequence[int]) -> None:
        """Remember what may follow `token`, which came after `before`."""
        self._tokens[token] = successors
        self._pairs[before, token] = successors
        if len(self._pairs) > self._half:
            self._old_pairs, self._pairs = self._pairs, {}

    def after(self, before: int, token: int) -> tuple[Sequence[int], Sequence[int]]:
        """What may follow the pair, and what may follow `token` whatever was before it."""
        pair = (before, token)
        found = self._pairs.get(pair) or self._old_pairs.get(pair) or ()
        return found, self._tokens.get(token, ())
