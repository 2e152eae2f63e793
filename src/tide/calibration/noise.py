"""The noise floor: how often full depth differs from itself, in the model's own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from tide.calibration.answers import answer
from tide.errors import ConfigError


@torch.no_grad()
def noise_floor(
    model: Any, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> float:
    """How often full depth differs from itself when a text is read in one pass, not by token."""
    own = model.generation_config
    # Without the processors of its own generation config, which are no noise.
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
    try:
        answers = answer(model, tokenizer, encoded, new_tokens, do_sample=False)
    finally:
        model.generation_config = own
    differs = total = 0
    for prompt, ids in zip(encoded, answers, strict=True):
        if ids:
            text = torch.tensor([[*prompt, *ids]], device=model.device)
            # Logits over the whole text would take gigabytes at long contexts.
            logits = model(text, logits_to_keep=len(ids) + 1).logits[0, :-1]  # [new, vocabulary]
            again = logits.argmax(-1).tolist()
            differs += sum(a != b for a, b in zip(again, ids, strict=True))
            total += len(ids)
    return differs / max(total, 1)


def refuse_noise(floor: float, risks: Sequence[float], dtype: str) -> None:
    """Raise for risks below the noise floor of a dtype."""
    below = [risk for risk in risks if risk < floor]
    if below:
        raise ConfigError(
            f"In {dtype} this model's full depth differs from itself in {floor:.2%} of tokens when "
            f"a text is read in one pass and not token by token; a risk of {below[0]:.2%} is below "
            "that noise. Choose a higher risk, use float32, or pass force=True."
        )
