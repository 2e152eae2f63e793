"""The meaning of each operation, in torch alone.

They are custom operators, so a compiled graph holds each as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

_GROUP = 32  # logits of which one maximum is taken


def scaled(logits: Tensor, multiplier: float, cap: float) -> Tensor:
    """Logits times a factor, and softly capped; no cap if it is 0."""
    if multiplier != 1:
        logits = logits * multiplier
    if cap:
        logits = torch.tanh(logits / cap) * cap
    return logits


def top_of(logits: Tensor, scores: bool) -> tuple[Tensor, Tensor]:
    """The largest of logits, `[n, v]`, and log-probabilities, as `top_token` returns them."""
    tokens = logits.argmax(-1)
    if not scores:
        return tokens, torch.zeros(len(logits), 0, device=logits.device)
    logits = logits.float()
    return tokens, logits.topk(2, dim=-1).values - logits.logsumexp(-1, keepdim=True)


def successors_of(logits: Tensor, count: int) -> Tensor:
    """The likeliest token, and the `count` likeliest, `[n, v]` to `[n, 1 + count]`.

    Among equals, the first is the one that `argmax` takes.
    """
    best, size = logits.argmax(-1, keepdim=True), logits.shape[-1]
    if size % _GROUP or size < _GROUP * count:
        return torch.cat([best, logits.topk(count).indices], -1)
    # The largest are in the groups that have the largest maxima: a maximum costs less than a sort.
    groups = logits.unflatten(-1, (_GROUP, size // _GROUP))  # [n, _GROUP, groups]
    found = groups.amax(-2).topk(count).indices  # [n, count]
    some = groups.gather(-1, found[:, None].expand(-1, _GROUP, -1)).flatten(1)
    inside = some.topk(count).indices
    top = inside // count * (size // _GROUP) + found.gather(-1, inside % count)
    return torch.cat([best, top], -1)


@torch.library.custom_op("tide::top_token", mutates_args=())
def top_token(
    states: Tensor,
    wanted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiplier: float,
    cap: float,
    scores: bool,
) -> tuple[Tensor, Tensor]:
    """The likeliest token of each state that is wanted. On a CPU, the others cost nothing.

    Args:
        states: normed, `[n, hidden]`.
        wanted: boolean, `[n]`.
        weight, bias: of the head, `[v, hidden]` and `[v]`.
        multiplier: of the logits.
        cap: soft cap of the logits; 0 for none.
        scores: whether log-probabilities are wanted.

    Returns:
        The number of the token, `[n]`, and the log-probabilities of the first and the second,
        `[n, 2]` (`[n, 0]` without scores); both 0 where not wanted.
    """
    count = len(states)
    some, chosen = _only(states, wanted)
    if not len(some):
        return torch.zeros(count, dtype=torch.long), torch.zeros(count, 2 if scores else 0)
    tokens, tops = top_of(scaled(linear(some, weight, bias), multiplier, cap), scores)
    if chosen is None:
        return tokens, tops
    every = torch.zeros(count, dtype=torch.long).index_copy_(0, chosen, tokens)
    return every, torch.zeros(count, tops.shape[1]).index_copy_(0, chosen, tops)


def _only(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """The states that are wanted and which they are; None for all, as always beside a CPU."""
    if states.device.type != "cpu" or wanted.all():
        return states, None
    chosen = wanted.nonzero().squeeze(1)
    return states[chosen], chosen


@top_token.register_fake
def _(
    states: Tensor,
    wanted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiplier: float,
    cap: float,
    scores: bool,
) -> tuple[Tensor, Tensor]:
    return (
        states.new_empty(states.shape[0], dtype=torch.long),
        states.new_empty(states.shape[0], 2 if scores else 0, dtype=torch.float32),
    )


@torch.library.custom_op("tide::top_successors", mutates_args=())
def top_successors(
    states: Tensor,
    wanted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[float],
    count: int,
) -> Tensor:
    """As `successors_of`, of each state that is wanted, `[n, 1 + count]`; 0 where not wanted.

    Args:
        states, wanted, weight, bias: as `top_token` takes them.
        scales: factor and soft cap of the logits.
        count: how many successors.
    """
    some, chosen = _only(states, wanted)
    every = torch.zeros(len(states), 1 + count, dtype=torch.long, device=states.device)
    if not len(some):
        return every
    found = successors_of(scaled(linear(some, weight, bias), *scales), count)
    return found if chosen is None else every.index_copy_(0, chosen, found)


@top_successors.register_fake
def _(
    states: Tensor,
    wanted: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[float],
    count: int,
) -> Tensor:
    return states.new_empty(states.shape[0], 1 + count, dtype=torch.long)
