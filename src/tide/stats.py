"""Gives counters of what really ran.

Knows nothing of models: whoever calls a layer counts it here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LayerCounts:
    """How often each layer ran, and for how many tokens; padding is not a token.

    Attributes:
        calls: full calls of each layer.
        tokens: tokens that passed each layer in those calls.
        fills: tokens for which a layer wrote only K and V.
    """

    calls: list[int]
    tokens: list[int]
    fills: list[int]

    @classmethod
    def zeros(cls, n_layers: int) -> LayerCounts:
        """Counters for a model of `n_layers` layers, all at zero."""
        return cls([0] * n_layers, [0] * n_layers, [0] * n_layers)

    def reset(self) -> None:
        """Set every counter back to zero."""
        for counter in (self.calls, self.tokens, self.fills):
            counter[:] = [0] * len(counter)
