"""Gives the draft table: what the model most often says after the last tokens. No model inside."""

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
        budget: most bytes. What goes first is what a shorter n-gram says as well, then what was
            seen least.

    Returns:
        `keys_n`, the n-grams as numbers in base `vocabulary_size`, sorted; `next_n`, the follower
        of each; `chance_n`, that it is that one, from 0 to 255; and `vocabulary_size`.
    """
    arrays = [np.asarray(s, dtype=np.int64) for s in sequences]
    levels = {n: _followers(arrays, n, vocabulary_size) for n in (1, 2, 3)}
    kept = _within(budget // _ENTRY_BYTES, levels, vocabulary_size)
    tensors = {"vocabulary_size": torch.tensor(vocabulary_size)}
    for n, level in levels.items():
        keys, following, chance, _ = (column[kept[n]] for column in level)
        tensors[f"keys_{n}"] = torch.from_numpy(keys)
        tensors[f"next_{n}"] = torch.from_numpy(following.astype(np.int32))
        tensors[f"chance_{n}"] = torch.from_numpy(np.round(255 * chance).astype(np.uint8))
    return tensors


def _followers(arrays: list[np.ndarray], n: int, base: int) -> tuple[np.ndarray, ...]:
    """Sorted keys, the commonest follower of each, the chance that it follows, and its count."""
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
    # One more in the total: what was seen once is not certain.
    return key[last], pairs[1][order][last], count[last] / (totals + 1), count[last]


def _within(
    most: int, levels: dict[int, tuple[np.ndarray, ...]], base: int
) -> dict[int, np.ndarray]:
    """Which entries of each level stay so that at most `most` do."""
    rank = []
    for n, (keys, following, _, count) in levels.items():
        redundant = np.zeros(len(keys), bool)
        if n > 1 and len(keys):
            shorter, said, _, _ = levels[n - 1]
            # Every n-gram's end is an (n-1)-gram of the same sequences, so it is found.
            redundant = said[np.searchsorted(shorter, keys % base ** (n - 1))] == following
        rank.append((np.full(len(keys), n), np.arange(len(keys)), redundant, -count))
    level, place, redundant, rarity = (np.concatenate(column) for column in zip(*rank, strict=True))
    order = np.lexsort((place, level, rarity, redundant))[:most]
    return {n: np.sort(place[order][level[order] == n]) for n in levels}
