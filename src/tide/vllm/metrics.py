"""Prometheus metrics, in the registry that vLLM's server exports.

The model runs in its own process; `tide serve` lets vLLM collect the metrics of all processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge
from vllm.distributed import get_tp_group

from tide.stats import LayerCounts

_TOKENS = Counter("tide:tokens", "Decoded tokens by the layer after which they exited.", ["layer"])
_LAYERS = Counter("tide:token_layers", "Tokens times layers: run or saved.", ["done"])
_AUDITS = Counter("tide:audits", "Tokens audited at full depth, by verdict.", ["verdict"])
_DRAFTED = Counter("tide:drafted_tokens", "Tokens drafted.")
_ACCEPTED = Counter("tide:accepted_tokens", "Tokens drafted that vLLM accepted.")
_DRAFT_STEPS = Counter("tide:draft_steps", "Steps by what was decided on drafts.", ["decision"])
_DRIFT = Gauge(
    "tide:drift",
    "1 if exited tokens differ from full depth more often than certified.",
    multiprocess_mode="max",
)


class Metrics:
    """Exports what the forward pass counts.

    Args:
        counts: tokens run and filled, by layer; read after every pass.
        exits: tokens that exited after each layer; read after every pass.
    """

    def __init__(self, counts: LayerCounts, exits: Mapping[int, int]) -> None:
        self._counts, self._exits = counts, exits
        self._exports = get_tp_group().is_first_rank  # all ranks count the same
        self._before = (0, 0, dict[int, int]())

    def audit(self, verdict: str) -> None:
        """Count an audited token.

        Args:
            verdict: "same", "differs", or "continued" if no gate would have let it exit.
        """
        if self._exports:
            _AUDITS.labels(verdict).inc()

    def drift(self) -> None:
        """Record that the drift monitor has fired."""
        _DRIFT.set(1)

    def after_pass(self, decoded: int) -> None:
        """Export what was counted since the last call.

        Args:
            decoded: tokens of the pass that could have exited.
        """
        if not self._exports:
            return
        run, fills, exits = self._before
        now = sum(self._counts.tokens), sum(self._counts.fills), dict(self._exits)
        _LAYERS.labels("run").inc(now[0] - run)
        _LAYERS.labels("saved").inc(now[1] - fills)
        exited = 0
        for layer, tokens in now[2].items():
            new = tokens - exits.get(layer, 0)
            exited += new
            _TOKENS.labels(str(layer + 1)).inc(new)
        _TOKENS.labels("full").inc(decoded - exited)
        self._before = now


class DraftMetrics:
    """Exports what the proposer drafts."""

    def __init__(self) -> None:
        self._exports = get_tp_group().is_first_rank  # vLLM takes the drafts of the first

    def step(self, decision: str, drafted: int, accepted: int) -> None:
        """Count a step.

        Args:
            decision: "drafted", "no_draft_found", "does_not_pay", or "probe".
            drafted: tokens drafted in it.
            accepted: tokens accepted of those drafted in the step before.
        """
        if self._exports:
            _DRAFT_STEPS.labels(decision).inc()
            _DRAFTED.inc(drafted)
            _ACCEPTED.inc(accepted)
