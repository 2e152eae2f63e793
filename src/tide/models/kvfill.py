"""KV without the rest of a layer: the layer runs only until it has stored its KV.

For tokens that will never go deeper (`propagate`). Attention, output projection and MLP of the
layer do not run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tide.errors import UnsupportedModelError
from tide.models.cache import KVWritten


def call_until_written(layer: nn.Module, hidden: Tensor, args: tuple, kwargs: dict) -> None:
    """Call `layer` with a cache that stops it once its KV is stored.

    Raises:
        UnsupportedModelError: if the layer ends without storing any.
    """
    try:
        layer(hidden, *args, **kwargs)
    except KVWritten:
        _release_offloaded(layer)
    else:
        raise UnsupportedModelError(
            f"{type(layer).__name__} ran to its end without storing KV, so KV cannot be filled in "
            "alone. Run the whole layer instead (kv_cache_strategy='deferred')."
        )


def _release_offloaded(layer: nn.Module) -> None:
    """Let accelerate put weights back that a call stopped half-way keeps on the device."""
    for module in layer.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        loaded = any(not weight.is_meta for weight in module.parameters(recurse=False))
        if loaded and getattr(hook, "offload", False):
            hook.post_forward(module, None)
