"""Gives the tensors of a pass: ragged tokens and states of rows as columns, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tide.decode.rows import Row
from tide.models.cache import WaterlineCache
from tide.models.depth import DepthRunner


def columns(
    rows: Sequence[Row], spans: Sequence[range], device: torch.device, *, left: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Token ids of spans of the rows, `[rows, longest]`, and what of it is not padding.

    Args:
        left: pad on the left, as prompts are.
    """
    width = max(len(span) for span in spans)
    ids, valid = [], []
    for row, span in zip(rows, spans, strict=True):
        tokens, missing = row.tokens[span.start : span.stop], width - len(span)
        padding, here = [0] * missing, [True] * len(tokens)
        ids.append(padding + tokens if left else tokens + padding)
        valid.append([False] * missing + here if left else here + [False] * missing)
    ragged = any(len(span) != width for span in spans)
    return (
        torch.tensor(ids, device=device),
        torch.tensor(valid, device=device) if ragged else None,
    )


def stack(states: Sequence[Tensor | None]) -> Tensor:
    """Ragged states of rows as `[rows, longest, hidden]`, zeros behind."""
    longest = max((s for s in states if s is not None), key=len)
    if all(s is not None and len(s) == len(longest) for s in states):
        return torch.stack([s for s in states if s is not None])
    out = longest.new_zeros(len(states), *longest.shape)
    for r, s in enumerate(states):
        if s is not None:
            out[r, : len(s)] = s
    return out


def finish_by_tail(
    runner: DepthRunner,
    cache: WaterlineCache,
    rows: Sequence[Row],
    layers: int,
    at: Sequence[tuple[int, int]],
    states: Tensor,
) -> Tensor:
    """Run only the last `layers` layers on some tokens; the deep pass overwrites their K and V.

    Args:
        at: row and position of each token.
        states: its state, `[n, hidden]`; so is what is returned.
    """
    by_row: list[list[int]] = [[] for _ in rows]  # indices into `at`
    for k, (r, _) in enumerate(at):
        by_row[r].append(k)
    shape = (len(rows), max(map(len, by_row)))
    ids = torch.zeros(shape, dtype=torch.long, device=runner.input_device)
    valid, positions = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    hidden = states.new_zeros(*shape, states.shape[-1])
    place: list[tuple[int, int]] = [(0, 0)] * len(at)
    for r, tokens in enumerate(by_row):
        for column, k in enumerate(tokens):
            place[k] = (r, column)
            ids[r, column] = rows[r].tokens[at[k][1]]
            positions[r, column], valid[r, column] = at[k][1], True
            hidden[r, column] = states[k]
    n = runner.n_layers
    out = runner.run(
        ids, n - layers, n, cache=cache, hidden=hidden, valid=valid, positions=positions,
        provisional=True,
    )  # fmt: skip
    return torch.stack([out[r, column] for r, column in place])
