"""Gives attention metadata for a part of the rows, by backend. Reaches into vLLM's insides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata


@dataclass
class Rows:
    """The requests of a forward pass.

    Attributes:
        starts: place of each request's first token in the pass, and the number of tokens, `[n+1]`.
        lengths: tokens of each request so far, these included, `[n]`.
        blocks: blocks of each request's K and V, `[n, most]`.
        slots: where each token's K and V go, `[tokens]`.
    """

    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    slots: Tensor

    def single(self) -> list[int]:
        """Requests that have one token in this pass and some before it: those that decode."""
        alone = (self.starts[1:] - self.starts[:-1] == 1) & (self.lengths > 1)
        return alone.nonzero().squeeze(1).tolist()


def rows_of(context: ForwardContext, layer: str) -> Rows | None:
    """The requests as one layer's attention sees them; None in a pass that only warms up."""
    metadata = context.attn_metadata
    if not isinstance(metadata, Mapping) or not isinstance(context.slot_mapping, Mapping):
        return None
    found, slots = metadata.get(layer), context.slot_mapping.get(layer)
    if found is None or slots is None:
        return None
    n = len(found.query_start_loc) - 1
    return Rows(found.query_start_loc, found.seq_lens[:n], found.block_table[:n], slots)


def can_subset(context: ForwardContext, attn: Any) -> bool:
    """Whether we know how to cut the metadata of an attention module's backend."""
    metadata: Any = context.attn_metadata
    return isinstance(metadata[attn.layer_name], CPUAttentionMetadata)


def block_size(attn: Any) -> int:
    """Tokens of a block of K and V, as block tables count them."""
    return int(attn.kv_cache.shape[2])


def with_slots(tokens: Tensor) -> ForwardContext:
    """The context in which `tokens` of the pass, and no others, store their K and V."""
    context = get_forward_context()
    slots: Any = context.slot_mapping
    return dataclasses.replace(context, slot_mapping=_once(slots, lambda value, _: value[tokens]))


def with_requests(requests: Tensor, tokens: Tensor, layers: Mapping[str, Any]) -> ForwardContext:
    """The context of some requests only.

    Args:
        requests: which, ascending, `[m]`.
        tokens: their tokens in the pass, `[t]`.
        layers: attention modules by name.
    """
    context = with_slots(tokens)
    metadata: Any = context.attn_metadata
    return dataclasses.replace(
        context,
        attn_metadata=_once(
            metadata, lambda value, names: _cut(value, requests, tokens, [layers[n] for n in names])
        ),
    )


def _once(values: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Change each value; layers that share one share the result."""
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    changed = {key: change(values[some[0]], some) for key, some in names.items()}
    return {name: changed[id(value)] for name, value in values.items()}


def _cut(
    old: CPUAttentionMetadata, requests: Tensor, tokens: Tensor, layers: list[Any]
) -> CPUAttentionMetadata:
    counts = (old.query_start_loc[1:] - old.query_start_loc[:-1])[requests]
    starts = torch.zeros(len(requests) + 1, dtype=old.query_start_loc.dtype)
    starts[1:] = counts.cumsum(0)
    lengths = old.seq_lens[requests]
    windows = {layer.impl.sliding_window for layer in layers}
    first = layers[0]
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(requests),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_size,
        seq_lens=lengths,
        dtype=first.dtype,
        query_start_loc=starts,
        causal=old.causal,
        sliding_window_size=windows.pop() if len(windows) == 1 else -1,
        isa=first.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=None,
        kv_cache_dtype=first.kv_cache_dtype,
    )
    return dataclasses.replace(
        old,
        num_actual_tokens=len(tokens),
        max_query_len=int(counts.max()),
        query_start_loc=starts,
        max_seq_len=int(lengths.max()),
        seq_lens=lengths,
        block_table=old.block_table[requests],
        slot_mapping=old.slot_mapping[tokens],
        scheduler_metadata=plan,
    )
