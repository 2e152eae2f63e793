"""The requests of a forward pass, and attention metadata for a subset of them.

Relies on vLLM internals, by attention backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from tide.errors import UnsupportedModelError


@dataclass
class Requests:
    """The requests of a forward pass.

    Attributes:
        starts: index of each request's first token in the pass, then the number of tokens, `[n+1]`.
        lengths: tokens of each request so far, those of this pass included, `[n]`.
        blocks: KV cache blocks of each request, `[n, max_blocks]`.
        slots: KV cache slot of each token, `[tokens]`.
        block: tokens of a block.
        tokens: of the pass, padding not counted.
    """

    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    slots: Tensor
    block: int
    tokens: int

    def block_of(self, requests: Sequence[int], positions: Tensor) -> Tensor:
        """The KV cache blocks of one token of each of some requests, `[m]`.

        Args:
            requests: their indices.
            positions: of the tokens, `[m]`.
        """
        return self.blocks[requests].gather(1, positions[:, None] // self.block).squeeze(1)

    def decoding(self) -> list[int]:
        """The requests that decode: one token in this pass, and at least one before it."""
        single = (self.starts[1:] - self.starts[:-1] == 1) & (self.lengths > 1)
        return single.nonzero().squeeze(1).tolist()


def requests_of(context: ForwardContext, attn: Any) -> Requests | None:
    """The requests as one attention module sees them; None in a warm-up pass."""
    metadata: Any = context.attn_metadata
    if not isinstance(metadata, Mapping) or not isinstance(context.slot_mapping, Mapping):
        return None
    found, slots = metadata.get(attn.layer_name), context.slot_mapping.get(attn.layer_name)
    if found is None or slots is None:
        return None
    n = len(found.query_start_loc) - 1
    return Requests(
        starts=found.query_start_loc, lengths=found.seq_lens[:n], blocks=found.block_table[:n],
        slots=slots, block=int(attn.kv_cache.shape[2]), tokens=int(found.num_actual_tokens),
    )  # fmt: skip


def require_backends(attention: Sequence[Any]) -> None:
    """Raise for attention modules with whose backend no token can exit."""
    for backend in (attn.attn_backend for attn in attention):
        if backend.forward_includes_kv_cache_update:
            raise UnsupportedModelError(
                f"The attention backend {backend.get_name()} stores KV inside attention, so a "
                "token cannot store its KV without attending. Choose another with "
                "--attention-backend."
            )
        if backend.get_name() == "FLASHINFER":
            raise UnsupportedModelError(
                "The attention backend FLASHINFER does not tell which tokens of a pass are of "
                "which request. Choose another with --attention-backend."
            )


def can_subset(context: ForwardContext, attn: Any) -> bool:
    """Whether the metadata of an attention module's backend can be cut to some requests."""
    metadata: Any = context.attn_metadata
    return isinstance(metadata[attn.layer_name], CPUAttentionMetadata)


def with_slots(tokens: Tensor) -> ForwardContext:
    """The context in which only `tokens` of the pass store their KV."""
    context = get_forward_context()
    slots: Any = context.slot_mapping
    return dataclasses.replace(
        context, slot_mapping=_map_shared(slots, lambda value, _: value[tokens])
    )


def with_requests(requests: Tensor, tokens: Tensor, layers: Mapping[str, Any]) -> ForwardContext:
    """The context in which only some requests run.

    Args:
        requests: their indices, ascending, `[m]`.
        tokens: indices of their tokens in the pass, `[t]`.
        layers: attention modules by name.
    """
    context = with_slots(tokens)
    metadata: Any = context.attn_metadata
    return dataclasses.replace(
        context,
        attn_metadata=_map_shared(
            metadata, lambda value, names: _cut(value, requests, tokens, [layers[n] for n in names])
        ),
    )


def _map_shared(values: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Apply `change` to each value; layers that share a value share the result."""
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    changed = {key: change(values[layers[0]], layers) for key, layers in names.items()}
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
