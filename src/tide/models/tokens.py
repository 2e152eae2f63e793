"""The tokens of one pass: ids, which of them are padding, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

NOTES = 5  # whole numbers that are noted of a token


@dataclass(frozen=True)
class TokenBatch:
    """Tokens that run together, one line for each sequence, padded to one length.

    They are best kept on the host, where passes are planned.

    Attributes:
        ids: token ids, `[sequences, new_tokens]`.
        valid: False at padding, which may be on either end, `[sequences, new_tokens]`; None if
            there is none.
        positions: position of each token in its sequence, `[sequences, new_tokens]`; None for the
            positions after the tokens that have passed. Decides what a token attends to and where
            its KV goes.
        parents: where drafts are trees, the place in the pass of the token that each token follows,
            `[sequences, new_tokens]`; -1 for the first, which all others follow. None where each
            follows the one before it.
        notes: whole numbers for what follows the layers, `[sequences, new_tokens, NOTES]`; None for
            zeros. The first is 1 where something is wanted of a token.
    """

    ids: Tensor
    valid: Tensor | None = None
    positions: Tensor | None = None
    parents: np.ndarray | None = None
    notes: np.ndarray | None = None
