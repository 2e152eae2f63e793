"""The exit stage: evaluate the gate of a checkpoint, and record which tokens exit there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tide.decode.batch import BatchState
from tide.decode.sampler import Sampler
from tide.decode.sequence import ExitRecord
from tide.exits.artifact import Checkpoint
from tide.exits.heads import Readout
from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.exits.policy import Candidates, Decision, Policy, TokenPosition
from tide.exits.table import ContinuationTable


@dataclass
class Exits:
    """The exits of a model, by depth; the table is for n-gram predictions."""

    checkpoints: Sequence[Checkpoint]
    readout: Readout
    policy: Policy
    table: ContinuationTable | None = None

    def segments(self, n_layers: int) -> list[tuple[int, int]]:
        """The ranges `[lo, hi)` into which the checkpoints cut the depth."""
        cuts = [checkpoint.layer + 1 for checkpoint in self.checkpoints]
        return list(zip([0, *cuts], [*cuts, n_layers], strict=True))


class ExitStage:
    """Evaluates gates for a batch.

    Args:
        exits: of the model.
        sampler: from logits to tokens.
    """

    def __init__(self, exits: Exits, sampler: Sampler) -> None:
        self.exits, self.sampler = exits, sampler

    def evaluate(
        self, batch: BatchState, segment: int, positions: Sequence[tuple[int, int]]
    ) -> None:
        """Evaluate the gate after `segment`; tokens that exit get an `ExitRecord`.

        Args:
            positions: of the tokens that may exit: number in the batch, and position.
        """
        if not positions:
            return
        states = torch.stack([batch.state(i, segment, position) for i, position in positions])
        head = self.exits.checkpoints[segment].head

        def read(indices: Sequence[int]) -> Tensor:
            some = states if len(indices) == len(states) else states[list(indices)]
            return self.exits.readout(head.transform(some))

        candidates = Candidates(
            states,
            [TokenPosition(batch.sequences[i].index, position) for i, position in positions],
            read,
            lambda indices: [self._predict(batch, *positions[k]) for k in indices],
        )
        decision = self.exits.policy.decide(segment, candidates)
        if decision.exits:
            self._record(batch, segment, decision, [positions[k] for k in decision.exits])

    def _record(
        self,
        batch: BatchState,
        segment: int,
        decision: Decision,
        positions: Sequence[tuple[int, int]],
    ) -> None:
        assert decision.logits is not None and decision.tokens is not None
        readout, sampler = self.exits.readout, self.sampler
        at = [(batch.sequences[i], position) for i, position in positions]
        if sampler.greedy:
            tokens = readout.tokens(decision.tokens).tolist()
            barred = [False] * len(at)
        else:
            scores = sampler.scores(at, readout.scatter_to_vocab(decision.logits))
            tokens = sampler.pick(at, scores)
            # Processors may have ruled out every token that a reduced vocabulary has.
            barred = scores.isneginf().all(-1).tolist()
        layer = self.exits.checkpoints[segment].layer
        for k, (sequence, position) in enumerate(at):
            if not barred[k]:
                score = decision.scores[decision.exits[k]]
                sequence.exits[position] = ExitRecord(layer, tokens[k], score)

    def _predict(self, batch: BatchState, i: int, position: int) -> NGramPrediction:
        sequence = batch.sequences[i]
        predictor = NGramPredictor(self.exits.table, sequence.ngrams)
        return predictor.at(sequence.tokens, position, sequence.committed)
