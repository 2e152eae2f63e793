"""What is known of model families, as rows of data.

The self-check decides whether a row is true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FamilyRow:
    """Where a family keeps its parts, as dotted paths from the causal language model."""

    decoder: str
    layers: str = "layers"
    norm: str = "norm"


# model_type -> row. Only consulted where Hugging Face's own accessors find nothing.
FAMILIES: dict[str, FamilyRow] = {
    "falcon": FamilyRow("transformer", "h", "ln_f"),
    "gpt2": FamilyRow("transformer", "h", "ln_f"),
    "gpt_bigcode": FamilyRow("transformer", "h", "ln_f"),
    "gpt_neox": FamilyRow("gpt_neox", "layers", "final_layer_norm"),
    "gptj": FamilyRow("transformer", "h", "ln_f"),
    "opt": FamilyRow("model.decoder", "layers", "final_layer_norm"),
    "phi": FamilyRow("model", "layers", "final_layernorm"),
    "stablelm": FamilyRow("model", "layers", "norm"),
}

# Names under which a decoder keeps its final norm, most common first.
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")

# Model types whose positions are an ALiBi bias built from a 2-D mask, which a 4-D mask cannot
# carry.
ALIBI_FAMILIES = ("bloom", "mpt")

# Types of attention that `masks.py` can mask; anything else is refused.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Attention implementations that read an explicit 4-D mask.
MASKED_ATTENTION = ("sdpa", "eager")

# Model types that transformers loads with eager attention only, from some version on or always:
# sdpa has no soft cap (Gemma 2, from transformers 5.22) and no attention sinks (gpt-oss).
EAGER_ONLY = ("gemma2", "gpt_oss")

# Modules of a decoder that hold learned positions, which it adds to whatever it is given.
LEARNED_POSITIONS = ("wpe", "embed_positions")

# Attributes by which a decoder multiplies whatever it is given.
EMBEDDING_SCALES = ("embedding_multiplier",)
