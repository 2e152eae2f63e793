"""Where two answers to one prompt differ first, and by how little the logits differ there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Difference:
    """The first token in which two answers differ.

    Attributes:
        place: how many new tokens come before it.
        ours, theirs: the tokens; None where an answer has ended.
        margin: by how much the model's logit of theirs exceeds that of ours; None at an end.
    """

    place: int
    ours: int | None
    theirs: int | None
    margin: float | None

    def line(self, tokenizer: Any, dtype: str) -> str:
        """In one line."""
        ours, theirs = (
            "nothing" if token is None else repr(tokenizer.decode([token]))
            for token in (self.ours, self.theirs)
        )
        margin = "" if self.margin is None else f"; their logits differ by {self.margin:.3g}"
        return (
            f"First difference at token {self.place + 1}: HF generate has {theirs}, TIDE has "
            f"{ours}{margin} ({dtype})."
        )


def first_difference(
    model: Any, prompt: torch.Tensor, ours: Sequence[int], theirs: Sequence[int]
) -> Difference | None:
    """Compare two answers; None if they are the same.

    Args:
        model: gives the logits at the difference, in one pass over the text before it.
        prompt: its token ids, [1, tokens].
        ours, theirs: new tokens.
    """
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    at = [tokens[place] if place < len(tokens) else None for tokens in (ours, theirs)]
    margin = None
    if None not in at:
        same = torch.tensor([list(ours[:place])], dtype=prompt.dtype, device=prompt.device)
        with torch.no_grad():
            logits = model(torch.cat([prompt, same], dim=1)).logits[0, -1].float()
        margin = float(logits[at[1]] - logits[at[0]])
    return Difference(place, at[0], at[1], margin)
