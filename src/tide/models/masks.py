"""The explicit 4-D attention masks of a pass. Knows slots, not models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tide.models.chunk import Chunk, Places


def layer_types(config: Any) -> tuple[str, ...]:
    """The attention type of each layer, also where the config states only a window or chunk."""
    stated = getattr(config, "layer_types", None)
    if stated is not None:
        return tuple(stated)
    if getattr(config, "sliding_window", None) is not None:
        layer_type = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        layer_type = "chunked_attention"
    else:
        layer_type = "full_attention"
    return (layer_type,) * config.num_hidden_layers


def attention_mask(
    chunk: Chunk, config: Any, dtype: torch.dtype
) -> Tensor | dict[str, Tensor] | None:
    """The mask of a pass in the form its model takes; None where its own causal mask is correct."""
    return None if chunk.causal else explicit_mask(chunk.places, chunk.key_slots, config, dtype)


def explicit_mask(
    places: Places, key_slots: int, config: Any, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """The mask of tokens over the first `key_slots` slots of the buffers.

    Returns:
        `[sequences, 1, new_tokens, key_slots]`, boolean for sdpa and additive for eager attention;
        a dict by layer type where the model has several.
    """
    device = places.packed.device
    key = torch.arange(key_slots, device=device)  # [key_slots]
    start = places.starts[:, None, :, None]  # [sequences, 1, new_tokens, 1]
    query = start + places.positions[:, None, :, None]
    causal = (key <= query) & (key >= start)  # [sequences, 1, new_tokens, key_slots]
    masks = {}
    for layer_type in sorted(set(layer_types(config))):
        mask = causal
        if layer_type == "sliding_attention":
            mask = causal & (key > query - config.sliding_window)
        elif layer_type == "chunked_attention":
            size = config.attention_chunk_size
            mask = causal & ((key - start) // size == (query - start) // size)
        if config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
        masks[layer_type] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))
