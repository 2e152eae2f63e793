"""Gives the choice of a token from logits, with transformers' own processors and criteria."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tide.decode.accept import accept
from tide.decode.rows import Row


class Chooser:
    """Chooses tokens as `generate` would: processors, then argmax or a draw; then criteria.

    Args:
        rows: all rows of the batch as given; processors see the whole batch, as in `generate`.
        processors: transformers' prepared logits processors.
        criteria: transformers' prepared stopping criteria.
        sample: draw, instead of taking the largest.
    """

    def __init__(
        self, rows: Sequence[Row], processors: Any, criteria: Any, *, sample: bool
    ) -> None:
        self.rows, self.processors, self.criteria, self.sample = rows, processors, criteria, sample

    def scores(self, at: Sequence[tuple[Row, int]], logits: Tensor) -> Tensor:
        """Processed scores for the token after each position, `[n, vocabulary]`."""
        if not self.processors:
            return logits
        logits = logits.float()
        out = torch.empty_like(logits)
        lengths = [row.padding + position + 1 for row, position in at]
        for length in sorted(set(lengths)):
            # One call for all rows at this length. The others are there for their number only.
            seen = torch.stack([row.context[:length] for row in self.rows]).to(logits.device)
            wide = logits.new_zeros(len(self.rows), logits.shape[1])
            here = [k for k, other in enumerate(lengths) if other == length]
            # A row may stand at one length only once, since its positions differ.
            places = [at[k][0].index for k in here]
            wide[places] = logits[here]
            out[here] = self.processors(seen, wide)[places]
        return out

    def probabilities(self, scores: Tensor) -> Tensor | None:
        """Distributions to draw from; None where nothing is drawn."""
        return scores.float().softmax(-1) if self.sample else None

    def best(self, scores: Tensor) -> list[int]:
        """The likeliest token of each."""
        return scores.argmax(-1).tolist()

    def draw(self, probabilities: Tensor, guess: int | None, q: Tensor | None) -> int:
        """A token drawn from the distribution, `[vocabulary]`; the guess, where it may stand."""
        return accept(probabilities, guess, q)

    def ends(self, row: Row) -> bool:
        """Whether `row` ends with its last settled token."""
        return bool(self.criteria(row.seen_at(row.settled - 1), None).all())
