"""The recorded model: what stands for the model when recorded answers are replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from tide.config import TIDEConfig
from tide.decode.batch import BatchState
from tide.decode.drafter import Drafter
from tide.decode.exits import recycles
from tide.decode.loop import DecodeLoop
from tide.decode.machinery import Listener, Machinery
from tide.decode.pass_costs import pass_cost
from tide.decode.recycled import RecycledPredictions
from tide.decode.sampler import Sampler
from tide.decode.sequence import SequenceState
from tide.decode.session import mode_of, sources_of
from tide.decode.verify import Verifier
from tide.exits.heads import SUCCESSORS
from tide.exits.recording import Recording
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.models.costs import LoopCosts
from tide.stats import ExitStats


@dataclass(frozen=True)
class Setting:
    """What is replayed.

    Attributes:
        config: mode, drafts and their limits, and how many tokens may wait.
        layers: the checkpoints in use.
        thresholds: of each.
        perfect: whether gates let a token exit exactly where its exit head is correct, in place of
            what their thresholds say.
    """

    config: TIDEConfig
    layers: tuple[int, ...] = ()
    thresholds: tuple[Thresholds, ...] = ()
    perfect: bool = False


class _RecordedGate:
    """Stands for the gate of a checkpoint; what it decides is recorded."""

    def __init__(self, number: int) -> None:
        self.number = number

    def note(self, predict: Callable[[], Any]) -> tuple[int, ...]:
        return 1, 0, 0, 0, 0


class _Cache:
    """Stands for the KV cache, of which nothing is needed."""

    def lengths(self, layer: int) -> list[int]:
        return []

    def keep(self, order: Sequence[int]) -> None:
        pass

    def keep_paths(self, paths: Mapping[int, Any]) -> None:
        pass


class _RecordedPredictions(RecycledPredictions):
    """Learns what is recorded."""

    def learn(self, before: int, token: int, successors: Sequence[int]) -> None:
        if successors[0] >= 0:
            super().learn(before, token, successors)


class Player:
    """The model's part in a replay: a runner whose passes take measured time and compute nothing.

    Attributes:
        takes_trees: whether it is recorded what recycled predictions come from.
        stats: of all batches; a sequence of it is a document.
    """

    def __init__(
        self,
        recording: Recording,
        setting: Setting,
        costs: Sequence[LoopCosts],
        table: ContinuationTable | None,
    ) -> None:
        self.takes_trees = recording.successors is not None
        if setting.config.mode == "lossless" and recycles(setting.config, self):
            setting = Setting(setting.config)  # as the real engine has no exits then
        self.recording, self.setting, self.costs = recording, setting, costs
        self.seconds = 0.0
        self.n_layers = recording.n_layers
        self.stats = ExitStats.of_batch(self.n_layers, len(recording.prompts))
        self.gates = [_RecordedGate(k) for k in range(len(setting.layers))]
        self.reads, self.exits = recording.decide(setting.layers, setting.thresholds)
        self._places = [recording.layers.index(layer) for layer in setting.layers]
        if setting.perfect:
            self.reads = self.exits = recording.correct[self._places] > 0
        self._read = self.reads.mean(1) if len(self.reads) else self.reads
        drafter = Drafter(setting.config.max_draft, setting.config.max_tree)
        cuts = [layer + 1 for layer in setting.layers]
        self._segments = list(zip([0, *cuts], [*cuts, self.n_layers], strict=True))
        for at in costs:
            drafter.costs.start(at.sequences, self._steps(at))
        exits: Any = SimpleNamespace(
            checkpoints=[SimpleNamespace(layer=layer) for layer in setting.layers],
            gates=self.gates, may_exit=lambda at, number: True, table=table, target_head=self,
            readout=None,
        )  # fmt: skip
        runner: Any = self
        self.machinery = Machinery(
            runner, exits, setting.config, drafter, _RecordedPredictions(),
            clock=lambda: self.seconds,
        )  # fmt: skip
        answers = [len(t) - p for t, p in zip(recording.tokens, recording.prompts, strict=True)]
        self._offsets = np.cumsum([0, *answers]).tolist()
        self._batch: BatchState

    def decode(self, documents: Sequence[int]) -> None:
        """Decode some recorded answers as a batch."""
        texts = [self.recording.tokens[d] for d in documents]
        longest = max(map(len, texts))
        contexts = torch.zeros(len(texts), longest, dtype=torch.long)
        sequences = []
        for line, (d, text) in enumerate(zip(documents, texts, strict=True)):
            # Padded on the left, so that all end with the last place.
            prompt, padding = self.recording.prompts[d], longest - len(text)
            contexts[line, padding : padding + prompt] = torch.tensor(text[:prompt])
            sequences.append(
                SequenceState(d, contexts[line], padding, text[:prompt], prompt, prompt)
            )
        sampler = Sampler(contexts, LogitsProcessorList(), StoppingCriteriaList(), sample=False)
        cache: Any = _Cache()
        batch = self._batch = BatchState(
            sequences, self._segments, cache, self.setting.config.max_pending
        )
        runner: Any = self
        recycled = self.machinery.recycled_for(documents)
        verifier = Verifier(runner, runner, sampler, self.stats, audits=True, recycled=recycled)
        loop = DecodeLoop(
            self.machinery, batch, mode_of(self.machinery), verifier,
            sources_of(self.machinery, sequences, recycled), Listener(),
        )  # fmt: skip
        batch.advance(0, batch.last, [range(s.prompt) for s in sequences])
        for i, sequence in enumerate(sequences):
            verifier.commit(batch, i, {sequence.prompt - 1: self._next(sequence, sequence.prompt)})
        loop.end_step()
        while batch.sequences:
            loop.step()

    def run_then(
        self, then: Any, tokens: Any, layers: tuple[int, int], **_: Any
    ) -> tuple[Tensor, Any]:
        """Take the time that the pass would take; see `DepthRunner.run_then`."""
        sequences, longest = self._batch.sequences, tokens.ids.shape[1]
        first = next(k for k, (lo, _) in enumerate(self._segments) if lo == layers[0])
        spans = self._batch.waiting(first)
        self.seconds += self._pass(len(sequences), longest, layers)
        states = torch.zeros(len(sequences), longest, 1)
        if then is None:
            return states, None
        if then is self:
            following = torch.full((len(sequences), longest, 1 + SUCCESSORS), -1)
            for i, (sequence, span) in enumerate(zip(sequences, spans, strict=True)):
                for k, position in enumerate(span):
                    if (at := self._place(sequence, position)) is not None:
                        following[i, k] = self._following(sequence, at)
            return states, following
        decisions, read = torch.zeros(len(sequences), longest, 3, dtype=torch.float32), 0.0
        for i, (sequence, span) in enumerate(zip(sequences, spans, strict=True)):
            for k, position in enumerate(span):
                if tokens.notes[i, k, 0]:
                    if (place := self._place(sequence, position)) is None:
                        # Of what is not of the text, nothing is recorded; it is never committed.
                        read += self._read[then.number]
                        continue
                    at = self._at(sequence, place)
                    read += self.reads[then.number, at]
                    if self.exits[then.number, at]:
                        right = self.recording.correct[self._places[then.number], at]
                        token = self._next(sequence, place + 1)
                        if self.setting.config.mode == "lossless" and not right:
                            token += 1  # a draft that is not accepted
                        decisions[i, k] = torch.tensor([1.0, token, float(right)])
        if read:
            self.seconds += self._by_size(len(sequences), lambda c: pass_cost(c.read, read))
        return states, decisions

    def _place(self, sequence: SequenceState, position: int) -> int | None:
        """Where in the text a token is; None for a node of a tree that is not of the text."""
        path = sequence.path_to(position)
        if not path:
            return position
        end = sequence.committed + len(path)
        text = self.recording.tokens[sequence.index]
        return end - 1 if text[sequence.committed : end] == path else None

    def _following(self, sequence: SequenceState, position: int) -> Tensor:
        """The token after a position, and its likeliest successors; -1 where none are recorded."""
        found = torch.full((1 + SUCCESSORS,), -1)
        found[0] = self._next(sequence, position + 1)
        if self.recording.successors is not None:
            successors = self.recording.successors[self._at(sequence, position)][:SUCCESSORS]
            found[1 : 1 + len(successors)] = torch.from_numpy(successors)
        return found

    def _at(self, sequence: SequenceState, position: int) -> int:
        """Where a position is recorded; beyond the end, where drafts may be, the last one."""
        within = min(position, len(self.recording.tokens[sequence.index]) - 2)
        return self._offsets[sequence.index] + within - (sequence.prompt - 1)

    def _next(self, sequence: SequenceState, position: int) -> int:
        text = self.recording.tokens[sequence.index]
        return text[position] if position < len(text) else 0

    def _steps(self, costs: LoopCosts) -> dict[int, float]:
        """Seconds of a step to full depth, by tokens."""
        if self.setting.config.mode != "exit":
            return costs.whole
        return {
            n: sum(_stage(costs, n, layers, self.n_layers) for layers in self._segments)
            for n in costs.whole
        }

    def _pass(self, sequences: int, tokens: int, layers: tuple[int, int]) -> float:
        return self._by_size(sequences, lambda c: _stage(c, tokens, layers, self.n_layers))

    def _by_size(self, sequences: int, seconds: Callable[[LoopCosts], float]) -> float:
        """Seconds for a batch, from those of the nearest sizes measured."""
        return pass_cost({c.sequences: seconds(c) for c in self.costs}, sequences)


def _stage(costs: LoopCosts, tokens: int, layers: tuple[int, int], n_layers: int) -> float:
    """Seconds of a pass through layers, and of what follows them."""
    lo, hi = layers
    per_layer = pass_cost(costs.layer, tokens)
    if hi == n_layers:
        return pass_cost(costs.whole, tokens) - lo * per_layer
    return pass_cost(costs.start, tokens) + (hi - lo) * per_layer
