"""The drafter: decides once a step which tokens to draft, from what was accepted and what it cost.

It outlives calls, so what one prompt has taught serves the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

from tide.config import MOST_NODES
from tide.decode.batch import BatchState
from tide.decode.growth import NodeRates, TreeSource
from tide.decode.pass_costs import PassCosts, pass_cost
from tide.decode.sources import Draft, DraftSource
from tide.decode.tree import DraftTree

# Drafted tokens that are considered: all of a chain, and some sizes of trees, so that the cost of
# each is known.
SIZES = (*range(1, 13), 16, 24, 32, 48, 64)
RETRY = 24  # steps between tries of what does not pay at present
_LESS = 0.9  # of the nodes that paid, those that are still grown a step later
_FEWEST = 4  # nodes that are grown even where none pay


@dataclass
class _RunningRate:
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
    """How often drafts were accepted, by type and by place in the draft.

    Attributes:
        fade: weight of what was known before each outcome.
    """

    fade: float = 0.99
    _rates: dict[tuple[str, int], _RunningRate] = field(default_factory=dict)

    def record(self, draft_type: str, drafted: int, accepted: int) -> None:
        """Record that of `drafted` tokens the first `accepted` were accepted."""
        for place in range(1, min(accepted + 1, drafted) + 1):
            self._at(draft_type, place).add(place <= accepted, self.fade)

    def reach(self, draft_type: str, limit: int) -> Iterator[float]:
        """The chance that the first, the first two, ... of a draft are all accepted."""
        chance = 1.0
        for place in range(1, limit + 1):
            chance *= self._at(draft_type, place).share
            yield chance

    def best(
        self, sources: Iterable[DraftSource], tokens: Sequence[int], limit: int
    ) -> Draft | None:
        """Of what the sources draft, that from which most tokens can be expected.

        What is known of the others fades, so that their turn comes again.
        """
        drafts = [draft for source in sources if (draft := source.propose(tokens, limit))]
        found = max(
            drafts, key=lambda d: sum(self.reach(d.draft_type, len(d.tokens))), default=None
        )
        for draft in drafts:
            if draft is not found:
                self._at(draft.draft_type, 1).forget(self.fade)
        return found

    def _at(self, draft_type: str, place: int) -> _RunningRate:
        found = self._rates.get((draft_type, place))
        if found is None:
            found = self._rates[draft_type, place] = _RunningRate()
        return found


@dataclass
class OnlineComparison:
    """Finds out by trying whether something pays: tokens per second with it and without.

    Attributes:
        retry: cycles between tries of what is behind.
    """

    retry: int = RETRY
    _rate: dict[bool, float] = field(default_factory=dict)
    _cycles: int = 0

    def choose(self) -> bool:
        """Whether to do it in the next cycle."""
        self._cycles += 1
        if len(self._rate) < 2:
            return not self._rate.get(True)
        ahead = self._rate[True] >= self._rate[False]
        return ahead if self._cycles % self.retry else not ahead

    def record(self, used: bool, tokens: int, seconds: float) -> None:
        """Record a cycle; one during which the clock jumped back tells nothing."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        old = self._rate.get(used, rate)
        # One that was hardly timed at all would count for thousands.
        most = 2 * max(self._rate.values(), default=rate)
        self._rate[used] = old + 0.1 * (min(rate, most) - old)


