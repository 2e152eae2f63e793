"""The KV cache whose sequences may hold different lengths in different layers.

Every layer keeps one buffer of keys and one of values, `[sequences, heads, slots, dim]`, that grows
in blocks. A token of a sequence sits in the same slot in every layer. `starts[s]` is the first slot
of sequence `s` and `ends[layer][s]` the slot after its last token in that layer: the waterline
there. The first write aligns the sequences at their ends, so as long as they advance together,
whatever the lengths of their prompts, a write is one block copy. Sliding-window layers keep their
full length, since a rollback may need what is out of the window; the mask hides it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tide.errors import RangeError, UnsupportedCacheError
from tide.kernels.operators import append_kv_on, gather_path
from tide.models.chunk import Chunk, host_mask, plan_chunk, upload
from tide.models.tokens import TokenBatch

_BLOCK = 64  # least slots by which buffers grow
_GROWTH = 16  # or by this fraction of what they hold


class KVWritten(Exception):  # noqa: N818  (a signal, as StopIteration is)
    """Stops a layer right after it has written its KV; see `tide.models.kvfill`."""


class WaterlineLayer(CacheLayerMixin):
    """KV of one layer; where to write is the cache's chunk."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: WaterlineCache) -> None:
        super().__init__()
        # A true reference would be a cycle, and KV would outlive its use until a collection.
        self.cache: WaterlineCache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shape, dtype and device from the first keys and values; no slot yet."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the chunk's keys and values, `[sequences, heads, new_tokens, dim]`.

        Returns:
            Keys and values of every slot that the attention of this pass may read.
        """
        chunk = self.cache.chunk
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = chunk.key_slots
        self.reserve(stop if chunk.block is not None else chunk.spare + 1)
        if chunk.block is not None:
            self.keys[:, :, chunk.block] = key_states
            self.values[:, :, chunk.block] = value_states
        else:
            append_kv = append_kv_on(self.keys.device, self.keys.dtype)
            slots = chunk.places.slots.to(self.keys.device)
            append_kv(self.keys, self.values, key_states, value_states, slots)
        if chunk.fill:
            raise KVWritten
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def reserve(self, slots: int) -> None:
        """Grow the buffers if they have too few slots."""
        held = self.keys.shape[2]
        if held < slots:
            grown = self.cache.grown_to(held, slots)
            self.keys, self.values = _grown(self.keys, grown), _grown(self.values, grown)

    def get_seq_length(self) -> int:
        """Slots before the running pass, for the model's own mask."""
        chunk = self.cache.chunk
        return chunk.key_slots - chunk.places.packed.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that the running pass reads, and the offset of the first."""
        return self.cache.chunk.key_slots, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class WaterlineCache(Cache):
    """KV per layer with a waterline per sequence.

    Args:
        n_layers: layers of the model.
        sequences: sequences of the batch.
        capacity: slots beyond which buffers need not grow; None if not known.
    """

    layers: list[WaterlineLayer]  # type: ignore[assignment]

    def __init__(self, n_layers: int, sequences: int, capacity: int | None = None) -> None:
        super().__init__(layers=[WaterlineLayer(self) for _ in range(n_layers)])
        self.capacity = capacity
        self.starts: tuple[int, ...] = (0,) * sequences
        self.ends: list[tuple[int, ...]] = [self.starts] * n_layers
        self._chunk: Chunk | None = None
        self._aligned = False

    @property
    def sequences(self) -> int:
        """Sequences of the batch."""
        return len(self.starts)

    @property
    def chunk(self) -> Chunk:
        """The pass that is running."""
        if self._chunk is None:
            raise UnsupportedCacheError(
                "A WaterlineCache is written by DepthRunner.run, not by calling the model. "
                "Pass it as run(..., cache=cache), or call the model with a DynamicCache."
            )
        return self._chunk

    def grown_to(self, held: int, slots: int) -> int:
        """Slots of buffers that hold `held` and need `slots`: a block more, for tokens to come.

        Only up to the capacity and a spare slot; a capacity that proves too small no longer counts,
        or every token beyond it would copy the buffers.
        """
        grown = slots + max(_BLOCK, held // _GROWTH)
        if self.capacity is not None and slots <= self.capacity + 1:
            grown = min(grown, self.capacity + 1)
        return grown

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of each sequence that have passed `layer`: its waterline there."""
        return tuple(end - start for end, start in zip(self.ends[layer], self.starts, strict=True))

    def read(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values that `layer` holds for a sequence, each `[heads, tokens, dim]`."""
        held = slice(self.starts[sequence], self.ends[layer][sequence])
        of = self.layers[layer]
        return of.keys[sequence, :, held], of.values[sequence, :, held]

    def align(self, prompts: Sequence[int]) -> None:
        """Align empty sequences so that prompts of these lengths end in the same slot.

        Done by itself where the first pass holds whole prompts.
        """
        self._start_at(max(prompts) - np.array(prompts))
        self._aligned = True

    def open(
        self,
        tokens: TokenBatch,
        layers: tuple[int, int],
        *,
        fill: bool = False,
        device: torch.device | None = None,
    ) -> Chunk:
        """Plan a pass of tokens through layers `[lo, hi)`; `close` ends it.

        Args:
            tokens: of every sequence.
            layers: `(lo, hi)`.
            fill: the layers are to write KV and do no more.
            device: where the pass starts; None for where the tokens are.
        """
        lo, hi = layers
        mask = host_mask(tokens)
        counts = mask.sum(1)
        if not counts.any():
            raise RangeError("A pass needs at least one token; everything given is padding.")
        if not self._aligned and not any(any(self.lengths(n)) for n in range(len(self.layers))):
            if not counts.all():
                raise RangeError(
                    f"Sequences start with tokens {counts}; every sequence needs at least one."
                )
            self._start_at(mask.shape[1] - counts)
        if any(self.ends[layer] != self.ends[lo] for layer in range(lo + 1, hi)):
            raise RangeError(
                f"Layers {lo} to {hi - 1} hold different lengths, so they cannot run as one range. "
                "Run each part up to the same length first, or roll back."
            )
        device = tokens.ids.device if device is None else device
        chunk = plan_chunk(tokens, mask, self.starts, self.ends[lo], device)
        chunk.lo, chunk.hi, chunk.fill = lo, hi, fill
        if lo and any(map(int.__gt__, chunk.new_ends, self.ends[lo - 1])):
            raise RangeError(
                f"Layers {lo} to {hi - 1} would hold {list(chunk.new_ends)} slots, but layer "
                f"{lo - 1} holds {list(self.ends[lo - 1])}: tokens must pass the layers below "
                "first."
            )
        self._chunk = chunk
        return chunk

    def close(self, *, done: bool) -> None:
        """End the running pass; if it is not `done`, what it wrote does not count."""
        chunk, self._chunk = self.chunk, None
        if done:
            self.ends[chunk.lo : chunk.hi] = [chunk.new_ends] * (chunk.hi - chunk.lo)

    def append_zeros(self, lo: int, hi: int, counts: Sequence[int]) -> None:
        """Append `counts[s]` tokens whose KV is zero to layers `[lo, hi)` of each sequence.

        This is what was published for skipped layers. It is here to be compared with.
        """
        for index in range(lo, hi):
            layer, ends = self.layers[index], self.ends[index]
            new_ends = tuple(map(sum, zip(ends, counts, strict=True)))
            layer.reserve(max(new_ends))
            for s, (end, new_end) in enumerate(zip(ends, new_ends, strict=True)):
                layer.keys[s, :, end:new_end] = 0
                layer.values[s, :, end:new_end] = 0
            self.ends[index] = new_ends

    def keep_paths(self, paths: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Move KV of a path of sequences' draft trees to the end of their prefix, where it is held.

        Args:
            paths: by sequence, the position of the tree's first node and the nodes, ascending.
                All have passed the same layers.
        """
        plan = np.zeros((2 + max(len(path) for _, path in paths.values()), self.sequences), int)
        for s, (first, path) in paths.items():
            plan[:2, s] = self.starts[s] + first, len(path)
            plan[2 : 2 + len(path), s] = path
        buffers: dict[torch.device, list[Tensor]] = {}
        for layer, ends in zip(self.layers, self.ends, strict=True):
            if any(ends[s] > self.starts[s] + first for s, (first, _) in paths.items()):
                buffers.setdefault(layer.keys.device, []).extend((layer.keys, layer.values))
        for device, of_device in buffers.items():
            sent = upload(plan, device)
            gather_path(of_device, sent[2:].T, sent[0], sent[1])

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget, in every layer, what each sequence holds beyond its first `lengths[s]` tokens."""
        if len(lengths) != self.sequences or min(lengths) < 0:
            raise RangeError(
                f"Got lengths {list(lengths)}; need one of at least 0 for each of "
                f"{self.sequences} sequences."
            )
        limits = [start + length for start, length in zip(self.starts, lengths, strict=True)]
        self.ends = [tuple(map(min, ends, limits)) for ends in self.ends]

    def keep(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order.

        If the last sequences fill the gaps, only they are copied.
        """
        if not sequences or not all(0 <= s < self.sequences for s in sequences):
            raise RangeError(
                f"Got sequences {list(sequences)}; need some of 0 to {self.sequences - 1}."
            )
        unused = self.unused(sequences)
        self.starts = tuple(self.starts[s] - unused for s in sequences)
        self.ends = [tuple(ends[s] - unused for s in sequences) for ends in self.ends]
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys = _kept(layer.keys, sequences)[:, :, unused:]
                layer.values = _kept(layer.values, sequences)[:, :, unused:]

    def unused(self, sequences: Sequence[int]) -> int:
        """Slots before the first token of each of these sequences, which `keep` drops too."""
        return min(self.starts[s] for s in sequences)

    def _start_at(self, starts: np.ndarray) -> None:
        self.starts = tuple(starts.tolist())
        self.ends = [self.starts] * len(self.layers)


def _kept(buffer: Tensor, sequences: Sequence[int]) -> Tensor:
    """Some lines of a buffer, in place where lines that go make room for lines that stay."""
    moved = {to: s for to, s in enumerate(sequences) if to != s}
    if all(s >= len(sequences) for s in moved.values()):
        for to, s in moved.items():
            buffer[to] = buffer[s]
        return buffer[: len(sequences)]
    with torch.inference_mode(False):  # as in `_grown`
        return buffer[torch.tensor(sequences, device=buffer.device)]


def _grown(buffer: Tensor, slots: int) -> Tensor:
    """A larger buffer with the same content, and zeros after it: a masked NaN would spread."""
    sequences, heads, held, dim = buffer.shape
    with torch.inference_mode(False):  # so that a cache may be used inside and outside of it
        grown = buffer.new_zeros(sequences, heads, slots, dim)
    grown[:, :, :held] = buffer
    return grown
