"""The tokens of a forward pass that have not exited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class ActiveTokens:
    """Tokens that run together.

    Attributes:
        tokens: their indices in the pass, ascending, `[t]`.
        positions, hidden: theirs.
        context: vLLM's forward context for them.
        residual: what vLLM's layers carry next to the hidden state; their sum is the state.
        exit_states: if attention runs for all tokens, the states of those that exited,
            `[all, hidden]`; else None.
        all_positions: then, the positions of all tokens.
        some_exited: then, whether any has exited.
    """

    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    context: Any
    residual: Tensor | None = None
    exit_states: Tensor | None = None
    all_positions: Tensor | None = None
    some_exited: bool = False

    @classmethod
    def all_of(cls, hidden: Tensor, positions: Tensor, context: Any) -> ActiveTokens:
        """All tokens of a pass, before its first layer."""
        return cls(torch.arange(len(hidden), device=hidden.device), positions, hidden, context)

    def states(self, places: Tensor | slice = slice(None)) -> Tensor:
        """The states of some of them."""
        hidden = self.hidden[places]
        return hidden if self.residual is None else hidden + self.residual[places]

    def keep(self, which: Tensor) -> ActiveTokens:
        """Those where `which`, `[t]`, is true."""
        return replace(
            self,
            tokens=self.tokens[which],
            positions=self.positions[which],
            hidden=self.hidden[which],
            residual=None if self.residual is None else self.residual[which],
        )
