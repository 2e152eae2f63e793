"""Prefill: run the prompts, at full depth or with per-token exit.

Where prompt tokens may exit, one that does writes KV in the layers above from the state in which it
exited. The others attend to all keys and continue alone, so what is saved is computed less. Where
decoding goes on from the prompts, the last token of every sequence goes to full depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tide.config import TIDEConfig
from tide.decode.batch import BatchState
from tide.decode.exit_stage import Exits
from tide.decode.pack import pack_tokens
from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.exits.policy import TokenPosition
from tide.models.cache import WaterlineCache
from tide.models.runner import DepthRunner
from tide.models.tokens import NOTES, TokenBatch

_MASK = 1 << 26  # most entries of an explicit mask: prompts that need more run in chunks
_READ = 256  # prompt tokens whose logits are held at once


def prefill_prompts(
    runner: DepthRunner, exits: Exits, config: TIDEConfig, batch: BatchState
) -> tuple[list[range], Tensor]:
    """Run the prompts; the last token of each, and its state, `[sequences, 1, hidden]`."""
    counts = [len(sequence.tokens) for sequence in batch.sequences]
    prompts = [range(count) for count in counts]
    tokens = pack_tokens(batch.sequences, prompts, left=True)
    if config.prefill_exit:
        numbers = [sequence.index for sequence in batch.sequences]
        done = PrefillWithExits(runner, exits, config, batch.cache).run(tokens, numbers)
        states = done.last[:, None]
    else:
        states = _in_chunks(runner, tokens, counts, batch.cache)[:, -1:]
    batch.advance(0, batch.last, prompts)
    return [range(count - 1, count) for count in counts], states


def _in_chunks(
    runner: DepthRunner, tokens: TokenBatch, counts: Sequence[int], cache: WaterlineCache
) -> Tensor:
    """Run left-padded prompts; the states of their last tokens, `[sequences, tokens, hidden]`.

    Prompts without padding need no explicit mask, and run at once.
    """
    if tokens.valid is not None:
        cache.align(counts)
    return deque(_chunks(runner, tokens, (0, runner.n_layers), cache), maxlen=1).pop()


def _chunks(
    runner: DepthRunner,
    tokens: TokenBatch,
    layers: tuple[int, int],
    cache: WaterlineCache,
    hidden: Tensor | None = None,
    width: int | None = None,
) -> Iterator[Tensor]:
    """Run tokens through layers, in chunks where a mask of all would be too large; their states.

    Args:
        width: slots that a mask covers; None for as many as there are tokens.
    """
    sequences, longest = tokens.ids.shape
    chunk = longest
    if tokens.valid is not None:
        chunk = max(1, min(longest, _MASK // (sequences * (width or longest))))
    for start in range(0, longest, chunk):
        ids, valid, positions, own = (
            None if t is None else t[:, start : start + chunk]
            for t in (tokens.ids, tokens.valid, tokens.positions, hidden)
        )
        assert ids is not None
        yield runner.run(TokenBatch(ids, valid, positions), *layers, cache=cache, hidden=own)


@dataclass
class Prefilled:
    """The result of a prefill with exits.

    Attributes:
        last: the last layer's output for the last token of every sequence, `[sequences, hidden]`;
            empty with logits, where that token may exit too.
        depths: layers that each token passed, `[sequences, tokens]`; 0 for padding.
        logits: of every token, `[sequences, tokens, vocabulary]`; None unless wanted.
    """

    last: Tensor
    depths: Tensor
    logits: Tensor | None


@dataclass
class _Continuing:
    """The tokens that have not exited, compacted to the front: `[sequences, most in one, ...]`."""

    places: Tensor  # place of each in the batch as given
    valid: Tensor
    hidden: Tensor

    def split(self, exits: Tensor) -> tuple[_Continuing, _Continuing]:
        """Those that exit and those that continue, each compacted to the front."""
        return self._compact(exits), self._compact(self.valid & ~exits)

    def _compact(self, mask: Tensor) -> _Continuing:
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        order = order[:, : int(mask.sum(1).max())]
        expanded = order[..., None].expand(-1, -1, self.hidden.shape[-1]).to(self.hidden.device)
        return _Continuing(
            self.places.gather(1, order), mask.gather(1, order), self.hidden.gather(1, expanded)
        )


class PrefillWithExits:
    """Runs prompts through all layers, letting tokens exit.

    Args:
        runner: attached to the model.
        exits: of the model.
        config: `compaction_threshold` counts.
        cache: empty.
    """

    def __init__(
        self, runner: DepthRunner, exits: Exits, config: TIDEConfig, cache: WaterlineCache
    ) -> None:
        self.runner, self.exits, self.config, self.cache = runner, exits, config, cache

    @torch.no_grad()
    def run(
        self, tokens: TokenBatch, numbers: Sequence[int], *, with_logits: bool = False
    ) -> Prefilled:
        """Run the prompts.

        Args:
            tokens: of the prompts.
            numbers: of each sequence in the batch as given, for the policy.
            with_logits: read every token, where it exited or at full depth, over the whole
                vocabulary: a score needs the logit of a token that the exit heads do not read while
                decoding.
        """
        runner, n = self.runner, self.runner.n_layers
        ids = tokens.ids.to(runner.input_device)
        valid = torch.ones_like(ids, dtype=torch.bool)
        if tokens.valid is not None:
            valid = tokens.valid.to(ids.device).bool()
        segments = self.exits.segments(n)
        self._ids, self._numbers = ids, numbers
        self._positions = (valid.cumsum(1) - 1).clamp_min(0)  # [sequences, tokens]
        ends = valid & (self._positions == self._positions.amax(1, keepdim=True))
        final = ends & (not with_logits)
        self._predictions = _Predictions(self.exits, ids, valid)
        depths = torch.where(valid, n, 0)
        logits: Tensor | None = None
        if with_logits:
            shape = (*ids.shape, self.exits.readout.size)
            logits = torch.zeros(shape, dtype=runner.model.dtype, device=ids.device)
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        given = TokenBatch(ids, None if bool(valid.all()) else valid)
        if given.valid is not None:
            self.cache.align(valid.sum(1).tolist())
        first, compacted = self._run(given, segments[0]), False
        running = _Continuing(places, valid, first)
        for segment, (_, hi) in enumerate(segments[:-1]):
            may_exit = running.valid & ~final.gather(1, running.places)
            exits = self._evaluate(segment, running, may_exit)
            if int(exits.sum()) > self.config.compaction_threshold * int(running.valid.sum()):
                compacted = True
                gone, running = running.split(exits)
                runner.fill_kv(self._tokens(gone), hi, n, cache=self.cache, hidden=gone.hidden)
                where = gone.valid.nonzero(as_tuple=True)
                depths[where[0], gone.places[where]] = hi
                if logits is not None:
                    head = self.exits.checkpoints[segment].head
                    self._read_into(logits, gone, head.transform(_pick(gone.hidden, where)))
                if not running.valid.any():
                    break
            # As long as no token has exited, the model's own causal mask may do.
            tokens = self._tokens(running) if compacted else given
            running.hidden = self._run(tokens, segments[segment + 1], running.hidden)
        if logits is not None:
            where = running.valid.nonzero(as_tuple=True)
            self._read_into(logits, running, _pick(running.hidden, where))
        last = final.gather(1, running.places) & running.valid
        return Prefilled(_pick(running.hidden, last.nonzero(as_tuple=True)), depths, logits)

    def _run(
        self, tokens: TokenBatch, layers: tuple[int, int], hidden: Tensor | None = None
    ) -> Tensor:
        """The states of tokens after layers, `[sequences, tokens, hidden]`."""
        width = self._ids.shape[1]
        states = list(_chunks(self.runner, tokens, layers, self.cache, hidden, width))
        return states[0] if len(states) == 1 else torch.cat(states, dim=1)

    def _tokens(self, some: _Continuing) -> TokenBatch:
        at = some.places
        return TokenBatch(self._ids.gather(1, at), some.valid, self._positions.gather(1, at))

    def _read_into(self, logits: Tensor, some: _Continuing, states: Tensor) -> None:
        sequence, k = some.valid.nonzero(as_tuple=True)
        place = some.places[sequence, k]
        for start in range(0, len(states), _READ):
            part = slice(start, start + _READ)
            read = self.runner.logits(states[part])
            logits[sequence[part], place[part]] = read.to(logits)

    def _evaluate(self, segment: int, running: _Continuing, may_exit: Tensor) -> Tensor:
        """Which tokens exit, boolean as `may_exit`."""
        where = may_exit.nonzero(as_tuple=True)
        exits = torch.zeros_like(may_exit)
        hidden, gate = _pick(running.hidden, where), self.exits.gates[segment]
        # One copy to the host for all, and logits of a few tokens at a time.
        at = torch.stack([where[0], self._positions[where[0], running.places[where]]]).T.tolist()
        for start in range(0, len(at), _READ):
            part = slice(start, start + _READ)
            notes = [self._note(segment, s, position) for s, position in at[part]]
            states = hidden[part]
            decision = gate.decide(states, torch.tensor(notes, device=states.device))
            exits[where[0][part], where[1][part]] = decision.exits.to(exits.device)
        return exits

    def _note(self, segment: int, s: int, position: int) -> tuple[int, ...]:
        if not self.exits.may_exit(TokenPosition(self._numbers[s], position), segment):
            return (0,) * NOTES
        return self.exits.gates[segment].note(lambda: self._predictions.at(s, position))


def _pick(hidden: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    """States by index; a model's last layer may be on another device than its first."""
    return hidden[tuple(index.to(hidden.device) for index in where)]


class _Predictions:
    """N-gram predictions of every token of the prompts, made when a policy first needs one."""

    def __init__(self, exits: Exits, ids: Tensor, valid: Tensor) -> None:
        self._table, self._ids, self._valid = exits.table, ids, valid
        self._made: dict[int, list[NGramPrediction]] = {}

    def at(self, sequence: int, position: int) -> NGramPrediction:
        """The prediction for what follows a token."""
        if sequence not in self._made:
            tokens = self._ids[sequence][self._valid[sequence]].tolist()
            predictor = NGramPredictor(self._table)
            self._made[sequence] = [predictor.at(tokens, p, p + 1) for p in range(len(tokens))]
        return self._made[sequence][position]
