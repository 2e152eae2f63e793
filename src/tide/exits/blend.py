"""Gives the blend: from what several judges say of a token to the chance that it is right.

The judges: the exit head itself, the router, the row's own text and the draft table. None of them
alone is sure as often as all of them together; the figures are in docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tide.exits.hints import Hint

# What a blend may look at, and how many numbers each gives.
OPINIONS = {"head": 2, "router": 1, "context": 3, "table": 2}


class Blend(nn.Module):
    """A small network over opinions.

    Args:
        features: names of the opinions it looks at, from `OPINIONS`.
        width: size of its hidden layer.
    """

    def __init__(self, features: tuple[str, ...] = tuple(OPINIONS), width: int = 16) -> None:
        super().__init__()
        strange = [name for name in features if name not in OPINIONS]
        if strange:
            raise ValueError(f"unknown opinions {strange}; allowed are {list(OPINIONS)}")
        self.features = tuple(features)
        self.mean: Tensor
        self.spread: Tensor
        size = sum(OPINIONS[name] for name in features)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))
        self.down = nn.Linear(size, width)
        self.up = nn.Linear(width, 1)

    def forward(self, opinions: Tensor) -> Tensor:
        """Chance that the token is right, `[n, size]` to `[n]`."""
        return torch.sigmoid(self.logit(opinions))

    def logit(self, opinions: Tensor) -> Tensor:
        """The same before the sigmoid, for fitting."""
        scaled = (opinions - self.mean) / self.spread
        return self.up(nn.functional.silu(self.down(scaled))).squeeze(-1)


def gather_opinions(
    names: Sequence[str],
    logits: Tensor,
    tokens: Sequence[int],
    router: Tensor | None,
    hints: Sequence[Hint],
) -> Tensor:
    """What the judges say, `[n, size]`.

    Args:
        names: the opinions wanted.
        logits: of the exit head, `[n, v]`.
        tokens: what the exit head says, as token ids.
        router: the router's logits, `[n]`; None if there is no router.
        hints: of each token's place.
    """
    columns: list[Tensor] = []
    if "head" in names:
        top = logits.float().log_softmax(-1).topk(2, dim=-1).values  # [n, 2]
        surest = top[:, 0].clamp_max(-1e-6)
        columns.append((surest - torch.log(-torch.expm1(surest))).clamp(-10, 10))
        columns.append((top[:, 0] - top[:, 1]).clamp_max(10))
    if "router" in names:
        columns.append(logits.new_zeros(len(tokens)) if router is None else router.float())
    rows: list[list[float]] = []
    for token, hint in zip(tokens, hints, strict=True):
        row: list[float] = []
        if "context" in names:
            row += [_vote(token, hint.context) * (hint.matched == n) for n in (3, 2, 1)]
        if "table" in names:
            vote = _vote(token, hint.table)
            row += [max(vote, 0.0) * hint.chance, max(-vote, 0.0) * hint.chance]
        rows.append(row)
    device = logits.device
    votes = torch.tensor(rows, device=device)  # [n, votes]
    return torch.cat([*(column.to(device)[:, None] for column in columns), votes], dim=1)


def _vote(token: int, other: int) -> float:
    """1 if two judges agree, -1 if not, 0 if the other says nothing."""
    return 0.0 if other < 0 else 1.0 if token == other else -1.0
