"""Gives the router: from a hidden state to the confidence that the token is settled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Cheap features of the exit head, where it is computed anyway.
FEATURES = ("top_probability", "margin", "agrees_with_previous")


class TokenRouter(nn.Module):
    """Norm, down to a bottleneck, SiLU, up to one, sigmoid.

    Fitting and decoding both call this, on the raw hidden state at the checkpoint, so a router is
    always scored on exactly what it was trained on.

    Args:
        hidden_size: size of the hidden state.
        bottleneck: size of the hidden layer.
        features: names of the exit-head features it also sees, from `FEATURES`.
    """

    def __init__(self, hidden_size: int, bottleneck: int, features: tuple[str, ...] = ()) -> None:
        super().__init__()
        strange = [name for name in features if name not in FEATURES]
        if strange:
            raise ValueError(f"unknown router features {strange}; allowed are {list(FEATURES)}")
        self.features = tuple(features)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.down = nn.Linear(hidden_size + len(features), bottleneck)
        self.up = nn.Linear(bottleneck, 1)

    def forward(self, hidden: Tensor, features: Tensor | None = None) -> Tensor:
        """Confidence between 0 and 1, `[n, hidden]` and `[n, features]` to `[n]`."""
        return torch.sigmoid(self.logit(hidden, features))

    def logit(self, hidden: Tensor, features: Tensor | None = None) -> Tensor:
        """The confidence before the sigmoid, for fitting."""
        states = self.norm(hidden)
        if self.features:
            if features is None:
                raise ValueError(f"this router was fitted with features {self.features}")
            states = torch.cat([states, features.to(states.dtype)], dim=-1)
        return self.up(nn.functional.silu(self.down(states))).squeeze(-1)


def head_features(names: tuple[str, ...], logits: Tensor, previous: list[int] | None) -> Tensor:
    """Features of an exit head's logits, `[n, v]` to `[n, len(names)]`.

    Args:
        previous: argmax of the previous checkpoint's head for the same tokens, -1 where it was not
            read; None at the first checkpoint.
    """
    before = torch.tensor([-1] * len(logits) if previous is None else previous)
    top = logits.float().softmax(-1).topk(2, dim=-1)
    columns = {
        "top_probability": top.values[:, 0],
        "margin": top.values[:, 0] - top.values[:, 1],
        "agrees_with_previous": (top.indices[:, 0] == before.to(logits.device)).float(),
    }
    return torch.stack([columns[name] for name in names], dim=-1)
