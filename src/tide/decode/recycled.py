"""Recycled predictions: what full depth lately predicted after a token, to draft from.

A pass that verifies drafts predicts what follows each of them, accepted or not. The likeliest
tokens after each are kept, to be drafted when the same token comes again (Luo et al., "Turning
Trash into Treasure: Token Recycling", 2024). They are kept where trees are grown, on the host, and
come with the copy that brings the predictions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tide.exits.heads import TargetHead
from tide.kernels.arguments import Head
from tide.kernels.arithmetic import successors_of
from tide.kernels.operators import top_successors
from tide.models.runner import logit_scales, scale_logits

SUCCESSORS = 8  # tokens kept after each


class RecycledPredictions:
    """The likeliest successors of tokens, and of pairs of tokens, as full depth last had them.

    Args:
        most: pairs remembered. The older half is forgotten at once. Of single tokens there are no
            more than the vocabulary has.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._half = most // 2
        self._tokens: dict[int, Sequence[int]] = {}
        self._pairs: dict[tuple[int, int], Sequence[int]] = {}
        self._old_pairs: dict[tuple[int, int], Sequence[int]] = {}

    def learn(self, before: int, token: int, successors: Sequence[int]) -> None:
        """Remember what may follow `token`, which came after `before`."""
        self._tokens[token] = successors
        self._pairs[before, token] = successors
        if len(self._pairs) > self._half:
            self._old_pairs, self._pairs = self._pairs, {}

    def after(self, before: int, token: int) -> tuple[Sequence[int], Sequence[int]]:
        """What may follow the pair, and what may follow `token` whatever was before it."""
        pair = (before, token)
        found = self._pairs.get(pair) or self._old_pairs.get(pair) or ()
        return found, self._tokens.get(token, ())


class SuccessorHead(TargetHead):
    """What follows full depth: the tokens that it predicts, and the likeliest successors."""

    def forward(self, states: Tensor, notes: Tensor) -> Tensor:
        """The token after each that is wanted, then its likeliest successors.

        Takes what `TargetHead.forward` takes.

        Returns:
            `[sequences, tokens, 1 + SUCCESSORS]`.
        """
        readout = self.readout
        normed, wanted = readout.norm(states.flatten(0, 1)), (notes[..., 0] != 0).flatten()
        weight, bias = readout.linear_head()
        if weight is None:
            logits = scale_logits(readout.config, readout.head(normed))
            found = successors_of(logits, SUCCESSORS)
        else:
            normed, wanted = normed.to(weight.device), wanted.to(weight.device)
            head = Head(weight, bias, *logit_scales(readout.config))
            found = top_successors(normed, wanted, head, SUCCESSORS)
        return found.unflatten(0, states.shape[:2])
