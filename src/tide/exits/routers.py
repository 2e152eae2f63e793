"""The router: from a hidden state to the confidence that the token's prediction has converged."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TokenRouter(nn.Module):
    """Norm, down to a bottleneck, SiLU, up to one, sigmoid.

    Fitting and decoding both call this, on the raw hidden state at the checkpoint, so a router is
    always scored on exactly what it was trained on. The exit head's logits are features of
    `ConfidenceModel`.

    Args:
        hidden_size: size of the hidden state.
        bottleneck: size of the hidden layer.
    """

    def __init__(self, hidden_size: int, bottleneck: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.down = nn.Linear(hidden_size, bottleneck)
        self.up = nn.Linear(bottleneck, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Confidence between 0 and 1, `[n, hidden]` to `[n]`."""
        return torch.sigmoid(self.logit(hidden))

    def logit(self, hidden: Tensor) -> Tensor:
        """The confidence before the sigmoid, for fitting."""
        return self.up(nn.functional.silu(self.down(self.norm(hidden)))).squeeze(-1)
