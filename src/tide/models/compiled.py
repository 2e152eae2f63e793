"""Compiled segments: the layers of a segment, and what follows them, as one graph each.

A graph takes the buffers of the cache as they are, so no host number enters it. The numbers of
sequences, tokens and slots are symbols in it; only 1 is compiled for itself, as `torch.compile`
does, and is what decoding runs most. So there is one graph for one token and one for several, for
one sequence and for several, and no step compiles anything anew.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from tide.config import MOST_NODES
from tide.errors import SelfCheckError
from tide.kernels.linear import backend_of
from tide.kernels.operators import append_kv_on
from tide.models.cache import WaterlineCache
from tide.models.chunk import Chunk, Places
from tide.models.fixed import FixedCache, GraphCache
from tide.models.masks import explicit_mask
from tide.models.model_state import compile_options, state_of
from tide.models.runner import Stage, Then
from tide.models.segments import SegmentRunner, call_segment
from tide.models.selfcheck import require_equal
from tide.models.tokens import NOTES, TokenBatch

# New tokens of a sequence in a compiled pass; longer ones, as prompts are, are not compiled.
LONGEST = 1 + MOST_NODES
_SEVERAL = 4, 5  # sequences and tokens with which "several" is compiled; any others will do
_PROMPT = 7  # tokens of the prompts on which graphs are proven
_MOST_CHANGES = 4  # of a model between calls

# From packed places, hidden states, keys and values to states and what follows from them.
Graph = Callable[[Tensor, Tensor | None, list[Tensor], list[Tensor]], tuple[Tensor, Any]]


class CompileWarning(UserWarning):
    """A model runs uncompiled although it was to be compiled."""


@dataclass(frozen=True)
class CompiledStage:
    """A segment and what follows it, compiled.

    Attributes:
        lo, hi: its layers.
        then: what follows them.
        segment: what was compiled; where the model was changed since, it is another one.
        graph: what it was compiled to.
        code: by which `torch.compile` finds it.
    """

    lo: int
    hi: int
    then: Then
    segment: nn.Module
    graph: Graph

    code: types.CodeType

    def run(self, packed: Tensor, hidden: Tensor | None, cache: FixedCache) -> tuple[Tensor, Any]:
        """Run tokens through the layers; KV goes to the cache's buffers, which have the room."""
        return self.graph(packed, hidden, *cache.buffers(self.lo, self.hi))

    @property
    def recompiled(self) -> bool:
        """Whether `torch.compile` has made another graph since."""
        return len(_debug_get_cache_entry_list(self.code)) > 1


