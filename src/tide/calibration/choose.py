"""The choice of exits: which checkpoints, and which thresholds, save most time at a given risk.

Made on the tuning split. It is a choice and no guarantee: `tide.certify` certifies the thresholds,
on documents that were not used here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from tide.calibration.costs import Costs
from tide.calibration.scores import Scores
from tide.exits.thresholds import Thresholds

_NO_EXIT = Thresholds(router=2.0)  # evaluates the router, and no token passes
_PREFILTERS = (0.0, 0.2, 0.4, 0.6, 0.75, 0.85)  # shares of tokens that may be rejected unread
_PRICES = np.geomspace(1.02, 2000.0, 60).tolist()  # of a wrong token, in units of a full pass


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Checkpoints with their thresholds, and the expected outcome.

    Attributes:
        layers: the checkpoints, by depth.
        thresholds: of each checkpoint.
        exit_rate: share of tokens that exit.
        read_rate: exit heads read for each token.
        error_rate: share of all tokens that exit with another token than the target token.
        depth_saved: share of all layer computations that exits avoid.
        speedup: expected, at batch 1, from the measured costs.
    """

    layers: tuple[int, ...]
    thresholds: tuple[Thresholds, ...]
    exit_rate: float
    read_rate: float
    error_rate: float
    depth_saved: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **asdict(self),
            "layers": list(self.layers),
            "thresholds": [asdict(t) for t in self.thresholds],
        }


def follow(
    scores: Sequence[Scores], thresholds: Sequence[Thresholds], costs: Costs, n_layers: int
) -> Choice:
    """The outcome of thresholds at some checkpoints, by depth, on some tokens."""
    tokens = len(scores[0].correct)
    full = costs.start + n_layers * costs.layer + costs.head
    remaining = np.ones(tokens, bool)
    seconds, wrong, saved, reads = full * tokens, 0, 0, 0
    for at, limit in zip(scores, thresholds, strict=True):
        read = remaining.copy()  # tokens for which the exit head is read
        for stage in ("router", "prefilter"):
            if (threshold := getattr(limit, stage)) is not None:
                read &= getattr(at, stage) >= threshold
        exits = read.copy()
        if limit.top_probability is not None:
            exits &= at.top_probability >= limit.top_probability
        if limit.confidence is not None:
            exits &= at.confidence >= limit.confidence
        exited, above = int(exits.sum()), n_layers - at.layer - 1
        needs_router = limit.router is not None or limit.confidence is not None
        first = costs.prefilter if limit.prefilter is not None else costs.router * needs_router
        seconds += remaining.sum() * first + read.sum() * costs.exit_head
        reads += int(read.sum())
        seconds -= exited * (above * costs.layer + costs.head)
        wrong += int((exits & ~at.correct).sum())
        saved += exited * above
        remaining &= ~exits
        seconds += remaining.sum() * costs.start  # tokens that continue take another pass
    return Choice(
        layers=tuple(at.layer for at in scores),
        thresholds=tuple(thresholds),
        exit_rate=float(1 - remaining.mean()),
        read_rate=reads / tokens,
        error_rate=wrong / tokens,
        depth_saved=saved / (tokens * n_layers),
        speedup=float(full * tokens / seconds),
    )


def one_scorer(
    scores: Scores,
    scorer: str,
    risk: float,
    costs: Costs,
    n_layers: int,
    *,
    first_stage: str | None = None,
) -> Choice:
    """The thresholds with most exits at one checkpoint by one scorer, with at most `risk` wrong.

    Args:
        scorer: "router", "prefilter", "top_probability" or "confidence".
        first_stage: "router" or "prefilter": rejects tokens first, at the share that saves most
            time.
    """
    best: Choice | None = None
    for share in _PREFILTERS if first_stage else (0.0,):
        first = _rejecting(scores, first_stage, share) if first_stage else Thresholds()
        read = np.ones(len(scores.correct), bool)
        if first_stage and (least := getattr(first, first_stage)) is not None:
            read = getattr(scores, first_stage) >= least
        value = getattr(scores, scorer)[read]
        order = np.argsort(-value, kind="stable")
        wrong = np.cumsum(~scores.correct[read][order])
        # Tokens of equal value exit together.
        last = np.flatnonzero(np.diff(value[order], append=-np.inf))
        fits = last[wrong[last] <= risk * len(scores.correct)]
        limit = _NO_EXIT
        if len(fits):
            limit = replace(first, **{scorer: float(value[order][fits[-1]])})
        found = follow([scores], [limit], costs, n_layers)
        if best is None or found.speedup > best.speedup:
            best = found
    assert best is not None
    return best


def choose(
    scores: Sequence[Scores],
    risk: float,
    costs: Costs,
    n_layers: int,
    *,
    most: int = 3,
    keep: int = 1,
) -> list[Choice]:
    """For each number of exits up to `most`, the `keep` choices with the least time, best first.

    Thresholds of several checkpoints move together: a token exits where the time it saves is worth
    the probability of an error, at one price of a wrong token for all checkpoints. The price is the
    lowest that keeps the risk. Where nothing that keeps the risk saves time, no token exits.
    """
    found = []
    for count in range(1, min(most, len(scores)) + 1):
        options = [
            _cheapest(list(some), risk, costs, n_layers) for some in combinations(scores, count)
        ]
        found += sorted(options, key=lambda choice: -choice.speedup)[:keep]
    return found


def best(choices: Sequence[Choice]) -> Choice:
    """The choice with the least expected time."""
    return max(choices, key=lambda choice: choice.speedup)


def _cheapest(scores: list[Scores], risk: float, costs: Costs, n_layers: int) -> Choice:
    """The best choice at some checkpoints: one price for all, then a prefilter for each."""
    full = costs.start + n_layers * costs.layer + costs.head
    saves = [((n_layers - s.layer - 1) * costs.layer + costs.head) / full for s in scores]

    def at_price(price: float, first: Sequence[Thresholds]) -> Choice:
        limits = [
            replace(some, confidence=1 - save / price)
            for some, save in zip(first, saves, strict=True)
        ]
        return follow(scores, limits, costs, n_layers)

    def at_lowest_price(first: Sequence[Thresholds]) -> Choice | None:
        # Thresholds rise with the price, so the error rate falls. With several checkpoints it may
        # rise by a few tokens in between, but bisection only ever returns a price that it tried.
        index = bisect_left(
            _PRICES, True, key=lambda price: at_price(price, first).error_rate <= risk
        )
        return at_price(_PRICES[index], first) if index < len(_PRICES) else None

    chosen = follow(scores, [_NO_EXIT] * len(scores), costs, n_layers)
    first = [Thresholds() for _ in scores]
    for k, at in enumerate(scores):
        for share in _PREFILTERS if k == 0 else _PREFILTERS[1:]:
            tried = [*first]
            tried[k] = _rejecting(at, at.first_stage, share)
            found = at_lowest_price(tried)
            if found is not None and found.speedup > chosen.speedup:
                chosen, first = found, tried
    return chosen


def _rejecting(scores: Scores, stage: str, share: float) -> Thresholds:
    """The threshold of the first stage that rejects a share of the tokens; none for none."""
    least = float(np.quantile(getattr(scores, stage), share)) if share else None
    return replace(Thresholds(), **{stage: least})
