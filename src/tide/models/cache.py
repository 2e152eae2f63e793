"""Gives a key/value cache whose rows may hold different lengths in different layers.

Every layer keeps one buffer of K and one of V, `[rows, heads, capacity, dim]`, that grows
geometrically. A token of a row sits in the same slot in every layer. `starts[row]` is the row's
first slot and `ends[layer][row]` the slot after its last token in that layer: the row's waterline
there. The first write aligns the rows at their ends, so as long as rows advance together, whatever
the lengths of their prompts, a write is one block copy. Sliding-window layers keep their full
length, since a fall-back may need what has left the window; the mask hides it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tide.errors import RangeError, UnsupportedCacheError

_FIRST_CAPACITY = 64


class KVWritten(Exception):  # noqa: N818  (a signal, as StopIteration is)
    """Stops a layer right after it has written its K and V; see `tide.models.kvfill`."""


@dataclass
class Chunk:
    """Where the tokens of one pass go: the same slots in every layer `[lo, hi)`.

    Attributes:
        lo, hi: the layers that the pass runs.
        new_ends: waterline of each row after the pass.
        tokens: tokens in the pass, without padding.
        starts: first slot of each row, `[rows, 1]`.
        slots: slot of each token, `[rows, new_tokens]`; of padding, the row's first slot.
        block: the slots as one slice, where all rows write the same ones; otherwise None.
        index: (row, column, slot) of each token, `[tokens]` each; None where `block` is set.
        plain: no padding and no gaps anywhere, so the model may make its own causal mask.
        fill: the layers are to write K and V and do no more.
    """

    lo: int
    hi: int
    new_ends: tuple[int, ...]
    tokens: int
    starts: Tensor
    slots: Tensor
    block: slice | None
    index: tuple[Tensor, ...] | None
    plain: bool
    fill: bool

    @property
    def positions(self) -> Tensor:
        """Place of each token in its row, `[rows, new_tokens]`."""
        return self.slots - self.starts

    @property
    def key_slots(self) -> int:
        """How many slots of the buffers the attention of this pass reads."""
        return max(self.new_ends)


class WaterlineLayer(CacheLayerMixin):
    """K and V of one layer; where to write is the cache's chunk."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: WaterlineCache) -> None:
        super().__init__()
        # A true reference would be a cycle, and K and V would outlive their use until a collection.
        self.cache: WaterlineCache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shape, dtype and device from the first K and V; no slot yet."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the chunk's K and V, `[rows, heads, new_tokens, dim]`.

        Returns:
            K and V of every slot that the attention of this pass may read.
        """
        chunk = self.cache.chunk
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = chunk.key_slots
        self.reserve(stop)
        if chunk.block is not None:
            self.keys[:, :, chunk.block] = key_states
            self.values[:, :, chunk.block] = value_states
        else:
            assert chunk.index is not None
            row, column, slot = (index.to(key_states.device) for index in chunk.index)
            self.keys[row, :, slot] = key_states[row, :, column]
            self.values[row, :, slot] = value_states[row, :, column]
        if chunk.fill:
            raise KVWritten
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def reserve(self, slots: int) -> None:
        """Grow the buffers, at least to twice their size, if they have fewer slots."""
        if self.keys.shape[2] < slots:
            capacity = max(_FIRST_CAPACITY, 2 * self.keys.shape[2], slots)
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def get_seq_length(self) -> int:
        """Slots before the running pass, for the model's own mask."""
        chunk = self.cache.chunk
        return chunk.key_slots - chunk.slots.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that the running pass reads, and the offset of the first."""
        return self.cache.chunk.key_slots, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class WaterlineCache(Cache):
    """K and V per layer with a waterline per row.

    Args:
        n_layers: layers of the model.
        rows: rows of the batch.
    """

    layers: list[WaterlineLayer]  # type: ignore[assignment]

    def __init__(self, n_layers: int, rows: int) -> None:
        super().__init__(layers=[WaterlineLayer(self) for _ in range(n_layers)])
        self.starts: tuple[int, ...] = (0,) * rows
        self.ends: list[tuple[int, ...]] = [self.starts] * n_layers
        self._chunk: Chunk | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch."""
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

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of each row that have passed `layer`: its waterline there."""
        return tuple(end - start for end, start in zip(self.ends[layer], self.starts, strict=True))

    def read(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """K and V that `layer` holds for `row`, each `[heads, tokens, dim]`."""
        held = slice(self.starts[row], self.ends[layer][row])
        return self.layers[layer].keys[row, :, held], self.layers[layer].values[row, :, held]

    def open(
        self,
        lo: int,
        hi: int,
        new_tokens: int,
        *,
        device: torch.device,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        fill: bool = False,
        provisional: bool = False,
    ) -> Chunk:
        """Plan a pass of `new_tokens` columns through layers `[lo, hi)`; `close` ends it.

        Args:
            valid: which columns are tokens and which padding, boolean `[rows, new_tokens]`; None if
                all are tokens.
            positions: place of each token in its row, `[rows, new_tokens]`; None for the places
                after those that have passed.
            fill: the layers are to write K and V and do no more.
            provisional: the tokens have not passed the layers below, and will pass these again.
        """
        # All on the host, from one copy of `valid`: a pass then costs one small copy to the device.
        mask = np.ones((self.rows, new_tokens), bool) if valid is None else valid.cpu().numpy()
        counts, padded = mask.sum(1), not mask.all()
        if not counts.any():
            raise RangeError("A pass needs at least one token; every column given is padding.")
        if not any(any(self.lengths(layer)) for layer in range(len(self.layers))):
            if not counts.all():
                raise RangeError(f"Rows start with tokens {counts}; every row needs at least one.")
            self._align(tuple((new_tokens - counts).tolist()))
        ends = self.ends[lo]
        if any(self.ends[layer] != ends for layer in range(lo + 1, hi)):
            raise RangeError(
                f"Layers {lo} to {hi - 1} hold different lengths, so they cannot run as one range. "
                "Run each part up to the same length first, or fall back."
            )
        starts = np.array(self.starts)[:, None]  # [rows, 1]
        if positions is None:
            slots = np.array(ends)[:, None] + mask.cumsum(1) - 1  # [rows, new_tokens]
        else:
            slots = starts + positions.cpu().numpy()
        new_ends = tuple(map(max, ends, (np.where(mask, slots, -1).max(1) + 1).tolist()))
        if lo and not provisional and any(map(int.__gt__, new_ends, self.ends[lo - 1])):
            raise RangeError(
                f"Layers {lo} to {hi - 1} would hold {list(new_ends)} slots, but layer {lo - 1} "
                f"holds {list(self.ends[lo - 1])}: tokens must pass the layers below first."
            )
        last = max(new_ends)
        block = positions is None and len(set(new_ends)) == 1
        if padded:
            slots = np.where(mask, slots, starts)
            # Left-padded prompts fall into place as a block: their padding lands before the row's
            # first slot.
            left_padded = (np.sort(mask, 1) == mask).all()
            block = bool(block and left_padded and ends == self.starts and last >= new_tokens)
        where = np.nonzero(mask)
        self._chunk = Chunk(
            lo,
            hi,
            new_ends,
            tokens=int(counts.sum()),
            starts=torch.from_numpy(starts).to(device),
            slots=torch.from_numpy(slots).to(device),
            block=slice(last - new_tokens, last) if block else None,
            index=None
            if block
            else torch.from_numpy(np.stack([*where, slots[where]])).to(device).unbind(),
            plain=block and not padded and not any(self.starts),
            fill=fill,
        )
        return self._chunk

    def close(self, *, done: bool) -> None:
        """End the running pass; if it is not `done`, what it wrote does not count."""
        chunk, self._chunk = self.chunk, None
        if done:
            self.ends[chunk.lo : chunk.hi] = [chunk.new_ends] * (chunk.hi - chunk.lo)

    def append_zeros(self, lo: int, hi: int, counts: Sequence[int]) -> None:
        """Append `counts[row]` tokens whose K and V are zero to layers `[lo, hi)`.

        This is what was published for skipped layers. It is here to be compared with.
        """
        for index in range(lo, hi):
            layer, ends = self.layers[index], self.ends[index]
            new_ends = tuple(map(sum, zip(ends, counts, strict=True)))
            layer.reserve(max(new_ends))
            for row, (end, new_end) in enumerate(zip(ends, new_ends, strict=True)):
                layer.keys[row, :, end:new_end] = 0
                layer.values[row, :, end:new_end] = 0
            self.ends[index] = new_ends

    def fall_back(self, lengths: Sequence[int]) -> None:
        """Forget, in every layer, what each row holds beyond its first `lengths[row]` tokens."""
        if len(lengths) != self.rows or min(lengths) < 0:
            raise RangeError(
                f"Got lengths {list(lengths)}; need one of at least 0 for each of {self.rows} rows."
            )
        limits = [start + length for start, length in zip(self.starts, lengths, strict=True)]
        self.ends = [tuple(map(min, ends, limits)) for ends in self.ends]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; finished rows leave the batch."""
        if not rows or not all(0 <= row < self.rows for row in rows):
            raise RangeError(f"Got rows {list(rows)}; need some of 0 to {self.rows - 1}.")
        # Slots before the first token of every row that stays are dropped too.
        unused = min(self.starts[row] for row in rows)
        self.starts = tuple(self.starts[row] - unused for row in rows)
        self.ends = [tuple(ends[row] - unused for row in rows) for ends in self.ends]
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys = layer.keys[index, :, unused:]
                layer.values = layer.values[index, :, unused:]

    def _align(self, starts: tuple[int, ...]) -> None:
        self.starts = starts
        self.ends = [starts] * len(self.layers)


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    """A larger buffer with the same content, and zeros after it: a masked NaN would spread."""
    rows, heads, held, dim = buffer.shape
    with torch.inference_mode(False):  # so that a cache may be used inside and outside of it
        grown = buffer.new_zeros(rows, heads, capacity, dim)
    grown[:, :, :held] = buffer
    return grown
