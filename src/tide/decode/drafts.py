"""Gives draft sources: small objects that guess the next tokens. Knows no model.

Prompt lookup is due to Saxena, "Prompt Lookup Decoding", 2023; that answers given to others are
worth looking up too, to Oliaro et al., "SuffixDecoding", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tide.exits.hints import NGramIndex
from tide.exits.table import ContinuationTable


class Guess(NamedTuple):
    """Tokens that may follow.

    Attributes:
        kind: what stands behind it. How often guesses are right is counted by kind.
        tokens: at least one.
    """

    kind: str
    tokens: list[int]


class DraftSource(Protocol):
    """Guesses the continuation of a row. A row has its own, so it may remember."""

    def propose(self, tokens: Sequence[int], limit: int) -> Guess | None:
        """Guess up to `limit` tokens that follow `tokens`; None if it has no idea."""
        ...


class ContextNGrams:
    """Copies what followed the latest earlier occurrence of the row's last 3, else 2, 1 tokens.

    A longer match is right more often and may be copied further, so each length is a kind.
    """

    def __init__(self) -> None:
        self._index = NGramIndex()

    def propose(self, tokens: Sequence[int], limit: int) -> Guess | None:
        """See `DraftSource.propose`."""
        self._index.grow(tokens, len(tokens))
        for n in self._index.orders:
            place = self._index.after(tokens[-n:]) if len(tokens) >= n else None
            if place is not None:
                return Guess(f"context {n}", list(tokens[place : place + limit]))
        return None


class ServedNGrams:
    """Copies what followed the last three tokens in what any row has said lately.

    Rows share it.

    Args:
        most: n-grams remembered. The older half is forgotten at once.
    """

    n = 3

    def __init__(self, most: int = 1 << 18) -> None:
        self._half = most // 2
        self._new: dict[tuple[int, ...], tuple[list[int], int]] = {}  # -> text, place after it
        self._old: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def learn(self, said: list[int], start: int) -> None:
        """Remember what a row said from place `start` on.

        Args:
            said: is kept, not copied, so it should not have the whole prompt in it. It may grow
                but not change.
        """
        for end in range(max(start, self.n), len(said)):
            self._new[tuple(said[end - self.n : end])] = said, end
        if len(self._new) > self._half:
            self._old, self._new = self._new, {}

    def propose(self, tokens: Sequence[int], limit: int) -> Guess | None:
        """See `DraftSource.propose`."""
        key = tuple(tokens[-self.n :])
        text, place = self._new.get(key) or self._old.get(key) or ([], 0)
        return Guess("served", text[place : place + limit]) if text else None


class TableDrafts:
    """What the calibrated table says. How sure it is of the next token, in fifths, is the kind.

    Args:
        table: the artifact's.
    """

    def __init__(self, table: ContinuationTable) -> None:
        self.table = table

    def propose(self, tokens: Sequence[int], limit: int) -> Guess | None:
        """See `DraftSource.propose`."""
        said = self.table.propose(tokens, limit)
        if not said:
            return None
        return Guess(f"table {min(int(5 * said[0][1]), 4) / 5:.0%}", [token for token, _ in said])


def draft_sources(table: ContinuationTable | None, *, context: bool = True) -> list[DraftSource]:
    """Sources for one row.

    Args:
        table: the artifact's; None to do without.
        context: whether to copy from the row's own text.
    """
    found: list[DraftSource] = [ContextNGrams()] if context else []
    return [*found, TableDrafts(table)] if table is not None else found


@dataclass
class _Odds:
    """A running share of successes; older outcomes fade."""

    good: float = 1.0
    tried: float = 2.0

    def add(self, outcome: bool, fade: float) -> None:
        """Take in one more."""
        self.good, self.tried = self.good * fade + outcome, self.tried * fade + 1

    def forget(self, fade: float) -> None:
        """Let what is known fade to what was assumed before anything was."""
        self.good, self.tried = 1 + (self.good - 1) * fade, 2 + (self.tried - 2) * fade

    @property
    def share(self) -> float:
        """Of successes, so far."""
        return self.good / self.tried


@dataclass
class Acceptance:
    """How often guesses were right, by kind and by place in the guess.

    Attributes:
        fade: weight of what was known before each outcome.
    """

    fade: float = 0.99
    _odds: dict[tuple[str, int], _Odds] = field(default_factory=dict)

    def outcome(self, kind: str, guessed: int, accepted: int) -> None:
        """Record that of `guessed` tokens the first `accepted` were right."""
        for place in range(1, min(accepted + 1, guessed) + 1):
            self._at(kind, place).add(place <= accepted, self.fade)

    def reach(self, kind: str, limit: int) -> Iterator[float]:
        """The chance that the first, the first two, ... of a guess are all right."""
        chance = 1.0
        for place in range(1, limit + 1):
            chance *= self._at(kind, place).share
            yield chance

    def best(
        self, sources: Iterable[DraftSource], tokens: Sequence[int], limit: int
    ) -> Guess | None:
        """Of what the sources guess, that from which most tokens can be expected.

        What is known of the others fades, so that their turn comes again.
        """
        guesses = [guess for source in sources if (guess := source.propose(tokens, limit))]
        found = max(guesses, key=lambda g: sum(self.reach(g.kind, len(g.tokens))), default=None)
        for guess in guesses:
            if guess is not found:
                self._at(guess.kind, 1).forget(self.fade)
        return found

    def _at(self, kind: str, place: int) -> _Odds:
        found = self._odds.get((kind, place))
        if found is None:
            found = self._odds[kind, place] = _Odds()
        return found


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
        accepted: how often guesses were right.
    """

    limit: int
    fixed: bool = False
    retry: int = 24
    accepted: Acceptance = field(default_factory=Acceptance)
    _seconds: dict[int, float] = field(default_factory=dict)  # tokens in a pass -> running cost
    _since_try: dict[str, int] = field(default_factory=dict)
    _since_plain: int = 0

    def choose(self, kind: str) -> int:
        """How many tokens of a guess of this kind to take now."""
        if self.fixed:
            return self.limit
        if 1 not in self._seconds or self._since_plain >= 4 * self.retry:
            self._since_plain = 0
            return 0
        self._since_plain += 1
        best, best_rate, expected = 0, 1.0 / self._cost(1), 1.0
        for length, reach in enumerate(self.accepted.reach(kind, self.limit), 1):
            expected += reach
            rate = expected / self._cost(1 + length)
            if rate > best_rate:
                best, best_rate = length, rate
        if best:
            self._since_try[kind] = 0
            return best
        self._since_try[kind] = self._since_try.get(kind, 0) + 1
        if self._since_try[kind] >= self.retry:
            self._since_try[kind] = 0
            return 1
        return 0

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
