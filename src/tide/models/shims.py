"""The second way to run depth ranges: the decoder's own loop meets a shim in each layer's place.

For decoders of which no slice can be made, or none that is proven equal. While a pass runs, the
class of the decoder's list of layers is one that hands out shims. A shim inside the range calls its
layer; outside, it hands its input on, and the layer, with whatever hooks sit on it, is not touched.
A call of the model from another thread meets the shims too: for that thread they call their layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tide.models.cache import WaterlineCache
from tide.models.chunk import Chunk
from tide.models.kvfill import call_until_written
from tide.models.layer_shim import LayerShim
from tide.models.masks import attention_mask
from tide.models.runner import DepthRunner, first_tensor
from tide.models.tokens import TokenBatch
from tide.stats import LayerCounts

# One for each decoder: while a pass runs its layers are shims, for every other runner too.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@dataclass
class _Pass:
    """One run of the decoder, and the hidden states on their way through it.

    Attributes:
        thread: which runs it.
        hidden: before layer `lo`, what is injected there; then the output of the last layer run.
    """

    chunk: Chunk
    hidden: Tensor | None
    thread: int


class _ShimList(nn.ModuleList):
    """The class of the decoder's list of layers while a pass runs: its loop meets the shims.

    Another thread may be in the middle of a method when a pass begins or ends. Then it finds no
    shims, in the list or in a slice that the list made of itself, and takes the layers.
    """

    def __iter__(self) -> Iterator[Any]:
        shims = vars(self).get("shims")
        # Not super(): the class of the list may be its own again.
        return nn.ModuleList.__iter__(self) if shims is None else iter(shims)

    def __getitem__(self, index: Any) -> Any:
        shims = vars(self).get("shims")
        return nn.ModuleList.__getitem__(self, index) if shims is None else shims[index]


class ShimRunner(DepthRunner):
    """Runs depth ranges through the whole decoder; see `DepthRunner`.

    The model is changed while a pass runs, and is put back when it ends, also by an exception.
    """

    name = "shims"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.lock = _LOCKS.setdefault(self.parts.decoder, threading.RLock())
        self._running: _Pass | None = None
        self._returns_tuple = False
        self._learn_return_type()

    def _forward(self, hidden: Tensor | None, chunk: Chunk, cache: WaterlineCache) -> Tensor:
        layers = self.parts.layers
        with self.lock:
            running = self._running = _Pass(chunk, hidden, threading.get_ident())
            # Made anew each time: adapters and quantisation replace layers.
            shims = [LayerShim(m, partial(self._at_shim, i)) for i, m in enumerate(layers)]
            # A change of class keeps the list, its name and its content as they are.
            list_class = type(layers)
            try:
                layers.__dict__["shims"] = shims
                layers.__class__ = _ShimList
                self.parts.decoder(
                    input_ids=chunk.places.ids,
                    attention_mask=attention_mask(chunk, self.config, self.model.dtype),
                    position_ids=chunk.places.positions,
                    past_key_values=cache,
                    use_cache=True,
                )
            finally:
                layers.__class__ = list_class
                layers.__dict__.pop("shims", None)
                self._running = None
        assert running.hidden is not None
        return running.hidden

    def _at_shim(self, index: int, layer: Any, hidden: Tensor, args: tuple, kwargs: dict) -> Any:
        running = self._running
        # Another thread may still hold shims when the pass has ended.
        if running is None or running.thread != threading.get_ident():
            return layer(hidden, *args, **kwargs)
        chunk = running.chunk
        if chunk.lo <= index < chunk.hi:
            if index == chunk.lo and running.hidden is not None:
                hidden = running.hidden
            if chunk.fill:
                call_until_written(layer, hidden, args, kwargs)
            else:
                output = layer(hidden, *args, **kwargs)
                self._returns_tuple = isinstance(output, tuple)
                hidden = first_tensor(output)
            running.hidden = hidden
        return (hidden,) if self._returns_tuple else hidden

    def _learn_return_type(self) -> None:
        """Shims must return what their layers would.

        One call of layer 0, not counted, shows what that is.
        """
        token = torch.zeros(1, 1, dtype=torch.long, device=self.input_device)
        self.run(TokenBatch(token), 0, 1, cache=self.new_cache(1))
        self.counts = LayerCounts.zeros(self.n_layers)
