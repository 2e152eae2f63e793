"""A calibrated exit exported as a model of its own, for speculation with a draft model.

The exit head is folded into the LM head. For a norm without a shift, logits are
`W diag(w) y / rms(y)` with `y = x + A x + b`; the scale does not change which is largest, so
`W diag(w) (I + A)` after a norm of `x` without weights predicts the same token, except for the
constant `b`, which cannot be folded and is dropped.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tide.errors import ArtifactError, UnsupportedModelError
from tide.exits.artifact import Artifact
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate, text_config


@torch.no_grad()
def export_draft(model: Any, made: Artifact, layers: int, out: Path) -> float:
    """Write the first `layers` layers and their exit as a model of the same family.

    Args:
        model: the causal language model.
        made: its artifact.
        layers: depth of the exit.
        out: folder to write.

    Returns:
        The share of the model's weights that a draft token reads.

    Raises:
        ArtifactError: if the artifact is for another model, or has no exit at that depth.
        UnsupportedModelError: if the exit head cannot be folded into the LM head.
    """
    parts = locate(model)
    made.require(fingerprint(model, parts))
    exits = {c.layer + 1: c for c in made.checkpoints}
    if layers not in exits:
        raise ArtifactError(
            f"There is no exit after {layers} layers; there are exits after {sorted(exits)}."
        )
    weight: Any = parts.norm.weight
    expected = torch.nn.functional.rms_norm(weight, weight.shape, weight, 1e-6)
    if not torch.allclose(parts.norm(weight), expected, rtol=1e-2):
        raise UnsupportedModelError(
            "This model's final norm is not x / rms(x) * weight, so the exit head cannot be folded "
            "into its LM head. Use the exits or the table instead."
        )
    config = copy.deepcopy(text_config(model))
    config.num_hidden_layers, config.tie_word_embeddings = layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    draft = type(model)(config).to(model.dtype)
    kept = {k: v for k, v in model.state_dict().items() if k in draft.state_dict()}
    draft.load_state_dict(kept, strict=False)
    head = parts.head.weight.float() * weight.float()
    affine = exits[layers].head.affine
    if affine is not None:
        head = head + head @ affine.weight.float().to(head)
    target = locate(draft)
    target.head.weight.copy_(head)  # type: ignore[operator]
    target.norm.weight.fill_(1.0)  # type: ignore[operator]
    draft.save_pretrained(out)
    read = sum(p.numel() for p in draft.parameters()) - draft.get_input_embeddings().weight.numel()
    whole = sum(p.numel() for p in parts.layers.parameters()) + parts.head.weight.numel()  # type: ignore
    return read / whole
