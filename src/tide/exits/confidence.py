"""The confidence model: from what is known of a predicted token to the chance that it is correct.

Its features come from several scorers: the exit head itself, the router, the sequence's own text
and the draft table. None of them alone is sure as often as all of them together; the figures are in
docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tide.exits.ngrams import NGramPrediction

# What a confidence model may look at, and how many numbers each gives.
FEATURES = {"head": 2, "router": 1, "context": 3, "table": 2}


class ConfidenceModel(nn.Module):
    """A small network over features.

    Args:
        features: names of the features it looks at, from `FEATURES`.
        width: size of its hidden layer.
    """

    def __init__(self, features: tuple[str, ...] = tuple(FEATURES), width: int = 16) -> None:
        super().__init__()
        unknown = [name for name in features if name not in FEATURES]
        if unknown:
            raise ValueError(f"unknown features {unknown}; allowed are {list(FEATURES)}")
        self.features = tuple(features)
        self.mean: Tensor
        self.spread: Tensor
        size = sum(FEATURES[name] for name in features)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))
        self.down = nn.Linear(size, width)
        self.up = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Chance that the token is correct, `[n, size]` to `[n]`."""
        return torch.sigmoid(self.logit(features))

    def logit(self, features: Tensor) -> Tensor:
        """The same before the sigmoid, for fitting."""
        scaled = (features - self.mean) / self.spread
        return self.up(nn.functional.silu(self.down(scaled))).squeeze(-1)


def gather_features(
    names: Sequence[str],
    logits: Tensor,
    tokens: Sequence[int],
    router: Tensor | None,
    predictions: Sequence[NGramPrediction],
) -> Tensor:
    """Features of predicted tokens, `[n, size]`.

    Args:
        names: the features wanted.
        logits: of the exit head, `[n, v]`.
        tokens: the exit head's predictions, as token ids.
        router: the router's logits, `[n]`; None if there is no router.
        predictions: by n-grams, at each token's position.
    """
    parts: list[Tensor] = []
    if "head" in names:
        top = logits.float().log_softmax(-1).topk(2, dim=-1).values  # [n, 2]
        surest = top[:, 0].clamp_max(-1e-6)
        parts.append((surest - torch.log(-torch.expm1(surest))).clamp(-10, 10))
        parts.append((top[:, 0] - top[:, 1]).clamp_max(10))
    if "router" in names:
        parts.append(logits.new_zeros(len(tokens)) if router is None else router.float())
    votes: list[list[float]] = []
    for token, predicted in zip(tokens, predictions, strict=True):
        of_token: list[float] = []
        if "context" in names:
            vote = _vote(token, predicted.context)
            of_token += [vote * (predicted.matched == n) for n in (3, 2, 1)]
        if "table" in names:
            vote = _vote(token, predicted.table)
            of_token += [max(vote, 0.0) * predicted.chance, max(-vote, 0.0) * predicted.chance]
        votes.append(of_token)
    device = logits.device
    from_ngrams = torch.tensor(votes, device=device)  # [n, votes]
    return torch.cat([*(part.to(device)[:, None] for part in parts), from_ngrams], dim=1)


def _vote(token: int, other: int) -> float:
    """1 if two predictions agree, -1 if not, 0 if there is no other."""
    return 0.0 if other < 0 else 1.0 if token == other else -1.0
