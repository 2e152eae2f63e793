"""Gives lossless drafts in vLLM: the row's own text and the calibrated table guess, vLLM checks.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                           "model": "tide.vllm.proposer.TableProposer"}'
    --additional-config '{"tide": {"artifact": "DIR", "mode": "lossless"}}'

How many tokens each request guesses is chosen in every step, from how often guesses of a kind were
right and from what a step with that many tokens costs; where guesses do not pay, none are made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tide.decode.drafts import Acceptance, DraftSource, ServedNGrams, draft_sources
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.table import ContinuationTable
from tide.vllm.settings import Settings, require_model


@dataclass
class _Level:
    """Steps of one number of requests."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(3))  # of 1, tokens, seconds
    spread: float = 0.0  # of tokens around their mean, squared
    shared: float = 0.0  # of that, times seconds around theirs, as a share of it


@dataclass
class StepCost:
    """Seconds of a step: without guesses, and with them as a line over its tokens.

    Both for each number of requests. That a step has guesses at all costs something too, so a step
    without is not a point of the line. Steps of one size differ by more than a token costs, so the
    price of a token, as a share of a step, is learned from many, and where few are known, from
    those of other numbers of requests.

    Attributes:
        fade: weight of what was known before each new step.
        price_fade: the same for the price of a token.
        assumed: that price in a step of nothing else, before anything is known.
        weight: of what is assumed, in tokens squared: as if so much spread had been seen.
    """

    fade: float = 0.98
    price_fade: float = 0.998
    assumed: float = 0.015
    weight: float = 1500.0
    _levels: dict[int, _Level] = field(default_factory=dict)
    _plain: dict[int, float] = field(default_factory=dict)

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Record a step."""
        if tokens == requests:
            old = self._plain.get(requests, seconds)
            self._plain[requests] = old + 0.2 * (min(seconds, 2 * old) - old)
            return
        level = self._levels.setdefault(requests, _Level())
        if level.sums[0] > 4:
            _, mean_tokens, mean_seconds = level.sums / level.sums[0]
            base, price = self._line(level)
            # A slow outlier is the machine, not the step.
            seconds = min(seconds, 2 * (base + price * tokens))
            more = tokens - mean_tokens
            level.spread = self.price_fade * level.spread + more**2
            level.shared = self.price_fade * level.shared + more * (seconds / mean_seconds - 1)
        level.sums *= self.fade
        level.sums += 1, tokens, seconds

    def plain(self, requests: int) -> float | None:
        """Seconds of a step without guesses; None if nothing is known yet."""
        return self._plain.get(requests)

    def line(self, requests: int) -> tuple[float, float] | None:
        """Seconds of a step without tokens, and of each token; None if nothing is known yet."""
        near = min(self._levels, key=lambda known: abs(known - requests), default=None)
        if near is None:
            return None
        base, price = self._line(self._levels[near])
        return base * (requests / near) ** 0.5, price

    def _line(self, level: _Level) -> tuple[float, float]:
        levels = self._levels.values()
        _, tokens, seconds = level.sums / level.sums[0]
        share = self._share(
            sum(one.spread for one in levels),
            sum(one.shared for one in levels),
            self.assumed / (1 + self.assumed * tokens),  # of a step of so many, which costs more
        )
        price = self._share(level.spread, level.shared, share) * seconds
        return max(seconds - price * tokens, 0.0), price

    def _share(self, spread: float, shared: float, assumed: float) -> float:
        return max((shared + self.weight * assumed) / (spread + self.weight), 0.0)


@dataclass
class _Request:
    """What is known of the request in a row of vLLM's batch."""

    sources: list[DraftSource]
    tokens: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)  # after the last three of the prompt
    kind: str = ""
    guessed: int = 0


