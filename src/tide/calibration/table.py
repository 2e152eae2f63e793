"""The draft table: the most frequent next token after each n-gram. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

_ENTRY_BYTES = 8 + 4 + 1  # key, follower, chance


def build_table(
    sequences: Iterable[Sequence[int]], vocabulary_size: int, *, budget: int = 4 << 20
) -> dict[str, Tensor]:
    """The most frequent follower of every 1 to 3-gram of `sequences`, as tensors.

    Args:
        budget: most bytes. Entries that a shorter n-gram predicts as well are dropped first, then
            the rarest.

    Returns:
        `keys_n`, the n-grams as numbers in base `vocabulary_size`, sorted; `next_n`, the follower
        of each; `chance_n`, the probability of that follower, from 0 to 255; and
        `vocabulary_size`.
    """
    arrays = [np.asarray(s, dtype=np.int64) for s in sequences]
    levels = {n: _followers(arrays, n, vocabulary_size) for n in (1, 2, 3)}
    kept = _within(budget // _ENTRY_BYTES, levels, vocabulary_size)
    tensors = {"vocabulary_size": torch.tensor(vocabulary_size)}
    for n, level in levels.items():
        keys, following, chance, _ = (values[kept[n]] for values in level)
        tensors[f"keys_{n}"] = torch.from_numpy(keys)
        tensors[f"next_{n}"] = torch.from_numpy(following.astype(np.int32))
        tensors[f"chance_{n}"] = torch.from_numpy(np.round(255 * chance).astype(np.uint8))
    return tensors


def _followers(arrays: list[np.ndarray], n: int, base: int) -> tuple[np.ndarray, ...]:
    """Sorted keys, the most frequent follower of each, its probability, and its count."""
    keys, nexts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for tokens in arrays:
        if len(tokens) > n:
            key = np.zeros(len(tokens) - n, np.int64)
            for offset in range(n):
                key = key * base + tokens[offset : len(tokens) - n + offset]
            keys.append(key)
            nexts.append(tokens[n:])
    pairs, counts = np.unique(
        np.stack([np.concatenate(keys), np.concatenate(nexts)]), axis=1, return_counts=True
    )
    # Pairs are sorted by key; within a key, the last of equal counts wins.
    order = np.lexsort((counts, pairs[0]))
    key, count = pairs[0][order], counts[order]
    last = np.flatnonzero(np.diff(key, append=-1))
    totals = np.add.reduceat(count, np.r_[0, last[:-1] + 1]) if len(last) else count
    # One more in the total: a follower seen once is not certain.
    return key[last], pairs[1][order][last], count[last] / (totals + 1), count[last]


def _within(
    most: int, levels: dict[int, tuple[np.ndarray, ...]], base: int
) -> dict[int, np.ndarray]:
    """The entries of each level to keep, at most `most` in all."""
    rank = []
    for n, (keys, following, _, count) in levels.items():
        redundant = np.zeros(len(keys), bool)
        if n > 1 and len(keys):
            shorter, predicted, _, _ = levels[n - 1]
            # The end of every n-gram is an (n-1)-gram of the same sequences, so it is in `shorter`.
            redundant = predicted[np.searchsorted(shorter, keys % base ** (n - 1))] == following
        rank.append((np.full(len(keys), n), np.arange(len(keys)), redundant, -count))
    level, index, redundant, rarity = (np.concatenate(part) for part in zip(*rank, strict=True))
    order = np.lexsort((index, level, rarity, redundant))[:most]
    return {n: np.sort(index[order][level[order] == n]) for n in levels}
