"""Keys and values of layers that a token skips, computed from its last state; nothing attends.

The layers above an exit all read the same state. Where they norm it alike but for a weight, that
weight can be multiplied into their projections, and one product gives the KV of all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention.attention import _encode_layer_name
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)

_TOLERANCE = {torch.float32: 1e-4}  # of keys and values, relative
_COARSE = 3e-2  # of other dtypes: the folded weights are rounded once more


class StoreKV(nn.Module):
    """The layers of a segment as far as they store KV, all from the same states."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", layers: Sequence[Any]) -> None:
        super().__init__()
        self.project: nn.Module = (_FoldedKV if _can_fold(layers) else _LayerwiseKV)(layers)
        self.names = [layer.self_attn.attn.layer_name for layer in layers]

    @property
    def folded(self) -> bool:
        """Whether one projection gives the KV of all layers."""
        return isinstance(self.project, _FoldedKV)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> list[Tensor]:
        """Store the KV that tokens at these positions have by these states."""
        # What comes back is empty, but a compiler drops stores whose result nobody gets.
        return [
            torch.ops.vllm.unified_kv_cache_update(key, value, _encode_layer_name(name))
            for name, (key, value) in zip(
                self.names, self.project(positions, hidden_states), strict=True
            )
        ]

    def check(self, layers: Sequence[Any], positions: Tensor, hidden_states: Tensor) -> bool:
        """Whether the KV is what the layers themselves compute; if not, let them."""
        if not self.folded:
            return True
        layerwise = _LayerwiseKV(layers)
        same = all(
            _close(one, other)
            for folded, expected in zip(
                self.project(positions, hidden_states),
                layerwise(positions, hidden_states),
                strict=True,
            )
            for one, other in zip(folded, expected, strict=True)
        )
        if not same:
            self.project = layerwise
        return same


class _LayerwiseKV(nn.Module):
    """Keys and values of each layer by its own norm and attention: right for every family."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(layer.input_layernorm for layer in layers)
        self.attention = nn.ModuleList(_without_attending(layer.self_attn) for layer in layers)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [
            attention(positions=positions, hidden_states=norm(hidden_states))
            for norm, attention in zip(self.norms, self.attention, strict=True)
        ]


class _FoldedKV(nn.Module):
    """Keys and values of all layers by one norm, one projection and one rotation."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        first = layers[0].self_attn
        self.rotary_emb = first.rotary_emb
        self.shape = -1, len(layers), first.attn.num_kv_heads, first.attn.head_size
        keys, values = zip(*(_folded(layer) for layer in layers), strict=True)
        weight, bias = (torch.cat(parts) for parts in zip(*keys, *values, strict=True))
        with weight.device:
            norm = layers[0].input_layernorm
            self.norm = RMSNorm(
                norm.hidden_size, norm.variance_epsilon, has_weight=False, dtype=weight.dtype
            )
            linear: Any = ReplicatedLinear(
                weight.shape[1], weight.shape[0], bias=bool(bias.any()), params_dtype=weight.dtype
            )
        linear.weight.data.copy_(weight)
        if linear.bias is not None:
            linear.bias.data.copy_(bias)
        # vLLM does this for the modules of a model once they are loaded.
        linear.quant_method.process_weights_after_loading(linear)
        self.linear = linear

    def forward(self, positions: Tensor, hidden_states: Tensor) -> list[tuple[Tensor, Tensor]]:
        projected, _ = self.linear(self.norm(hidden_states))
        keys, values = projected.chunk(2, dim=-1)
        # All layers as the heads of one.
        keys, _ = self.rotary_emb(positions, keys.contiguous(), None)
        return list(
            zip(keys.view(self.shape).unbind(1), values.view(self.shape).unbind(1), strict=True)
        )


def _can_fold(layers: Sequence[Any]) -> bool:
    """Whether the layers norm, project and rotate alike but for weights."""
    first = layers[0]
    parts = {"qkv_proj", "o_proj", "rotary_emb", "attn"}

    def alike(layer: Any) -> bool:
        norm, attention = layer.input_layernorm, layer.self_attn
        attn = attention.attn
        return (
            type(norm) is RMSNorm
            and norm.variance_size_override is None
            and norm.variance_epsilon == first.input_layernorm.variance_epsilon
            and set(attention._modules) == parts
            and attention.rotary_emb is first.self_attn.rotary_emb
            and type(attention.qkv_proj) is QKVParallelLinear
            and type(attention.qkv_proj.quant_method) is UnquantizedLinearMethod
            and attn.head_size == attn.head_size_v == first.self_attn.attn.head_size
            and attn.num_kv_heads == first.self_attn.attn.num_kv_heads
        )

    return all(map(alike, layers))


def _folded(layer: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Weight and bias of a layer's keys, and of its values; the norm's weight is in them."""
    attention = layer.self_attn
    size = attention.attn.num_kv_heads * attention.attn.head_size
    weight = attention.qkv_proj.weight.data[-2 * size :]
    bias = attention.qkv_proj.bias
    offset = weight.new_zeros(2 * size) if bias is None else bias.data[-2 * size :]
    folded = (weight.float() * layer.input_layernorm.weight.float()).to(weight.dtype)
    keys, values = zip(folded.split(size), offset.split(size), strict=True)
    return keys, values


def _without_attending(attention: Any) -> Any:
    """A copy of a layer's attention, with its weights, that returns its keys and values."""
    made = copy_of(attention)
    made.attn, made.o_proj = _KeysAndValues(attention.attn), _PassThrough()
    return made


def copy_of(module: Any) -> Any:
    """A copy of a module, with its weights, whose parts can be replaced without changing it."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


class _KeysAndValues(nn.Module):
    """In place of attention."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.key_shape = -1, attn.num_kv_heads, attn.head_size
        self.value_shape = -1, attn.num_kv_heads, attn.head_size_v

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key.view(self.key_shape), value.view(self.value_shape)


class _PassThrough(nn.Module):
    """In place of the projection of attention's output, of which there is none."""

    def forward(self, attended: Any) -> tuple[Any, None]:
        return attended, None


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = _TOLERANCE.get(one.dtype, _COARSE)
    return bool((one.float() - other.float()).norm() <= tolerance * other.float().norm())
