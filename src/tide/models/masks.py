"""The explicit 4-D attention masks of a pass. Knows slots, not models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tide.models.cache import Chunk


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
    """The mask of a pass in the form its model takes.

    Returns:
        None where the model's own causal mask is correct; else `[sequences, 1, new_tokens,
        key_slots]`, boolean for sdpa and additive for eager attention; a dict by layer type where
        the model has several.
    """
    if chunk.causal:
        return None
    device = chunk.slots.device
    key = torch.arange(chunk.key_slots, device=device)  # [key_slots]
    query = chunk.slots[:, None, :, None]  # [sequences, 1, new_tokens, 1]
    start = chunk.starts[:, :, None, None]  # [sequences, 1, 1, 1]
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
            zero = torch.zeros((), dtype=dtype, device=device)
            mask = torch.where(mask, zero, torch.finfo(dtype).min)
        masks[layer_type] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))
