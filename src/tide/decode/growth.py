"""Growing draft trees: the most probable paths that the draft sources know. Knows no model.

Every source is looked up after the text and after each node. What several of them draft is one
node. A node's chance is its parent's times how often drafts with the same sources behind them were
accepted; the likeliest node is added next, so the first nodes of a tree are the best tree of their
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tide.decode.matches import LONGEST, ContextMatches
from tide.decode.recycled import RecycledPredictions
from tide.decode.sources import CrossRequestNGrams
from tide.decode.tree import NO_ORIGIN, DraftTree, Origin
from tide.exits.table import ContinuationTable

_HOPELESS = 0.004  # chance below which a node is not worth its place in any pass
_FADE = 0.998  # weight of what was known before each outcome
_FADE_TREES = 0.98
_ASSUMED = 16.0  # outcomes that the assumed rates count for
# Rates from which each source starts, by the entry of an `Origin`.
_CONTEXT = (0.0, 0.2, 0.35, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8)
_TABLE = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
_PAIR = (0.0, 0.45, 0.12, 0.07, 0.05, 0.04, 0.03, 0.03, 0.02)
_TOKEN = (0.0, 0.3, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02, 0.02)


@dataclass
class NodeRates:
    """How often nodes whose parents were accepted were accepted too, by what stands behind them."""

    _rates: dict[Origin, list[float]] = field(default_factory=dict)  # accepted, tried; they fade
    _trees: list[float] = field(default_factory=lambda: [_ASSUMED, _ASSUMED])  # as `_rates`

    @property
    def held(self) -> float:
        """Of what the chances of trees lately added up to, the share that was accepted.

        The likeliest nodes are taken, so the most overrated are; few of them have known rates.
        """
        accepted, expected = self._trees
        return accepted / expected

    def of(self, origin: Origin) -> float:
        """The share of nodes that were accepted."""
        found = self._rates.get(origin)
        if found is None:
            found = self._rates[origin] = [_ASSUMED * _assumed(origin), _ASSUMED]
        return found[0] / found[1]

    def forget(self, origin: Origin) -> None:
        """Let what is known fade to what was assumed, so that such nodes are tried again."""
        rate = self._rates[origin]
        rate[0] = _FADE * rate[0] + (1 - _FADE) * _ASSUMED * _assumed(origin)
        rate[1] = _FADE * rate[1] + (1 - _FADE) * _ASSUMED

    def record(self, tree: DraftTree) -> None:
        """Learn from a tree that is decided."""
        accepted, expected = self._trees
        self._trees = [
            _FADE_TREES * accepted + len(tree.path),
            _FADE_TREES * expected + sum(tree.chances),
        ]
        path = {-1, *tree.path}
        for node, (parent, origin) in enumerate(zip(tree.parents, tree.origins, strict=True)):
            if parent in path:
                self.of(origin)
                rate = self._rates[origin]
                rate[0] = rate[0] * _FADE + (node in path)
                rate[1] = rate[1] * _FADE + 1


def _assumed(origin: Origin) -> float:
    """The rate from which nodes with these sources behind them start."""
    match, chance, pair, token, answer = origin
    missed = (1 - _CONTEXT[match]) * (1 - _CONTEXT[answer]) * (1 - _TABLE[chance])
    missed *= 1 - _PAIR[pair]
    return 1 - (missed if pair else missed * (1 - _TOKEN[token]))


@dataclass
class TreeSource:
    """Grows the trees of one sequence.

    Attributes:
        rates: sequences share it.
        context: the sequence's own text; None to do without, as for the others.
        table: the artifact's.
        recycled: what full depth predicted lately; sequences may share it.
        answers: of earlier calls; sequences share it.
    """

    rates: NodeRates
    context: ContextMatches | None
    table: ContinuationTable | None
    recycled: RecycledPredictions | None
    answers: CrossRequestNGrams | None = None

    def grow(self, tokens: Sequence[int], nodes: int, depth: int) -> DraftTree:
        """A tree of up to `nodes` nodes that follows `tokens`, of paths up to `depth` long."""
        if self.context is not None:
            self.context.grow(tokens)
        tree = DraftTree()
        ahead: list[tuple[float, int, int, int, Origin]] = []  # -chance, number, parent, token
        tails = [list(tokens[-LONGEST:])]  # of the text, then of each node
        depths, number = [0], 0
        parent, chance = -1, 1.0
        while True:
            if depths[parent + 1] < depth:
                for token, origin in self._candidates(tokens, tails[parent + 1]).items():
                    likely = chance * self.rates.of(origin)
                    if likely > _HOPELESS:
                        number += 1
                        heappush(ahead, (-likely, number, parent, token, origin))
                    elif parent < 0:
                        self.rates.forget(origin)
            if not ahead or len(tree.tokens) == nodes:
                return tree
            negative, _, above, token, origin = heappop(ahead)
            chance, parent = -negative, len(tree.tokens)
            tree.tokens.append(token)
            tree.parents.append(above)
            tree.origins.append(origin)
            tree.chances.append(chance)
            tails.append([*tails[above + 1][1 - LONGEST :], token])
            depths.append(depths[above + 1] + 1)

    def _candidates(self, tokens: Sequence[int], tail: Sequence[int]) -> dict[int, Origin]:
        """What may follow `tail`, and what stands behind each."""
        found: dict[int, list[int]] = {}
        if self.context is not None:
            for token, match in self.context.followers(tokens, tail).items():
                found[token] = [match, *NO_ORIGIN[1:]]
        if self.table is not None and (known := self.table.next(tail)) is not None:
            found.setdefault(known[0], [*NO_ORIGIN])[1] = 1 + min(int(5 * known[1]), 4)
        if self.recycled is not None:
            before = tail[-2] if len(tail) > 1 else -1
            for entry, successors in enumerate(self.recycled.after(before, tail[-1]), 2):
                for rank, token in enumerate(successors, 1):
                    found.setdefault(token, [*NO_ORIGIN])[entry] = rank
        if self.answers is not None:
            for token, match in self.answers.followers(tail).items():
                found.setdefault(token, [*NO_ORIGIN])[4] = match
        return {token: tuple(origin) for token, origin in found.items()}  # type: ignore[misc]