class TableProposer:
    """vLLM's `custom_class` proposer.

    Args:
        vllm_config: vLLM's.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = Settings.read(vllm_config)
        if settings is None or settings.mode != "lossless":
            raise ConfigError(
                "The proposer needs --additional-config "
                '\'{"tide": {"artifact": "DIR", "mode": "lossless"}}\'.'
            )
        made = Artifact.from_pretrained(settings.artifact or "")
        require_model(made, vllm_config)
        self._table = ContinuationTable(made.table) if made.table else None
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._room = int(vllm_config.model_config.max_model_len)
        self._requests: dict[int, _Request] = {}
        # All requests feed it, so it may look back further than the text of one.
        self._accepted = Acceptance(fade=0.995)
        self._served = ServedNGrams() if settings.learn else None
        self._cost = StepCost()
        self._last: tuple[int, int, float] | None = None  # requests, tokens, when proposed
        self._steps = 0

    def load_model(self, target_model: Any) -> None:
        """Nothing to load: the table is in memory."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Guesses for each row of the batch; none for rows that are still reading their prompt."""
        now = time.perf_counter()
        steady = True
        rows: list[_Request | None] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if not len(sampled) or length >= self._room - 1:
                rows.append(None)
                steady = steady and bool(len(sampled))
                continue
            request, known = self._follow(
                row, len(sampled_token_ids), token_ids_cpu[row, :length], len(sampled)
            )
            steady = steady and known
            rows.append(request)
        for row in [row for row in self._requests if row >= len(rows)]:
            del self._requests[row]
        if self._last is not None and steady and self._last[0] == len(rows):
            self._cost.add(self._last[0], self._last[1], now - self._last[2])
        drafts = self._choose(rows)
        # The time until the next call is that of this step's tokens.
        self._last = len(rows), len(rows) + sum(map(len, drafts)), time.perf_counter()
        return drafts

    def _follow(
        self, row: int, rows: int, tokens: np.ndarray, sampled: int
    ) -> tuple[_Request, bool]:
        """The request in a row, with what it has said; and whether it was there before."""
        before = len(tokens) - sampled
        recent = tokens[max(before - 16, 0) : before].tolist()

        def is_it(one: _Request | None) -> bool:
            # Its length and last words tell a request; a mistake would cost some wrong guesses.
            return one is not None and len(one.tokens) == before and one.tokens[-16:] == recent

        request = self._requests.pop(row, None)
        same = is_it(request)
        if not same:
            # When requests end, vLLM moves the last ones to their rows.
            moved = (old for old, one in self._requests.items() if old >= rows and is_it(one))
            request = self._requests.pop(next(moved, -1), None)
        if request is None:
            sources = draft_sources(self._table)
            if self._served is not None:
                sources.append(self._served)
            request = _Request(sources)
        else:
            self._accepted.outcome(request.kind, request.guessed, sampled - 1)
        self._requests[row] = request
        request.guessed = 0
        if self._served is not None:
            if not request.said:  # what its first words are said after
                request.said += tokens[max(before - self._served.n, 0) : before].tolist()
            start = len(request.said)
            request.said += tokens[before:].tolist()
            self._served.learn(request.said, start)
        request.tokens += tokens[len(request.tokens) :].tolist()
        return request, same

    def _choose(self, rows: Sequence[_Request | None]) -> list[list[int]]:
        """Of all guesses of all rows, those that make tokens come out fastest."""
        self._steps += 1
        offers: list[tuple[float, int, int]] = []  # chance to be reached and right, row, place
        guesses: list[list[int]] = [[] for _ in rows]
        for row, request in enumerate(rows):
            if request is None:
                continue
            found = self._accepted.best(request.sources, request.tokens, self._most)
            if found is not None:
                request.kind, guesses[row] = found
                chances = self._accepted.reach(found.kind, len(found.tokens))
                offers += [(chance, row, place) for place, chance in enumerate(chances, 1)]
        taken = self._pay(len(rows), sorted(offers, reverse=True))
        drafts = []
        for row, request in enumerate(rows):
            drafts.append(guesses[row][: taken.get(row, 0)])
            if request is not None:
                request.guessed = len(drafts[-1])
        return drafts

    def _pay(self, requests: int, offers: list[tuple[float, int, int]]) -> dict[int, int]:
        """How many guesses of each row pay."""
        plain = self._cost.plain(requests)
        if plain is None or self._steps % 64 == 0:
            return {}  # to know what it costs
        base, price = self._cost.line(requests) or (plain, 0.0)
        expected, count, best = float(requests), 0, 0.0
        for k, (chance, _, _) in enumerate(offers, 1):
            expected += chance
            rate = expected / (base + price * (requests + k))
            if rate > best:
                best, count = rate, k
        if best <= requests / plain and self._steps % 64 != 32:  # then: is that still so?
            count = 0
        taken: dict[int, int] = {}
        for _, row, place in offers[:count]:
            taken[row] = max(taken.get(row, 0), place)
        return taken
