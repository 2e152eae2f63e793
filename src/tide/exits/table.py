"""The table of continuations that calibration has made. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_HOPELESS = 0.02
MOST_TOKENS = 2**21  # in a vocabulary: a number of three of them has 63 bits


class ContinuationTable:
    """Looks up the most frequent continuation of the last 3, 2, 1 tokens.

    The table is a set of sorted arrays, made by calibration from the model's own answers:
    `keys_n` holds the n-grams as numbers in base `vocabulary_size`, `next_n` the token after each,
    `chance_n` that it is that one.

    Args:
        tensors: `keys_n` int64, `next_n` int32 and `chance_n` uint8 of equal length for some n, and
            `vocabulary_size`, one number.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.base = int(tensors["vocabulary_size"])
        orders = sorted((int(k[5:]) for k in tensors if k.startswith("keys_")), reverse=True)
        self._levels = [
            (n, tensors[f"keys_{n}"].numpy(), tensors[f"next_{n}"].numpy(),
             tensors[f"chance_{n}"].numpy())
            for n in orders
        ]  # fmt: skip
        self.longest = max(orders, default=1)

    def propose(self, tokens: Sequence[int], limit: int) -> list[tuple[int, float]]:
        """Draft up to `limit` tokens that follow `tokens`, each with its chance.

        Ends where nothing is known, or where all of it is hardly likely to be accepted.
        """
        recent = list(tokens[-self.longest :])
        drafted: list[tuple[int, float]] = []
        all_accepted = 1.0
        while len(drafted) < limit and (found := self.next(recent)) is not None:
            all_accepted *= found[1]
            if all_accepted < _HOPELESS:
                break
            drafted.append(found)
            recent = [*recent, found[0]][-self.longest :]
        return drafted

    def next(self, recent: Sequence[int]) -> tuple[int, float] | None:
        """The most frequent follower of the longest known end of `recent`, and the chance of it."""
        for n, keys, following, chance in self._levels:
            if len(recent) >= n:
                key = 0
                for token in recent[-n:]:
                    key = key * self.base + token
                place = int(keys.searchsorted(key))
                if place < len(keys) and keys[place] == key:
                    return int(following[place]), float(chance[place]) / 255
        return None


def check_table(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless tensors are those of a table."""
    if not tensors:
        return
    base, orders = tensors.get("vocabulary_size"), [n for n in (1, 2, 3) if f"keys_{n}" in tensors]
    known = {f"{part}_{n}" for part in ("keys", "next", "chance") for n in orders}
    if set(tensors) != known | {"vocabulary_size"} or base is None:
        raise ValueError(f"the table has the tensors {sorted(tensors)!a:.200}")
    if base.dtype != torch.int64 or base.ndim or not 0 < int(base) <= MOST_TOKENS:
        raise ValueError(f"vocabulary_size of the table must be a number up to {MOST_TOKENS}")
    for n in orders:
        keys, following, chance = (tensors[f"{part}_{n}"] for part in ("keys", "next", "chance"))
        dtypes = (keys.dtype, following.dtype, chance.dtype)
        if dtypes != (torch.int64, torch.int32, torch.uint8) or keys.ndim != 1:
            raise ValueError(f"the table has other types or shapes for n = {n}")
        if not keys.shape == following.shape == chance.shape:
            raise ValueError(f"the tensors of the table for n = {n} differ in length")
        if len(keys) and (int(keys[0]) < 0 or not (keys[1:] > keys[:-1]).all()):
            raise ValueError(f"the keys of the table for n = {n} do not ascend from 0")
        if len(keys) and not (int(following.min()) >= 0 and int(following.max()) < int(base)):
            raise ValueError(f"the table continues with tokens outside of its {int(base)}")
