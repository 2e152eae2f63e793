"""The cache for compiled passes: its buffers come in few sizes, and keep their shape.

A compiled pass reads the whole buffer, and its mask hides what does not count. So a buffer is not
much larger than what it holds, and grows rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from tide.models.cache import WaterlineCache
from tide.models.chunk import Places

_SMALLEST = 128
Append = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def bucket(slots: int) -> int:
    """The smallest size of a buffer that has so many slots: 128, 192, 256, 384, 512, ..."""
    size = _SMALLEST
    while size < slots:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


class FixedCache(WaterlineCache):
    """A `WaterlineCache` whose buffers have one of a few sizes."""

    def grown_to(self, held: int, slots: int) -> int:
        """The next size that is enough."""
        return bucket(slots)

    def unused(self, sequences: Sequence[int]) -> int:
        """None are dropped: the buffers keep their shape."""
        return 0

    @property
    def allocated(self) -> bool:
        """Whether every layer has buffers yet; they get them in their first pass."""
        return all(layer.is_initialized for layer in self.layers)

    def reserve(self, slots: int) -> None:
        """Let the buffers of every layer have so many slots at least."""
        for layer in self.layers:  # tokens that exit, and drafts, grow some before others
            if layer.keys.shape[2] < slots:
                layer.reserve(slots)

    def buffers(self, lo: int, hi: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of layers `[lo, hi)`, each `[sequences, heads, size, dim]`."""
        layers = self.layers[lo:hi]
        return [layer.keys for layer in layers], [layer.values for layer in layers]


class GraphLayer(CacheLayerMixin):
    """KV of one layer inside a graph: its buffers, and where the tokens of the pass go."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, places: Places, keys: Tensor, values: Tensor, append_kv: Append) -> None:
        self.places, self.keys, self.values, self.append_kv = places, keys, values, append_kv
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, `[sequences, heads, new_tokens, dim]`, to their slots."""
        self.append_kv(self.keys, self.values, key_states, value_states, self.places.slots)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Slots before the running pass, for the model's own mask."""
        return self.keys.shape[2] - self.places.packed.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All slots, and the offset of the first."""
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class GraphCache(Cache):
    """The cache inside a graph; it has only the layers that run, from layer `lo` on."""

    def __init__(
        self, places: Places, lo: int, keys: list[Tensor], values: list[Tensor], append_kv: Append
    ) -> None:
        pairs = zip(keys, values, strict=True)
        super().__init__(layers=[GraphLayer(places, k, v, append_kv) for k, v in pairs])
        self.lo = lo

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `GraphLayer.update`."""
        layer: Any = self.layers[layer_idx - self.lo]
        return layer.update(key_states, value_states)
