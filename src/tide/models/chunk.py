"""A chunk: where the tokens of one pass go in the KV buffers. Knows slots, not layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tide.models.tokens import TokenBatch


@dataclass
class Chunk:
    """Where the tokens of one pass go: the same slots in every layer `[lo, hi)`.

    Attributes:
        new_ends: waterline of each sequence after the pass.
        tokens: tokens in the pass, without padding.
        starts: first slot of each sequence, `[sequences, 1]`.
        slots: slot of each token, `[sequences, new_tokens]`; of padding, the sequence's first slot.
        block: the slots as one slice, where all sequences write the same ones; otherwise None.
        index: (sequence, place in the pass, slot) of each token, `[tokens]` each; None where
            `block` is set.
        causal: no padding and no gaps anywhere, so the model may make its own causal mask.
        lo, hi: the layers that the pass runs.
        fill: whether the layers are to write KV and do no more.
    """

    new_ends: tuple[int, ...]
    tokens: int
    starts: Tensor
    slots: Tensor
    block: slice | None
    index: tuple[Tensor, ...] | None
    causal: bool
    lo: int = 0
    hi: int = 0
    fill: bool = False

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, `[sequences, new_tokens]`."""
        return self.slots - self.starts

    @property
    def key_slots(self) -> int:
        """How many slots of the buffers the attention of this pass reads."""
        return max(self.new_ends)


def host_mask(tokens: TokenBatch) -> np.ndarray:
    """What of the tokens is not padding, on the host, `[sequences, new_tokens]`."""
    if tokens.valid is None:
        return np.ones(tuple(tokens.ids.shape), bool)
    return tokens.valid.bool().cpu().numpy()


def plan_chunk(
    tokens: TokenBatch, mask: np.ndarray, starts: Sequence[int], ends: Sequence[int]
) -> Chunk:
    """Give every token its slot.

    Args:
        tokens: of the pass.
        mask: from `host_mask`. All is planned on the host, so that a pass costs one small copy to
            the device.
        starts: first slot of each sequence.
        ends: slot after the last token of each sequence.
    """
    new_tokens, device = mask.shape[1], tokens.ids.device
    padded = not mask.all()
    first = np.array(starts)[:, None]  # [sequences, 1]
    if tokens.positions is None:
        slots = np.array(ends)[:, None] + mask.cumsum(1) - 1  # [sequences, new_tokens]
    else:
        slots = first + tokens.positions.cpu().numpy()
    new_ends = tuple(map(max, ends, (np.where(mask, slots, -1).max(1) + 1).tolist()))
    last = max(new_ends)
    block = tokens.positions is None and len(set(new_ends)) == 1
    if padded:
        slots = np.where(mask, slots, first)
        # Left-padded prompts fall into place as a block: their padding lands before the sequence's
        # first slot.
        left_padded = (np.sort(mask, 1) == mask).all()
        empty = tuple(ends) == tuple(starts)
        block = bool(block and left_padded and empty and last >= new_tokens)
    index = None
    if not block:
        where = np.nonzero(mask)
        index = torch.from_numpy(np.stack([*where, slots[where]])).to(device).unbind()
    return Chunk(
        new_ends,
        tokens=int(mask.sum()),
        starts=torch.from_numpy(first).to(device),
        slots=torch.from_numpy(slots).to(device),
        block=slice(last - new_tokens, last) if block else None,
        index=index,
        causal=block and not padded and not any(starts),
    )
