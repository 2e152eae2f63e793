"""Packing: ragged tokens and states of sequences as the padded tensors of a pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tide.decode.sequence import SequenceState
from tide.models.tokens import TokenBatch


def pack_tokens(
    sequences: Sequence[SequenceState],
    spans: Sequence[range],
    *,
    left: bool = False,
    notes: np.ndarray | None = None,
) -> TokenBatch:
    """Tokens of a span of each sequence, on the host.

    Args:
        left: pad on the left, as prompts are.
        notes: of the tokens, `[sequences, longest span, notes]`.
    """
    longest = max(len(span) for span in spans)
    ids, valid = [], []
    for sequence, span in zip(sequences, spans, strict=True):
        tokens, missing = sequence.tokens[span.start : span.stop], longest - len(span)
        padding, here = [0] * missing, [True] * len(tokens)
        ids.append(padding + tokens if left else tokens + padding)
        valid.append([False] * missing + here if left else here + [False] * missing)
    ragged = any(len(span) != longest for span in spans)
    return TokenBatch(
        torch.tensor(ids),
        torch.tensor(valid) if ragged else None,
        parents=_parents(sequences, spans, longest),
        notes=notes,
    )


def _parents(
    sequences: Sequence[SequenceState], spans: Sequence[range], longest: int
) -> np.ndarray | None:
    """Where in its span the token is that each follows; None without trees."""
    trees = [sequence.open_tree for sequence in sequences]
    if not any(tree is not None for tree in trees):
        return None
    parents = np.tile(np.arange(longest) - 1, (len(spans), 1))
    for i, (sequence, span) in enumerate(zip(sequences, spans, strict=True)):
        if (tree := trees[i]) is not None and span:
            # All of a tree is in a pass, behind tokens that may have waited.
            assert span.start < sequence.committed and span.stop == len(sequence.tokens)
            first = sequence.committed - span.start
            parents[i, first : len(span)] = np.array(tree.parents) + first
    return parents


def pack_states(states: Sequence[Tensor | None]) -> Tensor:
    """Ragged states of sequences as `[sequences, longest, hidden]`, zeros behind."""
    longest = max((s for s in states if s is not None), key=len)
    if all(s is not None and len(s) == len(longest) for s in states):
        return torch.stack([s for s in states if s is not None])
    out = longest.new_zeros(len(states), *longest.shape)
    for r, s in enumerate(states):
        if s is not None:
            out[r, : len(s)] = s
    return out
