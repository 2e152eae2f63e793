"""Gives what is known of model families, as rows of data.

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


# model_type -> row. Only consulted where Hugging Face's own accessors do not settle the question.
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

# Kinds of attention that `masks.py` can mask; anything else is refused.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Attention implementations that read an explicit 4-D mask.
MASKED_ATTENTION = ("sdpa", "eager")
