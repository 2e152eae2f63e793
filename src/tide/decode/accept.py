"""Gives the rule by which a guessed token is accepted, so that the output is the full model's.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept(p: Tensor, guess: int | None, q: Tensor | None) -> int:
    """Draw a token from the full model's distribution, at best the guessed one.

    Accepts the guess with probability min(1, p / q), else draws from the normalised max(p - q, 0).
    A guess that was not drawn (an n-gram, a table entry) has q = 1: then this is a draw from p.

    Args:
        p: the full model's distribution, `[vocabulary]`.
        guess: the guessed token; None if there is none.
        q: the distribution that the guess was drawn from; None if it was not drawn.
    """
    if guess is None or q is None:
        return _draw(p)
    if torch.rand(()).item() * q[guess].item() < p[guess].item():
        return guess
    rest = (p - q.to(p.device)).clamp_min(0)
    # With rounding, p may nowhere exceed q although the guess was refused; p itself is then right.
    return _draw(rest if rest.sum() > 0 else p)


def _draw(weights: Tensor) -> int:
    return int(torch.multinomial(weights, 1).item())
