"""Lossless drafts in vLLM: a request's own text and the calibrated table draft, vLLM verifies.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                           "model": "tide.vllm.proposer.TableProposer"}'
    --additional-config '{"tide": {"mode": "lossless"}}'

Every step chooses how many tokens to draft for each request, from how often drafts of that type
were accepted and from what a step of that many tokens costs; where drafts do not pay, there are
none.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tide.decode.drafter import Acceptance
from tide.decode.sources import CrossRequestNGrams, DraftSource, draft_sources
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.table import ContinuationTable
from tide.vllm.settings import Settings, require_model
from tide.vllm.stepcost import StepCost
from tide.vllm.switch import DraftSwitch

if TYPE_CHECKING:
    from tide.vllm.metrics import DraftMetrics

_RECENT = 16  # tokens by which a request is recognised
_PROBE = 8  # requests for which a probe drafts, one token each
_QUIET = 60.0  # seconds without another message on the same switch
logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown


@dataclass
class _Request:
    """A request of vLLM's batch.

    Attributes:
        sources: that draft for it.
        tokens: prompt and answer, up to the last step in which drafts were looked for.
        answer: the answer of late, after the three tokens before it.
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


class _Step(NamedTuple):
    """A step: when vLLM began it, the tokens of each request by then, and its drafts."""

    began: float
    lengths: np.ndarray  # [requests]
    drafted: int


