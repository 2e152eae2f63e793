"""Verification: commit tokens in order, and audit exited ones against full depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tide.decode.batch import BatchState
from tide.decode.host import to_host
from tide.decode.sampler import Sampler
from tide.decode.schedule import Pass, run_pass
from tide.exits.heads import TargetHead
from tide.models.runner import DepthRunner
from tide.stats import ExitStats, TokenRecord


class Verifier:
    """Commits the tokens of a batch.

    Args:
        runner: attached to the model.
        target_head: what follows full depth.
        sampler: from logits to tokens.
        stats: counters to fill.
        audits: whether exited tokens reach full depth later, to be audited there.
    """

    def __init__(
        self,
        runner: DepthRunner,
        target_head: TargetHead,
        sampler: Sampler,
        stats: ExitStats,
        *,
        audits: bool,
    ) -> None:
        self.runner, self.sampler, self.stats, self.audits = runner, sampler, stats, audits
        self.target_head = target_head

    def run(self, batch: BatchState, work: Pass) -> None:
        """Run a pass to full depth, and verify what has reached it."""
        wanted = self._wanted(batch, work.spans)
        if not wanted or not self.sampler.greedy:
            states, _ = run_pass(self.runner, batch, work)
            self._verify(batch, wanted, states)
            return
        notes = work.blank_notes()
        for i, _, k in wanted:
            notes[i, k, 0] = 1
        _, packed = run_pass(self.runner, batch, work, self.target_head, notes)
        tokens = to_host(packed)
        self._commit_and_audit(batch, wanted, [tokens[i][k] for i, _, k in wanted])

    def verify(self, batch: BatchState, spans: Sequence[range], states: Tensor) -> None:
        """Verify tokens that have reached full depth.

        Args:
            spans: for each sequence, the tokens.
            states: their states, `[sequences, longest span, hidden]`.
        """
        self._verify(batch, self._wanted(batch, spans), states)

    def _wanted(self, batch: BatchState, spans: Sequence[range]) -> list[tuple[int, int, int]]:
        """Tokens whose successor is open or to be audited: sequence, position, place in span."""
        return [
            (i, position, k)
            for i, span in enumerate(spans)
            for k, position in enumerate(span)
            if position >= batch.sequences[i].committed - 1
            or position in batch.sequences[i].pending_audit
        ]

    def _verify(
        self, batch: BatchState, wanted: Sequence[tuple[int, int, int]], states: Tensor
    ) -> None:
        if wanted:
            picked = torch.stack([states[i, k] for i, _, k in wanted])
            at = [(batch.sequences[i], position) for i, position, _ in wanted]
            tokens = self.sampler.pick(at, self.sampler.scores(at, self.runner.logits(picked)))
            self._commit_and_audit(batch, wanted, tokens)

    def _commit_and_audit(
        self, batch: BatchState, wanted: Sequence[tuple[int, int, int]], tokens: Sequence[int]
    ) -> None:
        """Commit open tokens with full depth's predictions, and audit tokens that had exited."""
        targets: list[dict[int, int]] = [{} for _ in batch.sequences]
        for (i, position, _), token in zip(wanted, tokens, strict=True):
            targets[i][position] = token
        for i, of_sequence in enumerate(targets):
            self.commit(batch, i, of_sequence)
            self._audit(batch, i, of_sequence)

    def commit(self, batch: BatchState, i: int, targets: Mapping[int, int]) -> None:
        """Commit tokens of a sequence in order, up to the first that nothing final is known of.

        A token that exited is committed as its exit head predicted, however deep it has gone since:
        other sequences and drafts may have taken it along, and must not change the output.

        Args:
            targets: full depth's prediction after each position that has reached it.
        """
        sequence, accepted = batch.sequences[i], True
        while accepted and not sequence.finished:
            position = sequence.committed - 1
            exited = sequence.exits.pop(position, None)
            if exited is not None:
                token, depth, score = exited.token, exited.layer + 1, exited.score
                if self.audits:
                    sequence.pending_audit[position] = token
            elif position in targets:
                token, depth, score = targets[position], self.runner.n_layers, math.nan
            else:
                return
            draft_type = batch.commit(i, token)
            accepted = draft_type is not None
            target = None if exited is not None else token
            self.stats.commit(sequence.index, TokenRecord(depth, score, draft_type, target))
            if self.sampler.ends(sequence):
                batch.finish(i)

    def _audit(self, batch: BatchState, i: int, targets: Mapping[int, int]) -> None:
        sequence = batch.sequences[i]
        for position in [p for p in sequence.pending_audit if p in targets]:
            differs = sequence.pending_audit.pop(position) != targets[position]
            sequence.differed += differs
            place = position + 1 - sequence.prompt
            self.stats.audit(sequence.index, place, targets[position], differs=differs)
