"""The confidence model: from what is known of a predicted token to the chance that it is correct.

Its features come from several scorers: the exit head itself, the router, the sequence's own text
and the draft table. None of them alone is sure as often as all of them together; the figures are in
docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tide.kernels.arguments import CANDIDATE_FEATURES
from tide.kernels.arithmetic import confidence_features

# What a confidence model may look at, and how many numbers each gives.
FEATURES = {"head": 2, "router": 1, "context": 3, "table": 2, "candidates": CANDIDATE_FEATURES}
WITH_HEAD = ("head", "router", "context", "table")  # once the exit head is read


class ConfidenceModel(nn.Module):
    """A small network over features.

    Args:
        features: names of the features it looks at, from `FEATURES`.
        width: size of its hidden layer.
    """

    def __init__(self, features: tuple[str, ...] = WITH_HEAD, width: int = 16) -> None:
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
    names: Sequence[str], tops: Tensor, tokens: Tensor, router: Tensor | None, ngrams: Tensor
) -> Tensor:
    """Features of predicted tokens, `[n, size]`.

    Args:
        names: the features wanted.
        tops: log-probabilities of the exit head's first and second token, `[n, 2]`.
        tokens: the exit head's predictions, as token ids, `[n]`.
        router: the router's logits, `[n]`; None if there is no router.
        ngrams: what n-grams predict, `[n, 4]`: an `NGramPrediction`, its chance in 255ths.
    """
    every = confidence_features(tokens, tops, router, ngrams)
    if set(names) == set(WITH_HEAD):
        return every
    parts = zip(WITH_HEAD, every.split([FEATURES[name] for name in WITH_HEAD], -1), strict=True)
    return torch.cat([part for name, part in parts if name in names], dim=-1)
