"""Lossless drafts in vLLM: a request's own text and the calibrated table draft, vLLM verifies.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                           "model": "tide.vllm.proposer.TableProposer"}'
    --additional-config '{"tide": {"artifact": "DIR", "mode": "lossless"}}'

Every step chooses how many tokens to draft for each request, from how often drafts of that type
were accepted and from what a step of that many tokens costs; where drafts do not pay, there are
none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tide.decode.drafter import Acceptance
from tide.decode.sources import CrossRequestNGrams, DraftSource, draft_sources
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.table import ContinuationTable
from tide.vllm.settings import Settings, require_model
from tide.vllm.stepcost import StepCost

_RECENT = 16  # tokens by which a request is recognised


@dataclass
class _Request:
    """A request of vLLM's batch.

    Attributes:
        sources: that draft for it.
        tokens: prompt and answer so far.
        answer: the answer so far, after the last three tokens of the prompt.
        draft_type: of the last draft.
        drafted: tokens of the last draft.
    """

    sources: list[DraftSource]
    tokens: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    draft_type: str = ""
    drafted: int = 0


class _DraftToken(NamedTuple):
    """A token that may be drafted: with which chance, for which request, at which position."""

    chance: float  # that it and all before it in its draft are accepted
    request: int
    position: int  # in the draft, from 1


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
        self._limit = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._requests: dict[int, _Request] = {}  # by index in vLLM's batch
        # All requests feed it, so it can average over more outcomes than in a single text.
        self._acceptance = Acceptance(fade=0.995)
        self._cross_request = CrossRequestNGrams() if settings.cross_request_drafts else None
        self._cost = StepCost()
        self._last: tuple[int, int, float] | None = None  # requests, tokens, when proposed
        self._steps = 0

    def load_model(self, target_model: Any) -> None:
        """Load nothing: the table is in memory."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each request; empty for requests that still read their prompt."""
        now = time.perf_counter()
        steady = True  # whether the batch is that of the step before
        batch: list[_Request | None] = []
        for index, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[index])
            if not len(sampled) or length >= self._max_length - 1:
                batch.append(None)
                steady = steady and bool(len(sampled))
                continue
            request, known = self._update(
                index, len(sampled_token_ids), token_ids_cpu[index, :length], len(sampled)
            )
            steady = steady and known
            batch.append(request)
        for index in [index for index in self._requests if index >= len(batch)]:
            del self._requests[index]
        if self._last is not None and steady and self._last[0] == len(batch):
            self._cost.add(self._last[0], self._last[1], now - self._last[2])
        drafts = self._draft(batch)
        # The time until the next call is that of this step's tokens.
        self._last = len(batch), len(batch) + sum(map(len, drafts)), time.perf_counter()
        return drafts

    def _update(
        self, index: int, batch: int, tokens: np.ndarray, sampled: int
    ) -> tuple[_Request, bool]:
        """Find the request at an index of the batch, and add its new tokens.

        Args:
            index: in vLLM's batch.
            batch: number of requests.
            tokens: of the request, `[length]`.
            sampled: how many of them are new.

        Returns:
            The request, and whether it was at this index in the step before.
        """
        before = len(tokens) - sampled
        recent = tokens[max(before - _RECENT, 0) : before].tolist()

        def matches(one: _Request | None) -> bool:
            # Length and last tokens identify a request; a mistake would cost some wrong drafts.
            return one is not None and len(one.tokens) == before and one.tokens[-_RECENT:] == recent

        request = self._requests.pop(index, None)
        same = matches(request)
        if not same:
            # When requests end, vLLM moves the last ones to their indices.
            moved = (old for old, one in self._requests.items() if old >= batch and matches(one))
            request = self._requests.pop(next(moved, -1), None)
        if request is None:
            sources = draft_sources(self._table)
            if self._cross_request is not None:
                sources.append(self._cross_request)
            request = _Request(sources)
        else:
            self._acceptance.record(request.draft_type, request.drafted, sampled - 1)
        self._requests[index] = request
        request.drafted = 0
        if self._cross_request is not None:
            if not request.answer:  # the context of the answer's first tokens
                request.answer += tokens[max(before - self._cross_request.n, 0) : before].tolist()
            start = len(request.answer)
            request.answer += tokens[before:].tolist()
            self._cross_request.learn(request.answer, start)
        request.tokens += tokens[len(request.tokens) :].tolist()
        return request, same

    def _draft(self, batch: Sequence[_Request | None]) -> list[list[int]]:
        """Drafts for all requests, cut to the lengths with the highest expected throughput."""
        self._steps += 1
        candidates: list[_DraftToken] = []
        drafts: list[list[int]] = [[] for _ in batch]
        for index, request in enumerate(batch):
            if request is None:
                continue
            found = self._acceptance.best(request.sources, request.tokens, self._limit)
            if found is not None:
                request.draft_type, drafts[index] = found
                chances = self._acceptance.reach(found.draft_type, len(found.tokens))
                candidates += [_DraftToken(c, index, place) for place, c in enumerate(chances, 1)]
        lengths = self._lengths(len(batch), sorted(candidates, reverse=True))
        for index, request in enumerate(batch):
            drafts[index] = drafts[index][: lengths.get(index, 0)]
            if request is not None:
                request.drafted = len(drafts[index])
        return drafts

    def _lengths(self, requests: int, candidates: Sequence[_DraftToken]) -> dict[int, int]:
        """How many tokens to draft for each request.

        Args:
            requests: in the batch.
            candidates: draft tokens, the likeliest first.
        """
        undrafted = self._cost.undrafted(requests)
        if undrafted is None or self._steps % 64 == 0:
            return {}  # to measure a step without drafts
        base, price = self._cost.line(requests) or (undrafted, 0.0)
        expected, count, best = float(requests), 0, 0.0
        for k, candidate in enumerate(candidates, 1):
            expected += candidate.chance
            rate = expected / (base + price * (requests + k))
            if rate > best:
                best, count = rate, k
        # Where drafts do not pay, try them again now and then.
        if best <= requests / undrafted and self._steps % 64 != 32:
            count = 0
        lengths: dict[int, int] = {}
        for _, request, position in candidates[:count]:
            lengths[request] = max(lengths.get(request, 0), position)
        return lengths
