"""The tokens of one pass: ids, which of them are padding, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Tokens that run together, one line for each sequence, padded to one length.

    Attributes:
        ids: token ids, `[sequences, new_tokens]`.
        valid: False at padding, which may be on either end, `[sequences, new_tokens]`; None if
            there is none.
        positions: position of each token in its sequence, `[sequences, new_tokens]`; None for the
            positions after the tokens that have passed. Decides what a token attends to and where
            its KV goes.
    """

    ids: Tensor
    valid: Tensor | None = None
    positions: Tensor | None = None

    def zero_padding(self, hidden: Tensor) -> Tensor:
        """`hidden`, `[sequences, new_tokens, hidden]`, with zeros at padding.

        Padding may hold anything, and a NaN would spread through the masked KV.
        """
        if self.valid is None:
            return hidden
        return hidden.masked_fill(~self.valid.bool()[..., None].to(hidden.device), 0)
