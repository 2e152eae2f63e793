"""A shim that stands in a layer's place, for loops over layers that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# From the layer, its input and the rest of its arguments to what it returns.
LayerCall = Callable[[Any, Tensor, tuple, dict], Any]


class LayerShim(nn.Module):
    """Stands in for one layer; in all but its call, it is that layer.

    Args:
        layer: the layer.
        call: what to do in place of calling it.
    """

    def __init__(self, layer: nn.Module, call: LayerCall) -> None:
        super().__init__()
        # Not a submodule: whoever walks the modules of a decoder should not meet the layer twice.
        object.__setattr__(self, "layer", layer)
        self._call = call
        self.training = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `call`."""
        return self._call(self.layer, hidden_states, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)
