"""Verification: commit tokens in order, and audit exited ones against full depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tide.decode.batch import BatchState
from tide.decode.host import to_host
from tide.decode.recycled import RecycledPredictions
from tide.decode.sampler import Sampler
from tide.decode.schedule import Pass, run_pass
from tide.decode.sequence import SequenceState
from tide.errors import NumericsError
from tide.exits.heads import SUCCESSORS, TargetHead
from tide.kernels.arithmetic import successors_of
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
        recycled: by index of a sequence, what learns the predictions that are made; None for
            nothing.
    """

    def __init__(
        self,
        runner: DepthRunner,
        target_head: TargetHead,
        sampler: Sampler,
        stats: ExitStats,
        *,
        audits: bool,
        recycled: Mapping[int, RecycledPredictions] | None = None,
    ) -> None:
        self.runner, self.sampler, self.stats, self.audits = runner, sampler, stats, audits
        self.target_head, self._recycled = target_head, recycled

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
        predicted = to_host(packed if packed.dim() == 3 else packed[..., None])
        self._commit_and_audit(batch, wanted, [predicted[i][k] for i, _, k in wanted])

    def verify(self, batch: BatchState, spans: Sequence[range], states: Tensor) -> None:
        """Verify tokens that have reached full depth.

        Args:
            spans: for each sequence, the tokens.
            states: their states, `[sequences, longest span, hidden]`.
        """
        self._verify(batch, self._wanted(batch, spans), states)

    def _learn(self, sequence: SequenceState, position: int, successors: Sequence[int]) -> None:
        assert self._recycled is not None
        before, token = sequence.before(position), sequence.tokens[position]
        self._recycled[sequence.index].learn(before, token, successors)

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
            logits = self.runner.logits(picked)
            predicted = self.sampler.pick(at, self.sampler.scores(at, logits))[:, None]
            if self._recycled is not None:
                successors = successors_of(logits, SUCCESSORS)[:, 1:]
                predicted = torch.cat([predicted, successors.to(predicted.device)], 1)
            self._commit_and_audit(batch, wanted, to_host(predicted))

    def _commit_and_audit(
        self,
        batch: BatchState,
        wanted: Sequence[tuple[int, int, int]],
        predicted: Sequence[Sequence[int]],
    ) -> None:
        """Commit open tokens with full depth's predictions, and audit tokens that had exited.

        Args:
            wanted: from `_wanted`.
            predicted: the token after each, and then its likeliest successors, if they are known.
        """
        targets: list[dict[int, int]] = [{} for _ in batch.sequences]
        for (i, position, _), (token, *_) in zip(wanted, predicted, strict=True):
            targets[i][position] = token
        if self._recycled is not None:
            # The likeliest nodes come first in a tree, and the last to be learned counts.
            for (i, position, _), (_, *successors) in zip(
                reversed(wanted), reversed(predicted), strict=True
            ):
                self._learn(batch.sequences[i], position, successors)
        self._decide_trees(batch, targets)
        for i, of_sequence in enumerate(targets):
            self.commit(batch, i, of_sequence)
            self._audit(batch, i, of_sequence)

    def commit_exits(self, batch: BatchState) -> None:
        """Commit predictions of exit heads, up to a token that has not exited."""
        self._decide_trees(batch, [{} for _ in batch.sequences])
        for i in range(len(batch.sequences)):
            self.commit(batch, i, {})

    def _decide_trees(self, batch: BatchState, targets: list[dict[int, int]]) -> None:
        """Make a chain of what is accepted of each tree, and `targets` those of the chain.

        Behind a token of whose successor nothing is known, the tree stays open.
        """
        decided = []
        for i, sequence in enumerate(batch.sequences):
            if (tree := sequence.open_tree) is None:
                continue
            root, known = sequence.committed - 1, targets[i]
            following = [
                sequence.exits[at].token if at in sequence.exits else known.get(at)
                for at in range(root, len(sequence.tokens))
            ]
            for node, token in enumerate(tree.tokens):
                if self.sampler.stops(token):
                    following[1 + node] = -1  # nothing need be known of what follows
            tree.decide(following)
            if tree.decided or tree.path:
                chain = [root, *(root + 1 + node for node in tree.path)]
                decided.append(i)
                targets[i] = {at: known[at] for at in known if at < root} | {
                    to: known[at] for to, at in enumerate(chain, root) if at in known
                }
        batch.keep_paths(decided)

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
                if token < 0:
                    raise NumericsError(
                        f"No token can be drawn after token {position} of sequence "
                        f"{sequence.index}: its logits hold NaN or infinity, or a logits processor "
                        "rules out all tokens. Look for overflow in this dtype, and at the weights."
                    )
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
