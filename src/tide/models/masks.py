"""The explicit 4-D attention masks of a pass. Knows slots, not models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tide.config import MOST_NODES
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
    if chunk.causal:
        return None
    return explicit_mask(chunk.places, chunk.key_slots, config, dtype, tree=chunk.tree)


def explicit_mask(
    places: Places, key_slots: int, config: Any, dtype: torch.dtype, *, tree: bool
) -> Tensor | dict[str, Tensor]:
    """The mask of tokens over the first `key_slots` slots of the buffers.

    Args:
        tree: whether there may be a draft tree, whose nodes stand in slots of their own but at the
            position of their depth, by which windows go.

    Returns:
        `[sequences, 1, new_tokens, key_slots]`, boolean for sdpa and additive for eager attention;
        a dict by layer type where the model has several.
    """
    device = places.packed.device
    key = torch.arange(key_slots, device=device)  # [key_slots]
    # [sequences, 1, new_tokens, 1]
    start, reach = places.starts[:, None, :, None], places.reaches[:, None, :, None]
    causal = key <= reach  # [sequences, 1, new_tokens, key_slots]
    if tree:
        beyond = key - reach
        ancestors = places.ancestors[:, None, :, None] >> (beyond - 1).clamp(0, MOST_NODES - 1)
        causal = causal | ((beyond <= MOST_NODES) & ((ancestors & 1) == 1))
    causal = causal & (key >= start)
    own, at = places.positions[:, None, :, None], key - start[:, :, :1]
    types = sorted(set(layer_types(config)))
    if tree and types != ["full_attention"]:
        at = _positions(places, key_slots)
    masks = {}
    for layer_type in types:
        mask = causal
        if layer_type == "sliding_attention":
            mask = causal & (at > own - config.sliding_window)
        elif layer_type == "chunked_attention":
            size = config.attention_chunk_size
            mask = causal & (at // size == own // size)
        if config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
        masks[layer_type] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _positions(places: Places, key_slots: int) -> Tensor:
    """The position of what each slot holds, `[sequences, 1, 1, key_slots]`."""
    # Padding goes to a spare slot, which may be the one behind.
    key = torch.arange(key_slots + 1, device=places.packed.device)
    at = (key - places.starts[:, :1]).scatter(1, places.slots, places.positions)
    return at[:, None, None, :key_slots]
