"""Gives prefill with per-token exit: prompt tokens that are settled stop, the rest are compacted.

A token that stops writes K and V in the layers above from the state in which it left. The others
attend to all keys and go on alone, so what is saved is computed less. Where decoding goes on from
the prompts, the last token of every row goes to full depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as cache_function

import torch
from torch import Tensor

from tide.config import TIDEConfig
from tide.decode.exits import Exits
from tide.exits.hints import Hint, RowHints
from tide.exits.policy import Place
from tide.models.cache import WaterlineCache
from tide.models.depth import DepthRunner


@dataclass
class Prefilled:
    """What a prefill leaves behind.

    Attributes:
        last: the last layer's output for the last token of every row, `[rows, hidden]`; empty with
            logits, where that token may leave too.
        depths: layers that each column passed, `[rows, columns]`; 0 for padding.
        logits: of every column, `[rows, columns, vocabulary]`; None unless asked for.
    """

    last: Tensor
    depths: Tensor
    logits: Tensor | None


@dataclass
class _Running:
    """The tokens that have not left, compacted to the front: `[rows, most in a row, ...]`."""

    columns: Tensor  # column of each in the batch as given
    valid: Tensor
    hidden: Tensor


@torch.no_grad()
def prefill(
    runner: DepthRunner,
    exits: Exits,
    config: TIDEConfig,
    cache: WaterlineCache,
    ids: Tensor,
    valid: Tensor,
    rows: Sequence[int],
    *,
    with_logits: bool = False,
) -> Prefilled:
    """Run prompts, `ids` and `valid` `[rows, columns]`, through all layers, letting tokens leave.

    Args:
        rows: the number of each row in the batch as given, for the policy.
        with_logits: read every token, where it left or at full depth, over the whole vocabulary: a
            score needs the logit of a token that the exit heads do not read while decoding.
    """
    n = runner.n_layers
    segments = exits.segments(n)
    places = (valid.cumsum(1) - 1).clamp_min(0)  # [rows, columns]
    final = valid & (places == places.amax(1, keepdim=True)) & (not with_logits)
    depths = torch.where(valid, n, 0)
    logits: Tensor | None = None
    if with_logits:
        shape = (*ids.shape, exits.readout.size)
        logits = torch.zeros(shape, dtype=runner.model.dtype, device=ids.device)

    @cache_function
    def hints(row: int) -> list[Hint]:
        """Of every token of a prompt; a policy may do without."""
        tokens, found = ids[row][valid[row]].tolist(), RowHints(exits.table)
        return [found.at(tokens, at, at + 1) for at in range(len(tokens))]

    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first = runner.run(ids, *segments[0], cache=cache, valid=valid)
    running = _Running(columns, valid, first)
    for segment, (_, hi) in enumerate(segments[:-1]):
        may_leave = running.valid & ~final.gather(1, running.columns)
        leaves = _ask(exits, segment, running, may_leave, places, rows, hints)
        if int(leaves.sum()) > config.compaction_threshold * int(running.valid.sum()):
            gone, running = _split(running, leaves)
            at = gone.columns
            runner.fill_kv(
                ids.gather(1, at), hi, n, cache=cache, hidden=gone.hidden, valid=gone.valid,
                positions=places.gather(1, at),
            )  # fmt: skip
            row, k = gone.valid.nonzero(as_tuple=True)
            depths[row, at[row, k]] = hi
            if logits is not None:
                lifted = exits.checkpoints[segment].head.lift(gone.hidden[row, k])
                logits[row, at[row, k]] = runner.logits(lifted).to(logits)
            if not running.valid.any():
                break
        at = running.columns
        running.hidden = runner.run(
            ids.gather(1, at), *segments[segment + 1], cache=cache, hidden=running.hidden,
            valid=running.valid, positions=places.gather(1, at),
        )  # fmt: skip
    if logits is not None:
        row, k = running.valid.nonzero(as_tuple=True)
        full = runner.logits(running.hidden[row, k])
        logits[row, running.columns[row, k]] = full.to(logits)
    ends = final.gather(1, running.columns) & running.valid
    return Prefilled(running.hidden[ends], depths, logits)


def _ask(
    exits: Exits,
    segment: int,
    running: _Running,
    may_leave: Tensor,
    places: Tensor,
    rows: Sequence[int],
    hints: Callable[[int], list[Hint]],
) -> Tensor:
    """Who leaves, boolean as `may_leave`."""
    row, k = may_leave.nonzero(as_tuple=True)
    leaves = torch.zeros_like(may_leave)
    if not len(row):
        return leaves
    hidden = running.hidden[row, k]
    positions = places[row, running.columns[row, k]].tolist()
    asked = [Place(rows[r], p) for r, p in zip(row.tolist(), positions, strict=True)]
    head = exits.checkpoints[segment].head

    def read(chosen: Sequence[int]) -> Tensor:
        return exits.readout(head.lift(hidden[list(chosen)]))

    def hint(chosen: Sequence[int]) -> list[Hint]:
        return [hints(int(row[i]))[positions[i]] for i in chosen]

    decision = exits.policy.decide(segment, hidden, asked, read, hint, with_logits=False)
    left = torch.tensor(decision.leaves, dtype=torch.long, device=row.device)
    leaves[row[left], k[left]] = True
    return leaves


def _split(running: _Running, leaves: Tensor) -> tuple[_Running, _Running]:
    """Those that leave and those that stay, each compacted to the front of its row."""

    def compact(mask: Tensor) -> _Running:
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        order = order[:, : int(mask.sum(1).max())]
        wide = order[..., None].expand(-1, -1, running.hidden.shape[-1])
        return _Running(
            running.columns.gather(1, order),
            mask.gather(1, order),
            running.hidden.gather(1, wide),
        )

    return compact(leaves), compact(running.valid & ~leaves)
