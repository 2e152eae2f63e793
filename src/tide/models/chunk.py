"""A chunk: where the tokens of one pass go in the KV buffers. Knows slots, not layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tide.config import MOST_NODES
from tide.errors import RangeError
from tide.models.tokens import NOTES, TokenBatch


@dataclass(frozen=True)
class Places:
    """What the device knows of the tokens of a pass.

    Attributes:
        packed: whole numbers, `[sequences, new_tokens, numbers]`: id, position, first slot of the
            sequence and own slot of each token, the last slot up to which it attends to all, and
            to which of the next 64 it attends as well, one bit each; then what the `TokenBatch`
            noted of it.
    """

    packed: Tensor

    @property
    def ids(self) -> Tensor:
        """Token ids, `[sequences, new_tokens]`."""
        return self.packed[..., 0]

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, `[sequences, new_tokens]`; 0 for padding."""
        return self.packed[..., 1]

    @property
    def starts(self) -> Tensor:
        """First slot of each token's sequence, `[sequences, new_tokens]`."""
        return self.packed[..., 2]

    @property
    def slots(self) -> Tensor:
        """Where KV of each token goes, `[sequences, new_tokens]`; padding goes to a spare slot."""
        return self.packed[..., 3]

    @property
    def reaches(self) -> Tensor:
        """Last slot up to which each token attends to all, `[sequences, new_tokens]`.

        Its own; in a draft tree, that of the token that the tree follows.
        """
        return self.packed[..., 4]

    @property
    def ancestors(self) -> Tensor:
        """To which of the 64 slots behind that each token attends, `[sequences, new_tokens]`.

        Bits of a number: in a draft tree the token's own and those of the nodes that it follows.
        """
        return self.packed[..., 5]

    @property
    def notes(self) -> Tensor:
        """What was noted of each token, `[sequences, new_tokens, NOTES]`."""
        return self.packed[..., 6:]

    def without_notes(self) -> Tensor:
        """The same with zeros in place of notes."""
        packed = self.packed.clone()
        packed[..., 6:] = 0
        return packed


@dataclass
class Chunk:
    """One pass as the cache sees it: the same slots in every layer `[lo, hi)`.

    Attributes:
        places: of its tokens, on the device.
        new_ends: waterline of each sequence after the pass.
        tokens: tokens in the pass, without padding.
        spare: the slot to which padding is written; nothing reads it.
        block: the slots as one slice, where all sequences write the same ones; otherwise None.
        causal: no padding and no gaps anywhere, so the model may make its own causal mask.
        tree: some sequence has a draft tree in it.
        lo, hi: the layers that the pass runs.
        fill: whether the layers are to write KV and do no more.
    """

    places: Places
    new_ends: tuple[int, ...]
    tokens: int
    spare: int
    block: slice | None
    causal: bool
    tree: bool = False
    lo: int = 0
    hi: int = 0
    fill: bool = False

    @property
    def key_slots(self) -> int:
        """How many slots of the buffers the attention of this pass reads."""
        return max(self.new_ends)

    def zero_padding(self, hidden: Tensor) -> Tensor:
        """`hidden`, `[sequences, new_tokens, hidden]`, with zeros at padding.

        Padding may hold anything, and a NaN would spread through the masked KV.
        """
        if self.tokens == hidden.shape[0] * hidden.shape[1]:
            return hidden
        padding = (self.places.slots == self.spare)[..., None]
        return hidden.masked_fill(padding.to(hidden.device), 0)


def host_mask(tokens: TokenBatch) -> np.ndarray:
    """What of the tokens is not padding, on the host, `[sequences, new_tokens]`."""
    if tokens.valid is None:
        return np.ones(tuple(tokens.ids.shape), bool)
    return tokens.valid.bool().cpu().numpy()


def plan_chunk(
    tokens: TokenBatch,
    mask: np.ndarray,
    starts: Sequence[int],
    ends: Sequence[int],
    device: torch.device,
) -> Chunk:
    """Give every token its slot.

    All is planned on the host, so that a pass costs one small copy to the device.

    Args:
        tokens: of the pass.
        mask: from `host_mask`.
        starts: first slot of each sequence.
        ends: slot after the last token of each sequence.
        device: where the pass starts.
    """
    new_tokens = mask.shape[1]
    padded = not mask.all()
    first = np.array(starts)[:, None]  # [sequences, 1]
    if tokens.positions is None:
        slots = np.array(ends)[:, None] + mask.cumsum(1) - 1  # [sequences, new_tokens]
    else:
        slots = first + tokens.positions.cpu().numpy()
    new_ends = tuple(map(max, ends, (np.where(mask, slots, -1).max(1) + 1).tolist()))
    spare = last = max(new_ends)
    block = tokens.positions is None and len(set(new_ends)) == 1
    if padded:
        # Left-padded prompts fall into place as a block: their padding lands before the sequence's
        # first slot.
        left_padded = (np.sort(mask, 1) == mask).all()
        empty = tuple(ends) == tuple(starts)
        block = bool(block and left_padded and empty and last >= new_tokens)
    positions, reaches, ancestors = slots - first, slots, np.zeros_like(slots)
    if tokens.parents is not None:
        depths, before, ancestors = _tree(tokens.parents, mask)
        positions = positions[:, :1] + depths
        reaches = np.minimum(slots, np.take_along_axis(slots, before[:, None], 1))
    parts = [
        tokens.ids.cpu().numpy(),
        np.where(mask, positions, 0),
        np.broadcast_to(first, mask.shape),
        np.where(mask, slots, spare),
        np.where(mask, reaches, first),
        np.where(mask, ancestors, 0),
    ]
    packed = np.zeros((*mask.shape, len(parts) + NOTES), np.int64)
    for number, part in enumerate(parts):
        packed[..., number] = part
    if tokens.notes is not None:
        packed[..., len(parts) :] = tokens.notes
    return Chunk(
        Places(upload(packed, device)),
        new_ends,
        tokens=int(mask.sum()),
        spare=spare,
        block=slice(last - new_tokens, last) if block else None,
        causal=block and not padded and not any(starts) and tokens.parents is None,
        tree=tokens.parents is not None,
    )


def _tree(parents: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of draft trees, each behind tokens that follow one another.

    Returns:
        Depth of each token below the first; for each sequence, the last token that all behind it
        follow; and as bits the tokens from there to each of those.
    """
    sequences, new_tokens = parents.shape
    places = np.arange(new_tokens)
    branches = (parents != places - 1) & mask
    before = np.where(branches, parents, mask.sum(1)[:, None] - 1).min(1)
    nodes = (mask & (places > before[:, None])).sum(1).max()
    if nodes > MOST_NODES:
        raise RangeError(f"Got a tree of {nodes} nodes; it may have {MOST_NODES}.")
    depths = np.zeros(parents.shape, np.int64)
    ancestors = np.zeros(parents.shape, np.uint64)
    lines = np.arange(sequences)
    for k in range(1, new_tokens):
        parent, node = parents[:, k], k - before - 1
        depths[:, k] = depths[lines, parent] + 1
        own = np.uint64(1) << node.clip(0, MOST_NODES - 1).astype(np.uint64)
        ancestors[:, k] = np.where(node < 0, 0, ancestors[lines, parent] | own)
    return depths, before, ancestors.view(np.int64)


def upload(packed: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device; on CUDA the host does not wait until it has arrived."""
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
