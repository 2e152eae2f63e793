"""The meaning of each operation, in torch alone.

They are custom operators, so a compiled graph holds each as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


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
    some = states
    chosen: Tensor | None = None
    if states.device.type == "cpu" and not wanted.all():
        chosen = wanted.nonzero().squeeze(1)
        some = states[chosen]
        if not len(chosen):
            return torch.zeros(count, dtype=torch.long), torch.zeros(count, 2 if scores else 0)
    tokens, tops = top_of(scaled(linear(some, weight, bias), multiplier, cap), scores)
    if chosen is None:
        return tokens, tops
    every = torch.zeros(count, dtype=torch.long).index_copy_(0, chosen, tokens)
    return every, torch.zeros(count, tops.shape[1]).index_copy_(0, chosen, tops)


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