class TableProposer:
    """vLLM's `custom_class` proposer.

    Args:
        vllm_config: vLLM's.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = Settings.read(vllm_config)
        if settings is None or settings.mode != "lossless":
            raise ConfigError(
                'The proposer needs --additional-config \'{"tide": {"mode": "lossless"}}\'.'
            )
        self._table: ContinuationTable | None = None
        if settings.artifact is not None:
            made = Artifact.from_pretrained(settings.artifact)
            require_model(made, vllm_config)
            self._table = ContinuationTable(made.table) if made.table else None
        speculative = vllm_config.speculative_config
        self._limit = int(speculative.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        # Where a draft may not fit one request, vLLM drafts zeros for all of them, unasked. Drafts
        # that do not fit are cut by its scheduler, so they may be beyond the limit here.
        speculative.draft_model_config = copy.copy(vllm_config.model_config)
        speculative.draft_model_config.max_model_len += 2 * self._limit
        self._requests: dict[int, _Request] = {}  # by index in vLLM's batch
        # All requests feed it, so it can average over more outcomes than in a single text.
        self._acceptance = Acceptance(fade=0.995)
        self._cross_request = CrossRequestNGrams() if settings.cross_request_drafts else None
        self._model: Any = None
        self._switches: dict[int, DraftSwitch] = {}  # by the binary length of a batch
        self._logged: dict[int, float] = {}  # when, by the same
        self._metrics: DraftMetrics | None = None
        self._last = _Step(0.0, np.zeros(0, np.int64), 0)
        self._probed = 0

    def load_model(self, target_model: Any) -> None:
        """Keep the model, which measures later what steps cost; the table is in memory."""
        from tide.vllm.metrics import DraftMetrics
        from tide.vllm.undrafted import sample_undrafted_directly

        self._model, self._metrics = target_model, DraftMetrics()
        sample_undrafted_directly()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each request; empty for requests that still read their prompt.

        Args:
            sampled_token_ids: in this step, by request.
            num_tokens_no_spec: length of each request, those included.
            token_ids_cpu: of each request.
            slot_mappings: of the step's tokens, by layer; a list of such, for microbatches.
        """
        began, requests = time.perf_counter(), len(sampled_token_ids)
        sampled = np.fromiter(map(len, sampled_token_ids), np.int64, requests)
        lengths = num_tokens_no_spec[:requests].astype(np.int64)  # a copy: vLLM changes its own
        last = self._last
        # Not if a prompt was read in that step, or if requests came, moved or ended.
        same = len(last.lengths) == requests and bool(sampled.all())
        if same and np.array_equal(last.lengths + sampled, lengths):
            self._cost.add(requests, requests + last.drafted, began - last.began)
            self._cost.add_prompts(0)
        else:
            self._cost.add_prompts(max(_tokens(slot_mappings) - requests - last.drafted, 0))
        switch = self._switches.setdefault(requests.bit_length(), DraftSwitch())
        looks = switch.begin()
        # Where drafts do not pay, a step costs what it costs without us: only the texts of requests
        # that had a draft are read.
        indices: Sequence[int] = range(requests) if switch.on else [
            index for index, one in self._requests.items() if one.drafted and index < requests
        ]  # fmt: skip
        if looks and not indices:
            self._probed += _PROBE
            indices = [(self._probed + i) % requests for i in range(min(_PROBE, requests))]
        batch: dict[int, _Request] = {}
        accepted = 0
        for index in indices:
            if sampled[index] and lengths[index] < self._max_length - 1:
                text = token_ids_cpu[index, : lengths[index]]
                batch[index], count = self._update(index, requests, text, int(sampled[index]))
                accepted += count
        if len(indices) == requests:
            for index in [index for index in self._requests if index >= requests]:
                del self._requests[index]

        decision, drafts = "does_not_pay", dict[int, list[int]]()
        if looks:
            before = switch.on
            decision, drafts = self._draft(batch, requests, len(indices), switch)
            if switch.on != before:
                self._announce(requests, switch, began)
            if before and len(indices) == requests:  # else whole texts may have been read
                switch.looked(time.perf_counter() - began)
        for index, request in batch.items():
            request.drafted = len(drafts.get(index, ()))
        drafted = sum(map(len, drafts.values()))
        if self._metrics is not None:
            self._metrics.step(decision, drafted, accepted)
        self._last = _Step(time.perf_counter(), lengths, drafted)
        return [drafts.get(index, []) for index in range(requests)]

    @cached_property
    def _cost(self) -> StepCost:
        # Made at the first step: vLLM warms up after it has called `load_model`.
        return StepCost(getattr(self._model, "step_costs", None))

    def _update(
        self, index: int, requests: int, tokens: np.ndarray, sampled: int
    ) -> tuple[_Request, int]:
        """Find the request at an index of the batch, and add its new tokens.

        Args:
            index: in vLLM's batch.
            requests: in the batch.
            tokens: of the request, `[length]`.
            sampled: how many of them are new in this step.

        Returns:
            The request, and how many tokens of its last draft were accepted.
        """
        before = len(tokens) - sampled

        def matches(one: _Request | None) -> bool:
            # The last tokens, where they stand, identify a request, also if nothing was looked for
            # since; a mistake would cost some wrong drafts.
            end = 0 if one is None else len(one.tokens)
            recent = tokens[max(end - _RECENT, 0) : end].tolist()
            return one is not None and end <= before and one.tokens[-_RECENT:] == recent

        request = self._requests.pop(index, None)
        if not matches(request):
            # When requests end, vLLM moves the last ones to their indices.
            moved = (old for old, one in self._requests.items() if old >= requests and matches(one))
            request = self._requests.pop(next(moved, -1), None)
        if request is None:
            request = _Request(draft_sources(self._table, answers=self._cross_request))
        self._requests[index] = request
        accepted, follows = 0, len(request.tokens) == before
        if follows:
            accepted = min(sampled - 1, request.drafted)
            self._acceptance.record(request.draft_type, request.drafted, accepted)
        if self._cross_request is not None:
            if not follows or not request.answer:
                # Only what this step sampled is surely an answer; before it is its context.
                request.answer = tokens[max(before - self._cross_request.n, 0) : before].tolist()
            start = len(request.answer)
            request.answer += tokens[before:].tolist()
            self._cross_request.learn(request.answer, start)
        request.tokens += tokens[len(request.tokens) :].tolist()
        return request, accepted

    def _draft(
        self, batch: Mapping[int, _Request], requests: int, looked: int, switch: DraftSwitch
    ) -> tuple[str, dict[int, list[int]]]:
        """What was decided, and drafts with the highest expected throughput.

        Args:
            batch: requests that may get a draft, by index.
            requests: in vLLM's batch.
            looked: of them, those of which `batch` was chosen.
            switch: of such batches.
        """
        found: dict[int, list[int]] = {}
        candidates: list[_DraftToken] = []
        for index, request in batch.items():
            draft = self._acceptance.best(request.sources, request.tokens, self._limit)
            if draft is not None:
                request.draft_type, found[index] = draft
                chances = self._acceptance.reach(draft.draft_type, len(draft.tokens))
                candidates += [_DraftToken(c, index, place) for place, c in enumerate(chances, 1)]
        looking = min(switch.seconds / (self._cost.undrafted(requests) or 1.0), 0.5)
        if not candidates:
            switch.found_none(looking)
            return "no_draft_found", {}
        if switch.on and self._cost.needs_undrafted(requests, switch.gain):
            return "probe", {}
        candidates.sort(reverse=True)
        # A probe looks at some requests; the others would have such drafts too.
        like = max(round(requests / looked), 1)
        expected = np.cumsum(np.repeat([token.chance for token in candidates], like)) / requests
        tokens = requests + 1 + np.arange(len(expected))
        gains = (1 + expected) / self._cost.ratio(requests, tokens)
        best = int(gains.argmax())
        decision = switch.decide(float(gains[best]), looking)
        used = candidates[: best // like + 1] if decision == "drafted" else []
        if decision == "probe":
            used = [token for token in candidates if token.position == 1][:_PROBE]
        lengths: dict[int, int] = {}
        for _, index, position in used:
            lengths[index] = max(lengths.get(index, 0), position)
        return decision, {index: found[index][:length] for index, length in lengths.items()}

    def _announce(self, requests: int, switch: DraftSwitch, now: float) -> None:
        """Log that drafting was switched on or off."""
        size = requests.bit_length()
        if now - self._logged.get(size, -_QUIET) >= _QUIET:
            self._logged[size] = now
            logger.info(
                "TIDE: drafting is switched %s for %d to %d requests: the expected gain is %.1f %%"
                " where drafts are found, and %.1f %% over all steps, less the time of looking for "
                "them; a step with %d draft tokens costs %.2f steps without.",
                "on" if switch.on else "off", 1 << (size - 1), (1 << size) - 1,
                100 * (switch.gain - 1), 100 * (switch.net - 1), requests,
                self._cost.ratio(requests, 2 * requests),
            )  # fmt: skip


def _tokens(slot_mappings: Any) -> int:
    """How many tokens a step had, by vLLM's slots for them, which CUDA graphs pad; 0 without."""
    parts = slot_mappings if isinstance(slot_mappings, list) else [slot_mappings or {}]
    return sum(len(next(iter(part.values()), ())) for part in parts)
