"""Draft sources: small objects that draft the next tokens of a sequence. Knows no model.

Prompt lookup is due to Saxena, "Prompt Lookup Decoding", 2023; that answers given to others are
worth looking up too, to Oliaro et al., "SuffixDecoding", 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tide.exits.ngrams import NGramIndex
from tide.exits.table import ContinuationTable


class Draft(NamedTuple):
    """Tokens that may follow.

    Attributes:
        draft_type: what stands behind it. How often drafts are accepted is counted by type.
        tokens: at least one.
    """

    draft_type: str
    tokens: list[int]


class _Place(NamedTuple):
    """A place in a text: `end` is the index of the token after an n-gram."""

    text: list[int]
    end: int


class DraftSource(Protocol):
    """Drafts the continuation of a sequence. A sequence has its own, so it may remember."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft | None:
        """Draft up to `limit` tokens that follow `tokens`; None if it has no draft."""
        ...


class ContextNGrams:
    """Copies what followed the latest earlier occurrence of the last 3, else 2, 1 tokens.

    A longer match is accepted more often and may be copied further, so each length is a type.

    Args:
        index: of the sequence, if somebody else uses it too.
    """

    def __init__(self, index: NGramIndex | None = None) -> None:
        self._index = index or NGramIndex()

    def propose(self, tokens: Sequence[int], limit: int) -> Draft | None:
        """See `DraftSource.propose`."""
        self._index.grow(tokens, len(tokens))
        for n in self._index.orders:
            follower = self._index.after(tokens[-n:]) if len(tokens) >= n else None
            if follower is not None:
                return Draft(f"context {n}", list(tokens[follower : follower + limit]))
        return None


class CrossRequestNGrams:
    """Copies what followed the last 3, else 2, 1 tokens in what any sequence has generated lately.

    Of the latest occurrences, the one that shares most tokens; of such, the one whose next token
    most others have too. How long the match is and how many agree is the type. Sequences share it.

    Args:
        most: n-grams remembered. The older half is forgotten at once.
    """

    orders = (3, 2, 1)
    _occurrences = 8  # of an n-gram that are kept: the latest
    _longest = 16  # tokens that are compared

    def __init__(self, most: int = 1 << 18) -> None:
        self._half = most // 2
        self._new: dict[tuple[int, ...], list[_Place]] = {}
        self._old: dict[tuple[int, ...], list[_Place]] = {}

    @property
    def n(self) -> int:
        """Tokens before a generated one that the longest n-gram has."""
        return self.orders[0]

    def learn(self, generated: list[int], start: int) -> None:
        """Remember what a sequence generated from place `start` on.

        Args:
            generated: is kept, not copied, so it should not have the whole prompt in it. It may
                grow but not change.
        """
        for end in range(start, len(generated)):
            for n in self.orders:
                if end >= n:
                    places = self._new.setdefault(tuple(generated[end - n : end]), [])
                    places.append(_Place(generated, end))
                    del places[: -self._occurrences]
        if len(self._new) > self._half:
            self._old, self._new = self._new, {}

    def propose(self, tokens: Sequence[int], limit: int) -> Draft | None:
        """See `DraftSource.propose`."""
        places = self._places(tokens)
        if not places:
            return None
        follow = Counter(place.text[place.end] for _, place in places)
        matched, count, best = max(
            (matched, follow[place.text[place.end]], i) for i, (matched, place) in enumerate(places)
        )
        agree = "most" if 2 * count >= len(places) > 1 else "few"
        _, (text, end) = places[best]
        return Draft(f"cross-request {matched.bit_length()} {agree}", text[end : end + limit])

    def followers(self, tail: Sequence[int]) -> dict[int, int]:
        """Tokens that followed the end of `tail`, each with how much of it was the same before."""
        found: dict[int, int] = {}
        for matched, (text, end) in self._places(tail):
            found[text[end]] = max(matched, found.get(text[end], 0))
        return found

    def _places(self, tokens: Sequence[int]) -> list[tuple[int, _Place]]:
        """Where the last tokens occurred, each with how many of them did."""
        for n in self.orders:
            key = tuple(tokens[-n:])
            if len(key) == n and (places := self._new.get(key) or self._old.get(key)):
                return [(self._matched(tokens, place, n), place) for place in places]
        return []

    def _matched(self, tokens: Sequence[int], place: _Place, n: int) -> int:
        """How many tokens before a place are the last ones of a sequence; `n` are known to be."""
        text, end = place
        most = min(end, len(tokens), self._longest)
        while n < most and text[end - n - 1] == tokens[-n - 1]:
            n += 1
        return n


class TableDrafts:
    """Drafts of the calibrated table. How sure it is of the next token, in fifths, is the type.

    Args:
        table: the artifact's.
    """

    def __init__(self, table: ContinuationTable) -> None:
        self.table = table

    def propose(self, tokens: Sequence[int], limit: int) -> Draft | None:
        """See `DraftSource.propose`."""
        found = self.table.propose(tokens, limit)
        if not found:
            return None
        return Draft(f"table {min(int(5 * found[0][1]), 4) / 5:.0%}", [token for token, _ in found])


def draft_sources(
    table: ContinuationTable | None,
    *,
    context: bool = True,
    index: NGramIndex | None = None,
    answers: CrossRequestNGrams | None = None,
) -> list[DraftSource]:
    """Sources for one sequence.

    Args:
        table: the artifact's; None to do without.
        context: whether to copy from the sequence's own text.
        index: of the sequence, if somebody else uses it too.
        answers: to others; None to do without.
    """
    found: list[DraftSource] = [ContextNGrams(index)] if context else []
    if table is not None:
        found.append(TableDrafts(table))
    return found if answers is None else [*found, answers]
