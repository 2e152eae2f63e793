"""Gives the choice of a token from logits, with transformers' own processors and criteria.

A draw is made as `torch.multinomial` makes it: the likeliest token after dividing the probabilities
by exponential noise. The noise belongs to the row and the place of the token, and is drawn in the
order in which `generate` draws it. So whoever says the token at a place, an exit head or the full
model, divides by the same noise: a guess is right where full depth draws the same token, and the
output is the full model's own draw whatever was guessed. With the same seed, it is what `generate`
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tide.decode.rows import Row


class Chooser:
    """Chooses tokens as `generate` would: processors, then argmax or a draw; then criteria.

    Args:
        contexts: tokens of all rows as `generate` sees them, `[rows, room]`; rows share it.
        device: where `generate` shows tokens and scores to processors and criteria.
        processors: transformers' prepared logits processors.
        criteria: transformers' prepared stopping criteria.
        sample: draw, instead of taking the likeliest.
    """

    def __init__(
        self,
        contexts: Tensor,
        device: torch.device,
        processors: Any,
        criteria: Any,
        *,
        sample: bool,
    ) -> None:
        self.contexts, self.device = contexts, device
        self.processors, self.criteria, self.sample = processors, criteria, sample
        self._noise: dict[int, Tensor] = {}  # by place in the context, [rows, vocabulary]
        self._next_noise: int | None = None

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is taken as it is."""
        return not self.processors and not self.sample

    def scores(self, at: Sequence[tuple[Row, int]], logits: Tensor) -> Tensor:
        """Processed scores for the token after each position, `[n, vocabulary]`."""
        if not self.processors:
            return logits
        logits = logits.to(self.device, torch.float32)
        out = torch.empty_like(logits)
        lengths = [row.padding + position + 1 for row, position in at]
        for length in sorted(set(lengths)):
            # One call for all rows at this length. The others are there for their number only.
            wide = logits.new_zeros(len(self.contexts), logits.shape[1])
            here = [k for k, other in enumerate(lengths) if other == length]
            places = [at[k][0].index for k in here]
            wide[places] = logits[here]
            out[here] = self.processors(self.contexts[:, :length].to(self.device), wide)[places]
        return out

    def pick(self, at: Sequence[tuple[Row, int]], scores: Tensor) -> list[int]:
        """The token after each position, from its processed scores, `[n, vocabulary]`."""
        if self.sample:
            noise = torch.stack([self._noise_at(row, i, scores) for row, i in at])
            scores = scores.float().softmax(-1) / noise
        return scores.argmax(-1).tolist()

    def ends(self, row: Row) -> bool:
        """Whether `row` ends with its last settled token."""
        length = row.padding + row.settled
        return bool(self.criteria(self.contexts[:, :length].to(self.device), None)[row.index])

    def forget(self, rows: Sequence[Row]) -> None:
        """Drop noise that no row will ask for again."""
        # Tokens that left early are said once more, by full depth, when they are checked.
        asked = [row.padding + min(row.early, default=row.settled - 1) + 1 for row in rows]
        first = min(asked, default=0)
        self._noise = {place: noise for place, noise in self._noise.items() if place >= first}

    def _noise_at(self, row: Row, position: int, like: Tensor) -> Tensor:
        """The noise for the token after a position, `[vocabulary]`."""
        place = row.padding + position + 1
        if self._next_noise is None:
            self._next_noise = place  # of all rows, since they are padded on the left
        while self._next_noise <= place:
            shape = (len(self.contexts), like.shape[1])
            self._noise[self._next_noise] = torch.empty(shape, device=like.device).exponential_()
            self._next_noise += 1
        return self._noise[place][row.index]
