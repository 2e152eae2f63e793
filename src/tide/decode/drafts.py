"""Gives draft sources: small objects that guess the next tokens. Knows no model.

Prompt lookup is due to Saxena, "Prompt Lookup Decoding", 2023; sources are tried in order, and the
first that has a guess is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tide.exits.table import ContinuationTable


class DraftSource(Protocol):
    """Guesses the continuation of one row. Each row has its own, so it may remember."""

    name: str

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Guess up to `limit` tokens that follow `tokens`; none if it has no idea."""
        ...


class ContextNGrams:
    """Copies what followed the latest earlier occurrence of the row's last n tokens.

    Keeps an index of the row's n-grams, so a guess costs the same at any length of the row. Each n
    is a source of its own, since a longer match is right more often and may be copied further.

    Args:
        n: tokens that must match.
    """

    def __init__(self, n: int) -> None:
        self.n, self.name = n, f"context {n}"
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token after it
        self._indexed = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See `DraftSource.propose`."""
        n = self.n
        # The n-gram that ends in the last token has no follower yet: it is what is looked up.
        for end in range(max(self._indexed, n), len(tokens)):
            self._follows[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens)
        place = self._follows.get(tuple(tokens[-n:])) if len(tokens) >= n else None
        return [] if place is None else list(tokens[place : place + limit])


class TableDrafts:
    """What the table says, where it is as sure of the next token as `least` but not as `below`.

    Ranges are sources of their own: how often the table is right is what its chance says, and a
    sure guess may go further.

    Args:
        table: the artifact's.
        name: of the range.
        least, below: the range.
    """

    def __init__(self, table: ContinuationTable, name: str, least: float, below: float) -> None:
        self.table, self.name, self.least, self.below = table, name, least, below

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See `DraftSource.propose`."""
        found = self.table.next(tokens[-self.table.longest :])
        if found is None or not self.least <= found[1] < self.below:
            return []
        return self.table.propose(tokens, limit)


# Names and chances, from and below, of what the table is sure of, and less.
TABLE_RANGES = (("table sure", 0.6, 2.0), ("table", 0.3, 0.6), ("table unsure", 0.0, 0.3))


def draft_sources(table: ContinuationTable | None, *, context: bool = True) -> list[DraftSource]:
    """Sources for one row, from the one that is right most often to the least (docs/log.md).

    Args:
        table: the artifact's; None to do without.
        context: whether to copy from the row's own text.
    """
    found: list[DraftSource] = []
    for n, (name, least, below) in zip((3, 2, 1), TABLE_RANGES, strict=True):
        found += [ContextNGrams(n)] if context else []
        found += [TableDrafts(table, name, least, below)] if table is not None else []
    return found


@dataclass
class _Odds:
    """A running share of successes; older outcomes fade."""

    good: float = 1.0
    tried: float = 2.0

    def add(self, outcome: bool) -> None:
        """Take in one more."""
        fade = 0.98
        self.good, self.tried = self.good * fade + outcome, self.tried * fade + 1

    @property
    def share(self) -> float:
        """Of successes, so far."""
        return self.good / self.tried


@dataclass
class Acceptance:
    """How often guesses were right, by source and by place in the guess."""

    _odds: dict[tuple[str, int], _Odds] = field(default_factory=dict)

    def outcome(self, source: str, guessed: int, accepted: int) -> None:
        """Record that of `guessed` tokens the first `accepted` were right."""
        for place in range(1, min(accepted + 1, guessed) + 1):
            self._at(source, place).add(place <= accepted)

    def reach(self, source: str, limit: int) -> Iterator[float]:
        """The chance that the first, the first two, ... of a guess are all right."""
        chance = 1.0
        for place in range(1, limit + 1):
            chance *= self._at(source, place).share
            yield chance

    def _at(self, source: str, place: int) -> _Odds:
        return self._odds.setdefault((source, place), _Odds())


@dataclass
class Trial:
    """Finds out by trying whether something pays: tokens per second with it and without.

    Attributes:
        retry: rounds between tries of the side that is behind.
    """

    retry: int = 24
    _rate: dict[bool, float] = field(default_factory=dict)
    _rounds: int = 0

    def choose(self) -> bool:
        """Whether to do it in the next round."""
        self._rounds += 1
        if len(self._rate) < 2:
            return not self._rate.get(True)
        ahead = self._rate[True] >= self._rate[False]
        return ahead if self._rounds % self.retry else not ahead

    def outcome(self, used: bool, tokens: int, seconds: float) -> None:
        """Record a round."""
        rate = tokens / seconds
        old = self._rate.get(used, rate)
        self._rate[used] = old + 0.1 * (rate - old)


@dataclass
class DraftLength:
    """Chooses how many tokens to guess, from what was accepted and what passes have cost.

    Tokens come out at (1 + expected accepted) / cost of a pass of that many tokens. The length with
    the best rate is used; it may be none. What is not used is tried again now and then: a guess,
    so that drafting comes back when the text changes, and a pass without one, whose cost is what
    all others are measured against.

    Attributes:
        limit: most tokens guessed at once.
        fixed: always guess that many.
        retry: passes between tries of what is not used.
    """

    limit: int
    fixed: bool = False
    retry: int = 24
    _accepted: Acceptance = field(default_factory=Acceptance)
    _seconds: dict[int, float] = field(default_factory=dict)  # tokens in a pass -> running cost
    _since_try: dict[str, int] = field(default_factory=dict)
    _since_plain: int = 0

    def choose(self, source: str) -> int:
        """How many tokens to take from `source` now."""
        if self.fixed:
            return self.limit
        if 1 not in self._seconds or self._since_plain >= 4 * self.retry:
            self._since_plain = 0
            return 0
        self._since_plain += 1
        best, best_rate, expected = 0, 1.0 / self._cost(1), 1.0
        for length, reach in enumerate(self._accepted.reach(source, self.limit), 1):
            expected += reach
            rate = expected / self._cost(1 + length)
            if rate > best_rate:
                best, best_rate = length, rate
        if best:
            self._since_try[source] = 0
            return best
        self._since_try[source] = self._since_try.get(source, 0) + 1
        if self._since_try[source] >= self.retry:
            self._since_try[source] = 0
            return 1
        return 0

    def outcome(self, source: str, guessed: int, accepted: int) -> None:
        """Record that of `guessed` tokens the first `accepted` were right."""
        self._accepted.outcome(source, guessed, accepted)

    def cost(self, tokens: int, seconds: float) -> None:
        """Record what a pass over `tokens` tokens of a row took."""
        old = self._seconds.get(tokens)
        # A slow outlier is the machine, not the pass: it moves the estimate less.
        if old is None:
            self._seconds[tokens] = seconds
        else:
            self._seconds[tokens] += 0.1 * (min(seconds, 2 * old) - old)

    def _cost(self, tokens: int) -> float:
        """Cost of a pass: as measured at this length, else from the nearest lengths measured."""
        below = max((t for t in self._seconds if t <= tokens), default=1)
        above = min((t for t in self._seconds if t >= tokens), default=None)
        if above is None:
            # Beyond what was measured, assume that a longer pass costs a little more.
            return self._seconds[below] * (1 + 0.02 * (tokens - below))
        share = (tokens - below) / max(above - below, 1)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]