class CompiledRunner(SegmentRunner):
    """Runs depth ranges as compiled segments, and what is not compiled as segments.

    Nothing is compiled before `prepare`.
    """

    name = "compiled segments"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # By whether there is one sequence, and one token of each: the stages, by depth.
        self._stages: dict[tuple[bool, bool], list[CompiledStage]] = {}
        self._made_for: list[Any] = []  # the model as it was compiled; see `model_state.state_of`
        self._changes = 0  # of the model since
        self._failed = False

    def new_cache(self, sequences: int, capacity: int | None = None) -> FixedCache:
        """An empty cache; see `DepthRunner.new_cache`."""
        self._drop_if_changed()
        return FixedCache(self.n_layers, sequences, capacity)

    def prepare(self, stages: Sequence[Stage], sequences: int) -> Iterator[tuple[int, int]]:
        """Compile what a batch needs, and prove each graph equal to the uncompiled segment.

        Where that fails, all runs as segments, with a warning. See `DepthRunner.prepare`.
        """
        if self._failed:
            return
        self._drop_if_changed()
        if self._failed:
            return
        # A batch ends with one sequence, when all others have ended.
        shapes = [(one, token) for one in {True, sequences == 1} for token in (True, False)]
        wanted = [shape for shape in shapes if not self._holds(stages, self._stages.get(shape, ()))]
        if not wanted:
            return
        total, done = len(wanted) * len(stages), 0
        yield done, total
        for shape in wanted:
            try:
                made = []
                with self.uncounted():
                    for stage in self._compile(stages, *shape):
                        made.append(stage)
                        done += 1
                        yield done, total
                self._stages[shape] = made
            except Exception as error:  # whatever a compiler may raise
                lines = [line.strip(" .:") for line in str(error).splitlines() if line.strip()]
                self._give_up(
                    f"compiling it failed with {type(error).__name__}: {'; '.join(lines[:3])}"
                )
                return

    def _drop_if_changed(self) -> None:
        """Drop the graphs if the model is not as it was when they were compiled."""
        if not self._stages or state_of(self.model) == self._made_for:
            return
        self._stages.clear()
        self._changes += 1
        if self._changes == _MOST_CHANGES:
            self._give_up("it changes from call to call, and is not compiled for each")

    def _give_up(self, reason: str) -> None:
        """Run uncompiled from now on."""
        self._failed, self.name = True, SegmentRunner.name
        self._stages.clear()
        warnings.warn(
            f"{self.model.__class__.__name__} runs uncompiled, since {reason}. The output is the "
            "same; only speed is lost. Omit compile=True to silence this warning.",
            CompileWarning,
            stacklevel=3,
        )

    def _forward_then(
        self, then: Then | None, hidden: Tensor | None, chunk: Chunk, cache: WaterlineCache
    ) -> tuple[Tensor, Any]:
        stages = self._find(chunk, cache)
        if not stages or then not in (None, stages[-1].then):
            return super()._forward_then(then, hidden, chunk, cache)
        assert isinstance(cache, FixedCache)
        cache.reserve(chunk.spare + 1)
        result = None
        for stage in stages:
            # What follows a segment is told of no token, unless it is wanted.
            told = then is not None and stage is stages[-1]
            packed = chunk.places.packed if told else chunk.places.without_notes()
            hidden, result = stage.run(packed, hidden, cache)
        assert hidden is not None
        if any(stage.recompiled for stage in stages):
            # Each number of tokens would be compiled by itself, for minutes.
            self._give_up(
                "something changed after it was compiled: autocast, gradients, or the number of "
                "threads"
            )
        # In a CUDA graph, the next run writes to the same memory.
        return hidden.clone() if hidden.is_cuda else hidden, result

    def _find(self, chunk: Chunk, cache: WaterlineCache) -> list[CompiledStage]:
        """The stages that a pass runs through; none if it is not compiled."""
        sequences, new_tokens = chunk.places.packed.shape[:2]
        fits = isinstance(cache, FixedCache) and cache.allocated and new_tokens <= LONGEST
        if chunk.fill or not fits:
            return []
        stages = [
            stage
            for stage in self._stages.get((sequences == 1, new_tokens == 1), ())
            if chunk.lo <= stage.lo and stage.hi <= chunk.hi
        ]
        whole = stages and (stages[0].lo, stages[-1].hi) == (chunk.lo, chunk.hi)
        return stages if whole and self._current(stages) else []

    def _holds(self, stages: Sequence[Stage], compiled: Sequence[CompiledStage]) -> bool:
        """Whether it is these stages that were compiled, from the model as it is now."""
        same = [((s.lo, s.hi), s.then) for s in compiled] == list(stages)
        return same and self._current(compiled)

    def _current(self, stages: Sequence[CompiledStage]) -> bool:
        """Whether there are stages, compiled from the model as it is now."""
        same = all(s.segment is self._segment(s.lo, s.hi, False) for s in stages)
        return bool(stages) and same

    @torch.no_grad()
    def _compile(self, stages: Sequence[Stage], one: bool, token: bool) -> Iterator[CompiledStage]:
        """Compile stages for one or several sequences and tokens, and prove each."""
        sequences, new_tokens = 1 if one else _SEVERAL[0], 1 if token else _SEVERAL[1]
        generator = torch.Generator().manual_seed(0)
        size = (sequences, _PROMPT + new_tokens)
        ids = torch.randint(0, self.config.vocab_size, size, generator=generator)
        # Sequences of different lengths, before the pass and in it.
        given = torch.arange(_PROMPT) >= torch.arange(sequences)[:, None]
        valid = torch.ones(sequences, new_tokens, dtype=torch.bool)
        valid[1:, 1:] = False
        notes = np.ones((sequences, new_tokens, NOTES), np.int64)
        # A chain is a tree too, so what is right for this one is right for both.
        parents = np.tile((np.arange(new_tokens) - 1) // 2, (sequences, 1))
        tokens = TokenBatch(ids[:, _PROMPT:], valid, parents=parents, notes=notes)
        expected, got = (self.new_cache(sequences) for _ in range(2))
        for cache in (expected, got):
            self.run(TokenBatch(ids[:, :_PROMPT], given), 0, self.n_layers, cache=cache)
        hidden: Tensor | None = None
        backend = backend_of(self.input_device, self.model.dtype, sequences * new_tokens)
        for (lo, hi), then in stages:
            segment = self._segment(lo, hi, False)
            uncompiled = make_pass(segment, lo, self.config, self.model.dtype, then)
            graph = torch.compile(
                uncompiled,
                fullgraph=True,
                dynamic=False,
                backend=backend,
                options=compile_options(self.input_device),
            )
            stage = CompiledStage(lo, hi, then, segment, graph, uncompiled.__code__)
            chunk = got.open(tokens, (lo, hi), device=self.input_device)
            got.reserve(chunk.spare + 1)
            _mark_dynamic((chunk.places.packed, hidden), 0, 1)
            _mark_dynamic(chain(*got.buffers(lo, hi)), 0, 2)
            states, result = stage.run(chunk.places.packed, hidden, got)
            _require_result(self.model, result, then(states, chunk.places.notes), valid)
            got.close(done=True)
            hidden = self.run(tokens, lo, hi, cache=expected, hidden=hidden)
            what = f"compiled layers {lo} to {hi - 1}"
            require_equal(self.model, what, states[valid], hidden[valid])
            for layer in range(lo, hi):
                for s in range(sequences):
                    pairs = zip(got.read(layer, s), expected.read(layer, s), strict=True)
                    for own, reference in pairs:
                        require_equal(self.model, what, own.flatten(1), reference.flatten(1))
            yield stage
        self._made_for = state_of(self.model)


def _require_result(model: Any, got: Tensor | None, expected: Any, valid: Tensor) -> None:
    """Raise if what follows a segment decides otherwise when compiled.

    Rounding may decide between tokens that are as likely, so a few may differ.
    """
    if got is None:  # nothing follows
        return
    if got.is_floating_point():  # a gate's: 0, or where tokens exit, 1 and their ids
        got, expected = (packed[..., 0] * (1 + packed[..., 1]) for packed in (got, expected))
    elif got.dim() == 3:  # the likeliest token, and then some more
        got, expected = got[..., 0], expected[..., 0]
    differ = int((got != expected).cpu()[valid].sum())
    if differ > 1 + valid.sum() // 4:
        raise SelfCheckError(
            f"{model.__class__.__name__}: compiled, {differ} of {int(valid.sum())} tokens differ "
            "from the uncompiled ones."
        )


def make_pass(
    segment: nn.Module, lo: int, config: Any, dtype: torch.dtype, then: Then
) -> types.FunctionType:
    """The pass that is compiled: nothing in it depends on the host."""
    append_kv = append_kv_on(next(segment.parameters()).device, dtype)

    def run(
        packed: Tensor, hidden: Tensor | None, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Any]:
        places = Places(packed)
        tree = packed.shape[1] > 1
        mask = explicit_mask(places, keys[0].shape[2], config, dtype, tree=tree)
        cache = GraphCache(places, lo, keys, values, append_kv)
        states = call_segment(segment, places, hidden, mask, cache)
        return states, then(states, places.notes)

    # Graphs are kept by code object, a few for each. A pass without a code of its own would meet
    # the graphs of all others.
    code = run.__code__.replace(co_name=f"run_from_{lo}")
    return types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)


def _mark_dynamic(tensors: Iterable[Tensor | None], *dims: int) -> None:
    """Let dimensions be symbols in the graph that is compiled next; those of size 1 cannot be."""
    for tensor in tensors:
        for dim in dims:
            if tensor is not None and tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
