"""The replay: the decode loop over recorded answers, without the model, at measured costs.

The loop, the modes, the drafter and the draft sources are the real ones. Only the model is not: its
predictions are those of the recording, and a pass takes as long as such a pass was measured to
take. A token that exits wrongly is counted and replaced by the recorded one, since nothing is
recorded of another text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from tide.config import TIDEConfig
from tide.decode.batch import BatchState
from tide.decode.drafter import Drafter, pass_cost
from tide.decode.loop import DecodeLoop
from tide.decode.machinery import Listener, Machinery
from tide.decode.sampler import Sampler
from tide.decode.sequence import SequenceState
from tide.decode.session import mode_of, sources_of
from tide.decode.verify import Verifier
from tide.exits.recording import Recording
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.models.costs import LoopCosts
from tide.stats import ExitStats


@dataclass(frozen=True)
class Expected:
    """What a replay has found.

    Attributes:
        tokens: that were decoded.
        seconds: that it took, prompts not counted.
        exit_rate: share of the tokens that exited.
        error_rate: share of all tokens that exited with another token than full depth predicts.
        tokens_per_pass: tokens of a sequence for each pass to full depth.
    """

    tokens: int
    seconds: float
    exit_rate: float
    error_rate: float
    tokens_per_pass: float


@dataclass(frozen=True)
class Setting:
    """What is replayed.

    Attributes:
        config: mode, drafts and their limits, and how many tokens may wait.
        layers: the checkpoints in use.
        thresholds: of each.
    """

    config: TIDEConfig
    layers: tuple[int, ...] = ()
    thresholds: tuple[Thresholds, ...] = ()


def replay(
    recording: Recording,
    setting: Setting,
    costs: Sequence[LoopCosts],
    table: ContinuationTable | None,
) -> Expected:
    """Decode recorded answers in batches, as large as the last of `costs`.

    What the host does between passes costs about as much in every mode, and is not counted.

    Args:
        costs: by sequences of a batch, from 1 on; those between are interpolated.
        table: the artifact's, for drafts.
    """
    player = _Player(recording, setting, costs, table)
    size, documents = costs[-1].sequences, list(range(len(recording.prompts)))
    for first in range(0, len(documents), size):
        player.decode(documents[first : first + size])
    stats = player.stats
    wrong = sum(score == 0 for scores in stats.scores for score in scores)
    return Expected(
        tokens=stats.total_tokens,
        seconds=player.seconds,
        exit_rate=stats.exit_rate,
        error_rate=wrong / stats.total_tokens,
        tokens_per_pass=stats.total_tokens / max(1, player.deep),
    )


def speedups(
    recording: Recording,
    setting: Setting,
    costs: Sequence[LoopCosts],
    table: ContinuationTable | None,
) -> dict[str, float]:
    """How much faster than full depth, token by token, each way to decode would be.

    Args:
        setting: of exits with drafts, "both"; the others are without the one or the other.
    """
    config = setting.config.with_(kv_cache_strategy="deferred", prefill_exit=False)
    ways = {
        "off": config.with_(mode="off"),
        "lossless": config.with_(mode="lossless"),
        "exit": config.with_(mode="exit", drafts=()),
        "both": config.with_(mode="exit"),
    }
    seconds = {}
    for name, way in ways.items():
        exits = replace(setting, config=way) if name != "off" else Setting(way)
        seconds[name] = replay(recording, exits, costs, table).seconds
    return {name: seconds["off"] / s for name, s in seconds.items() if name != "off"}


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


class _Player:
    """The model's part in a replay: a runner whose passes take measured time and compute nothing.

    Attributes:
        deep: sequences that have passed full depth, of all passes.
        stats: of all batches; a sequence of it is a document.
    """

    takes_trees = False  # nothing is recorded of what follows a rejected node

    def __init__(
        self,
        recording: Recording,
        setting: Setting,
        costs: Sequence[LoopCosts],
        table: ContinuationTable | None,
    ) -> None:
        self.recording, self.setting, self.costs = recording, setting, costs
        self.seconds, self.deep = 0.0, 0
        self.n_layers = recording.n_layers
        self.stats = ExitStats.of_batch(self.n_layers, len(recording.prompts))
        self.gates = [_RecordedGate(k) for k in range(len(setting.layers))]
        self.reads, self.exits = recording.decide(setting.layers, setting.thresholds)
        self._places = [recording.layers.index(layer) for layer in setting.layers]
        drafter = Drafter(setting.config.max_draft)
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
            runner, exits, setting.config, drafter, clock=lambda: self.seconds
        )
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
        verifier = Verifier(runner, runner, sampler, self.stats, audits=True)
        loop = DecodeLoop(
            self.machinery, batch, mode_of(self.machinery), verifier,
            sources_of(self.machinery, sequences), Listener(),
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
        if layers[1] == self.n_layers:
            self.deep += len(sequences)
        if then is None:
            return states, None
        if then is self:
            following = torch.zeros(len(sequences), longest, dtype=torch.long)
            for i, (sequence, span) in enumerate(zip(sequences, spans, strict=True)):
                for k, position in enumerate(span):
                    following[i, k] = self._next(sequence, position + 1)
            return states, following
        decisions, read = torch.zeros(len(sequences), longest, 3), 0
        for i, (sequence, span) in enumerate(zip(sequences, spans, strict=True)):
            for k, position in enumerate(span):
                if tokens.notes[i, k, 0]:
                    at = self._at(sequence, position)
                    read += int(self.reads[then.number, at])
                    if self.exits[then.number, at]:
                        right = self.recording.correct[self._places[then.number], at]
                        token = self._next(sequence, position + 1)
                        if self.setting.config.mode == "lossless" and not right:
                            token += 1  # a draft that is not accepted
                        decisions[i, k] = torch.tensor([1.0, token, float(right)])
        if read:
            self.seconds += self._by_size(len(sequences), lambda c: pass_cost(c.read, read))
        return states, decisions

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
