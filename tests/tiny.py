"""Tiny random models of every supported family, one row of config each."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tide.models.families import EAGER_ONLY

VOCABULARY = 97
LAYERS = 6

_ROPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

# model_type -> config. Windows are shorter than the dozen tokens of a test.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _ROPE,
    "qwen2": _ROPE,
    "qwen3": {**_ROPE, "head_dim": 8},
    "mistral": {**_ROPE, "sliding_window": 5},
    "mixtral": {**_ROPE, **_MOE, "sliding_window": None},
    "gemma2": {**_ROPE, "head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 1.0},
    "gemma3_text": {**_ROPE, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 3},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": {**_ROPE, "num_key_value_heads": 4},
    "phi": {**_ROPE, "partial_rotary_factor": 0.5},
    "phi3": {**_ROPE, "sliding_window": 7},
    "opt": {**_ROPE, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {**_ROPE, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "cohere": {**_ROPE, "logit_scale": 0.25},
    "granite": {**_ROPE, "logits_scaling": 3.0, "embedding_multiplier": 3.0},
    "llama4_text": {
        **_ROPE,
        "intermediate_size_mlp": 64,
        "head_dim": 8,
        "num_local_experts": 2,
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 1, 0, 1, 1, 0],
    },
    # Attention sinks beside its projections.
    "gpt_oss": {
        **_ROPE,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        **_ROPE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}


def tiny_tokenizer() -> Any:
    """A tokenizer for the tiny models: every token is one character."""
    characters = [chr(33 + i) for i in range(94)] + list("äöü")
    vocabulary = {character: i for i, character in enumerate(characters[:VOCABULARY])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="!"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!")


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model."""
    return AutoConfig.for_model(family, **{**FAMILIES[family], **changes})


def supports_sdpa(config: Any) -> bool:
    """Whether this version of transformers loads the family with sdpa."""
    return AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A tiny random model in evaluation mode, its weights large enough that mistakes show."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    if attention == "sdpa" and family in EAGER_ONLY and not supports_sdpa(config):
        attention = "eager"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            elif "bias" in name:
                parameter.normal_(0.0, 0.05)
    return model.to(dtype).eval()