@dataclass
class Drafter:
    """Drafts for a batch; none where drafts do not pay.

    Tokens come out at (1 + expected accepted) for each sequence, over the cost of a pass as long as
    its longest chunk. The length with the best rate is used; it may be none. What is not used is
    tried again now and then: a draft, so that drafting comes back when the text changes, and a step
    without any, whose cost is what all others are measured against.

    Attributes:
        limit: most tokens drafted one after the other.
        nodes: most nodes of a draft tree.
        fixed: always draft that many, whether it pays or not: for tests and experiments.
        accepted: how often drafts were accepted.
        rates: how often nodes of trees were accepted.
        costs: what steps have cost.
        exit_drafts: whether drafts by exit heads pay.
    """

    limit: int
    nodes: int = 0
    fixed: bool = False
    accepted: Acceptance = field(default_factory=Acceptance)
    rates: NodeRates = field(default_factory=NodeRates)
    costs: PassCosts = field(default_factory=PassCosts)
    exit_drafts: OnlineComparison = field(default_factory=OnlineComparison)
    _since_try: dict[str, int] = field(default_factory=dict)  # by draft type
    _since_undrafted: int = 0
    _paid: float = math.inf  # nodes of trees that paid lately; it fades

    def propose(
        self, batch: BatchState, sources: Mapping[int, Sequence[DraftSource] | TreeSource]
    ) -> None:
        """Let draft sources draft for every sequence that has no open drafts.

        Args:
            sources: by index of a sequence.
        """
        drafts: dict[int, Draft | DraftTree] = {}
        nodes = self._most_nodes(batch)
        for i, sequence in enumerate(batch.sequences):
            if sequence.open_drafts or not (some := sources[sequence.index]):
                continue
            room = min(sequence.room - 1, self.limit)
            found: Draft | DraftTree | None = None
            if isinstance(some, TreeSource):
                # Behind what waits, so that a compiled pass can still take both.
                most = min(nodes, max(0, MOST_NODES - batch.pending(i)))
                found = some.grow(sequence.tokens, most, room)
            elif (room := min(batch.pending_room(i), room)) >= 1:
                found = self.accepted.best(some, sequence.tokens, room)
            if found is not None and found.tokens:
                drafts[i] = found
        if not drafts:
            return
        for i, length in self.lengths(batch, drafts).items():
            draft = drafts[i]
            if length and isinstance(draft, DraftTree):
                batch.draft_tree(i, draft.first(length))
            elif length:
                batch.draft(i, draft.tokens[:length], draft.draft_type)

    def _most_nodes(self, batch: BatchState) -> int:
        """Nodes of the trees to grow: some more than paid lately, and no more than were timed."""
        if self.fixed:
            return self.nodes
        timed = max(self.costs.of(batch), default=1) - 1
        lately = max(_FEWEST, math.ceil(min(2 * self._paid, self.nodes)))
        return min(self.nodes, lately, max(_FEWEST, timed))

    def lengths(self, batch: BatchState, drafts: Mapping[int, Draft | DraftTree]) -> dict[int, int]:
        """How many tokens of each draft to take in this step."""
        if self.fixed:
            return {i: len(draft.tokens) for i, draft in drafts.items()}
        costs = self.costs.of(batch)
        if 1 not in costs or self._since_undrafted >= 4 * RETRY:
            self._since_undrafted = 0
            return {}
        self._since_undrafted += 1
        best = self._best_length(costs, len(batch.sequences), list(drafts.values()))
        self._paid = max(best, _LESS * min(self._paid, self.nodes))
        if best:
            for draft in drafts.values():
                self._since_try[draft.draft_type] = 0
            return {i: min(best, len(draft.tokens)) for i, draft in drafts.items()}
        return self._tries(drafts)

    def _best_length(
        self, costs: Mapping[int, float], sequences: int, drafts: Sequence[Draft | DraftTree]
    ) -> int:
        """The length that makes tokens come out fastest; sequences share a pass, so it is one."""
        longest = max(len(draft.tokens) for draft in drafts)
        expected = [float(sequences)] + [0.0] * longest
        for draft in drafts:
            for length, chance in enumerate(self._chances(draft), 1):
                expected[length] += chance
        best, best_rate = 0, sequences / pass_cost(costs, 1)
        tokens = list(accumulate(expected))
        for length in takewhile(longest.__ge__, SIZES):
            rate = tokens[length] / pass_cost(costs, 1 + length)
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def _chances(self, draft: Draft | DraftTree) -> Iterable[float]:
        """The chance of each token of a draft that it is accepted with all that it follows."""
        if isinstance(draft, DraftTree):
            return [self.rates.held * chance for chance in draft.chances]
        return self.accepted.reach(draft.draft_type, len(draft.tokens))

    def _tries(self, drafts: Mapping[int, Draft | DraftTree]) -> dict[int, int]:
        """Now and then, one token of a type that does not pay at present."""
        types = {draft.draft_type for draft in drafts.values()}
        due = set()
        for draft_type in types:
            self._since_try[draft_type] = self._since_try.get(draft_type, 0) + 1
            if self._since_try[draft_type] >= RETRY:
                self._since_try[draft_type] = 0
                due.add(draft_type)
        return {i: 1 for i, draft in drafts.items() if draft.draft_type in due}
