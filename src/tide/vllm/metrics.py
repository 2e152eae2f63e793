"""Gives counters for Prometheus, in the registry that vLLM's server hands out.

The model runs in a process of its own; `tide serve` lets vLLM collect from all its processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge
from vllm.distributed import get_tp_group

if TYPE_CHECKING:
    from tide.vllm.depth import DepthForward

_TOKENS = Counter("tide:tokens", "Tokens decoded, by the layer after which they left.", ["layer"])
_LAYERS = Counter("tide:token_layers", "Layers times tokens, by what was done.", ["done"])
_AUDITS = Counter("tide:audits", "Tokens sent to full depth to be checked.", ["verdict"])
_DRIFT = Gauge(
    "tide:drift", "1 if early tokens differ more often than promised.", multiprocess_mode="max"
)


class Metrics:
    """Hands on what a forward pass has counted."""

    def __init__(self, of: DepthForward) -> None:
        self._of = of
        self._counts = get_tp_group().is_first_rank  # ranks do the same; one speaks for all
        self._before = (0, 0, dict[int, int]())

    def audit(self, verdict: str) -> None:
        """One token checked: "same", "differs", or "stayed" if its gates would not let it leave."""
        if self._counts:
            _AUDITS.labels(verdict).inc()

    def drift(self) -> None:
        """The watch has fired."""
        _DRIFT.set(1)

    def after_pass(self, decoded: int) -> None:
        """What the counters have gained since the last call.

        Args:
            decoded: tokens of the pass that might have left.
        """
        if not self._counts:
            return
        run, fills, exits = self._before
        counts = self._of.counts
        now = sum(counts.tokens), sum(counts.fills), dict(self._of.exits)
        _LAYERS.labels("run").inc(now[0] - run)
        _LAYERS.labels("saved").inc(now[1] - fills)
        early = 0
        for layer, tokens in now[2].items():
            gained = tokens - exits.get(layer, 0)
            early += gained
            _TOKENS.labels(str(layer + 1)).inc(gained)
        _TOKENS.labels("full").inc(decoded - early)
        self._before = now
