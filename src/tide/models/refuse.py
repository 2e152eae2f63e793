"""Refusals: what TIDE cannot run correctly is named at attach, not found out later."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from tide.errors import UnsupportedCacheError, UnsupportedModelError
from tide.models.families import ALIBI_FAMILIES, EAGER_ONLY, LAYER_TYPES, MASKED_ATTENTION
from tide.models.locate import Parts, text_config

# Settings of `cache_implementation` that mean a dynamic cache. "hybrid" is what older Gemma folders
# have for "sliding and full layers"; it needs no fixed shape.
DYNAMIC_CACHES = (None, "dynamic", "hybrid")


def refuse_unsupported(model: Any) -> None:
    """Raise if `model` is of a type, or in a state, that cannot be run by depth ranges.

    Raises:
        UnsupportedModelError: naming the model, the reason and the way out.
        UnsupportedCacheError: if the model is set to generate with a static or quantised cache.
    """
    name = _name(model)
    if not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{name} has no config. Pass a model loaded with AutoModelForCausalLM."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; TIDE runs decoder-only models. "
            "Use a causal language model (AutoModelForCausalLM)."
        )
    config = text_config(model)
    _refuse_state(name, model, config)
    _refuse_attention(name, config)
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            f"{name} is split over {model.tp_size} processes (tensor parallelism in transformers). "
            "TIDE chooses draft lengths by the clock, so the processes would run different passes. "
            "Load it on one device or with device_map='auto', or serve it with vLLM (`tide serve`)."
        )
    if _processes() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        raise UnsupportedModelError(
            f"{name} is sharded over processes (FSDP or DeepSpeed ZeRO-3), which must run the same "
            "passes together. TIDE chooses draft lengths by the clock, so they would wait for each "
            "other for ever. Load it whole, or serve it with vLLM (`tide serve`)."
        )
    if model.training:
        raise UnsupportedModelError(
            f"{name} is in training mode, where dropout makes every run different. Call "
            f"model.eval() first."
        )
    _refuse_cache_setting(name, getattr(model, "generation_config", None))


def refuse_replaced_head(model: Any, parts: Parts) -> None:
    """Raise if the head of a model is another one than when it was attached."""
    if parts.found_by != "probe" and model.get_output_embeddings() is not parts.head:
        raise UnsupportedModelError(
            f"{_name(model)} has another output head than when TIDE was attached to it, as "
            "resize_token_embeddings and adapters make one. Attach again: tide.TIDE(model, ...)."
        )


def _refuse_state(name: str, model: Any, config: Any) -> None:
    """Anything that keeps more, or less, than one key and one value per token and layer."""
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        raise UnsupportedModelError(
            f"{name} shares KV between layers (num_kv_shared_layers={shared}), so a layer "
            f"cannot be skipped on its own. Use a model in which every layer has its own KV."
        )
    stateful = getattr(model, "_is_stateful", False)
    strange = {
        type(layer).__name__
        for layer in DynamicCache(config=config).layers
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
    } | {name for name in getattr(config, "layer_types", None) or () if name not in LAYER_TYPES}
    if stateful or strange:
        found = f" ({', '.join(sorted(strange))})" if strange else ""
        raise UnsupportedModelError(
            f"{name} keeps recurrent or hybrid state{found}, as Mamba and linear attention do: a "
            f"token that skips a layer could not be caught up later. TIDE needs attention with "
            f"KV in every layer (layer types {', '.join(LAYER_TYPES)})."
        )


def _refuse_attention(name: str, config: Any) -> None:
    if config.model_type in ALIBI_FAMILIES or getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{name} builds ALiBi position biases from a 2-D mask, which cannot say where tokens "
            f"of sequences at different depths stand. Use a model with rotary or learned positions."
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in MASKED_ATTENTION:
        allowed = ("eager",) if config.model_type in EAGER_ONLY else MASKED_ATTENTION
        wanted = allowed[0]
        raise UnsupportedModelError(
            f"{name} uses attn_implementation={attention!r}, which takes no explicit 4-D mask. "
            f"Load it with attn_implementation={wanted!r} (allowed: {', '.join(allowed)})."
        )


def _refuse_cache_setting(name: str, generation_config: Any) -> None:
    setting = getattr(generation_config, "cache_implementation", None)
    if setting not in DYNAMIC_CACHES:
        raise UnsupportedCacheError(
            f"{name} is set to generate with cache_implementation={setting!r}. TIDE keeps "
            f"sequences at different depths in a cache of its own, which static, offloaded and "
            f"quantised caches cannot do. Set model.generation_config.cache_implementation = None."
        )


def _processes() -> int:
    found = torch.distributed
    return found.get_world_size() if found.is_available() and found.is_initialized() else 1


def _name(model: Any) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{model.__class__.__name__} ({path})" if path else model.__class__.__name__
