"""The answers that calibration and certification run along, and batches of prompts for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

# From prompts, the longest answer and a temperature, 0 for greedy, to answers, as token ids.
Answers = Callable[[Sequence[Sequence[int]], int, float], list[list[int]]]


def pad_left(
    tokenizer: Any, prompts: Sequence[Sequence[int]], device: Any
) -> tuple[Tensor, Tensor]:
    """Ids and mask of a left-padded batch, `[sequences, longest]` each."""
    pad, width = pad_token(tokenizer), max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).to(ids)
    return ids, mask


def pad_token(tokenizer: Any) -> int:
    """The token that pads a batch: the tokenizer's, or any, since a mask covers it."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def self_answering(model: Any, tokenizer: Any) -> Answers:
    """Answers by `model.generate`."""

    def answers(
        prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
    ) -> list[list[int]]:
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        return answer(model, tokenizer, prompts, new_tokens, **options)

    return answers


def answer(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any
) -> list[list[int]]:
    """The model's answers to a batch of prompts, end-of-text token included."""
    ids, mask = pad_left(tokenizer, prompts, model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        pad_token_id=pad_token(tokenizer),
        **options,
    )
    ends = end_tokens(model)
    return [until_end(new, ends) for new in out[:, ids.shape[1] :].tolist()]


def end_tokens(model: Any) -> set[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])


def until_end(new: list[int], ends: Collection[int]) -> list[int]:
    """An answer without what stands behind its end."""
    stop = next((k + 1 for k, token in enumerate(new) if token in ends), len(new))
    return new[:stop]
