"""Gives the draft table: what the model most often says after the last tokens. No model inside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def build_table(sequences: Sequence[Sequence[int]], vocabulary_size: int) -> dict[str, Tensor]:
    """The most frequent follower of every 1 to 3-gram of `sequences`, as tensors.

    Returns:
        `keys_n`, the n-grams as numbers in base `vocabulary_size`, sorted; `next_n`, the follower
        of each; and `vocabulary_size`.
    """
    tensors = {"vocabulary_size": torch.tensor(vocabulary_size)}
    for n in (1, 2, 3):
        keys, nexts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for sequence in sequences:
            tokens = np.asarray(sequence, dtype=np.int64)
            if len(tokens) > n:
                key = np.zeros(len(tokens) - n, np.int64)
                for offset in range(n):
                    key = key * vocabulary_size + tokens[offset : len(tokens) - n + offset]
                keys.append(key)
                nexts.append(tokens[n:])
        pairs, counts = np.unique(
            np.stack([np.concatenate(keys), np.concatenate(nexts)]), axis=1, return_counts=True
        )
        # Pairs are sorted by key; within a key, the last of equal counts wins.
        order = np.lexsort((counts, pairs[0]))
        last = np.flatnonzero(np.diff(pairs[0][order], append=-1))
        tensors[f"keys_{n}"] = torch.from_numpy(pairs[0][order][last].copy())
        tensors[f"next_{n}"] = torch.from_numpy(pairs[1][order][last].astype(np.int32))
    return tensors
