"""The exit stage: run to a checkpoint, evaluate its gate, and record which tokens exit there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tide.decode.batch import BatchState
from tide.decode.host import to_host
from tide.decode.sampler import At, Sampler
from tide.decode.schedule import Pass, run_pass
from tide.decode.sequence import ExitRecord, SequenceState
from tide.exits.checkpoint import Checkpoint
from tide.exits.gate import ExitGate
from tide.exits.heads import Readout, TargetHead
from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.exits.policy import TokenPosition
from tide.exits.table import ContinuationTable
from tide.models.runner import DepthRunner, Stage


@dataclass
class Exits:
    """The exits of a model, by depth.

    Attributes:
        gates: of the checkpoints.
        target_head: what follows full depth.
        script: given the position of a token and the number of a checkpoint, whether it may exit
            there; None if all may.
        table: for n-gram predictions.
    """

    checkpoints: Sequence[Checkpoint]
    gates: Sequence[ExitGate]
    readout: Readout
    target_head: TargetHead
    script: Callable[[TokenPosition, int], bool] | None = None
    table: ContinuationTable | None = None

    def segments(self, n_layers: int) -> list[tuple[int, int]]:
        """The ranges `[lo, hi)` into which the checkpoints cut the depth."""
        cuts = [checkpoint.layer + 1 for checkpoint in self.checkpoints]
        return list(zip([0, *cuts], [*cuts, n_layers], strict=True))

    def stages(self, n_layers: int) -> list[Stage]:
        """The segments, each with what follows it: a gate, or at full depth the target head."""
        return list(zip(self.segments(n_layers), [*self.gates, self.target_head], strict=True))

    def may_exit(self, at: TokenPosition, number: int) -> bool:
        """Whether a token may exit at the `number`-th checkpoint."""
        return self.script is None or self.script(at, number)


class ExitStage:
    """Evaluates gates for a batch.

    Args:
        runner: attached to the model.
        exits: of the model.
        sampler: from logits to tokens.
    """

    def __init__(self, runner: DepthRunner, exits: Exits, sampler: Sampler) -> None:
        self.runner, self.exits, self.sampler = runner, exits, sampler

    def run(self, batch: BatchState, work: Pass, candidates: Sequence[Sequence[int]]) -> None:
        """Run a pass with the gate at its end; tokens that exit get an `ExitRecord`.

        Args:
            candidates: for each sequence, positions of its tokens in the pass that may exit.
        """
        number = work.last
        gate, notes = self.exits.gates[number], work.blank_notes()
        some: list[tuple[int, int, int]] = []  # sequence, place in the pass, position
        for i, (sequence, span) in enumerate(zip(batch.sequences, work.spans, strict=True)):
            for position in candidates[i]:
                place = TokenPosition(sequence.index, sequence.place(position))
                if self.exits.may_exit(place, number):
                    k = position - span.start
                    notes[i, k] = gate.note(partial(self._predict, sequence, position))
                    some.append((i, k, position))
        if not some:
            run_pass(self.runner, batch, work)
            return
        states, packed = run_pass(self.runner, batch, work, gate, notes)
        decisions = to_host(packed)
        layer = self.exits.checkpoints[number].layer
        exited = [at for at in some if decisions[at[0]][at[1]][0]]
        tokens = [int(decisions[i][k][1]) for i, k, _ in exited]
        if exited and not self.sampler.greedy:
            head = self.exits.checkpoints[number].head
            picked = head.transform(torch.stack([states[i, k] for i, k, _ in exited]))
            at = [(batch.sequences[i], position) for i, _, position in exited]
            tokens = self._sample(at, self.exits.readout(picked))
        for (i, k, position), token in zip(exited, tokens, strict=True):
            if token >= 0:
                record = ExitRecord(layer, token, decisions[i][k][2])
                batch.sequences[i].exits[position] = record

    def _sample(self, at: Sequence[At], logits: torch.Tensor) -> list[int]:
        """Tokens drawn from exit heads; -1 where processors have ruled out all that one reads."""
        scores = self.sampler.scores(at, self.exits.readout.scatter_to_vocab(logits))
        barred, picked = scores.isneginf().all(-1), self.sampler.pick(at, scores)
        return [
            -1 if none else token
            for none, token in to_host(torch.stack([barred.long(), picked], 1))
        ]

    def _predict(self, sequence: SequenceState, position: int) -> NGramPrediction:
        predictor = NGramPredictor(self.exits.table, sequence.ngrams)
        drafts = sequence.drafts_to(position)
        return predictor.after(sequence.tokens, sequence.committed, drafts)
