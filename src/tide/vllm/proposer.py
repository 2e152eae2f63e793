"""Gives lossless drafts in vLLM: the row's own text and the calibrated table guess, vLLM checks.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 6,
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

from tide.decode.drafts import Acceptance, DraftSource, draft_sources
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.table import ContinuationTable
from tide.vllm.settings import Settings, require_model


@dataclass
class StepCost:
    """Seconds of a step, as a line over its tokens, learned for each number of requests.

    Attributes:
        fade: weight of what was known before each new step.
        slope: before anything is known, what a token costs as a share of a step.
    """

    fade: float = 0.98
    slope: float = 0.01
    _sums: dict[int, np.ndarray] = field(default_factory=dict)  # of 1, t, tt, s, ts

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """Record a step."""
        sums = self._sums.setdefault(requests, np.zeros(5))
        if sums[0] > 4:  # a slow outlier is the machine, not the step
            seconds = min(seconds, 2 * sums[3] / sums[0])
        sums *= self.fade
        sums += (1, tokens, tokens**2, seconds, tokens * seconds)

    def line(self, requests: int) -> tuple[float, float] | None:
        """Seconds of a step without tokens, and of each token; None if nothing is known yet."""
        near = min(self._sums, key=lambda known: abs(known - requests), default=None)
        if near is None:
            return None
        n, t, tt, s, ts = self._sums[near]
        mean, seconds = t / n, s / n
        spread = tt / n - mean**2
        # What is assumed counts as four tokens squared of spread, so it is held to where steps
        # have hardly differed.
        seen, assumed = n * (ts / n - mean * seconds), 4.0 * self.slope * seconds
        slope = max((assumed + seen) / (4.0 + n * spread), 0.0)
        return max(seconds - slope * mean, 0.0) * (requests / near) ** 0.5, slope


@dataclass
class _Request:
    """What is known of the request in a row of vLLM's batch."""

    sources: list[DraftSource]
    tokens: list[int] = field(default_factory=list)
    guessed_by: str = ""
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
        self._accepted = Acceptance()
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
            known = self._follow(row, token_ids_cpu[row, :length], len(sampled))
            steady = steady and known
            rows.append(self._requests[row])
        if self._last is not None and steady and self._last[0] == len(rows):
            self._cost.add(self._last[0], self._last[1], now - self._last[2])
        drafts = self._choose(rows)
        # The time until the next call is that of this step's tokens.
        self._last = len(rows), len(rows) + sum(map(len, drafts)), time.perf_counter()
        return drafts

    def _follow(self, row: int, tokens: np.ndarray, sampled: int) -> bool:
        """Take in what a row has said; whether it is the request that was there before."""
        request = self._requests.get(row)
        before = len(tokens) - sampled
        same = (
            request is not None
            and len(request.tokens) == before
            and bool((tokens[:before] == request.tokens).all())
        )
        if request is None or not same:
            request = self._requests[row] = _Request(draft_sources(self._table))
        else:
            self._accepted.outcome(request.guessed_by, request.guessed, sampled - 1)
        request.guessed = 0
        request.tokens += tokens[len(request.tokens) :].tolist()
        return same

    def _choose(self, rows: Sequence[_Request | None]) -> list[list[int]]:
        """Of all guesses of all rows, those that make tokens come out fastest."""
        self._steps += 1
        offers: list[tuple[float, int, int]] = []  # chance to be reached and right, row, place
        guesses: list[list[int]] = [[] for _ in rows]
        for row, request in enumerate(rows):
            if request is None:
                continue
            for source in request.sources:
                guessed = source.propose(request.tokens, self._most)
                if guessed:
                    guesses[row], request.guessed_by = guessed, source.name
                    chances = self._accepted.reach(source.name, len(guessed))
                    offers += [(chance, row, place) for place, chance in enumerate(chances, 1)]
                    break
        taken = self._pay(len(rows), sorted(offers, reverse=True))
        drafts = []
        for row, request in enumerate(rows):
            drafts.append(guesses[row][: taken.get(row, 0)])
            if request is not None:
                request.guessed = len(drafts[-1])
        return drafts

    def _pay(self, requests: int, offers: list[tuple[float, int, int]]) -> dict[int, int]:
        """How many guesses of each row pay."""
        line = self._cost.line(requests)
        if line is None:
            return {}
        base, slope = line
        expected, tokens, count = float(requests), requests, 0
        best = expected / (base + slope * tokens)
        for k, (chance, _, _) in enumerate(offers, 1):
            expected, tokens = expected + chance, tokens + 1
            rate = expected / (base + slope * tokens)
            if rate > best:
                best, count = rate, k
        if not count and offers and self._steps % 64 == 0:
            count = max(1, requests // 4)  # to see whether that is still so
        taken: dict[int, int] = {}
        for _, row, place in offers[:count]:
            taken[row] = max(taken.get(row, 0), place)
        return taken
