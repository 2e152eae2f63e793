"""Thresholds of a gate: how sure a checkpoint must be before a token exits there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of one checkpoint; a token exits if it passes all that are set.

    Attributes:
        router: least confidence of the router, which needs no logits.
        top_probability: least top probability of the exit head.
        confidence: least probability of being correct that the confidence model gives the token.
        prefilter: least probability of being correct by its candidates, for the head to be read.
    """

    router: float | None = None
    top_probability: float | None = None
    confidence: float | None = None
    prefilter: float | None = None

    def scaled(self, threshold_scale: float) -> Thresholds:
        """More or less aggressive: the tolerated chance of an error, times `threshold_scale`.

        All checkpoints move together, so thresholds are on one path: 1 is as calibrated, 0 lets
        only certain tokens exit.
        """

        def moved(threshold: float | None) -> float | None:
            return None if threshold is None else 1 - (1 - threshold) * threshold_scale

        return replace(
            self,
            top_probability=moved(self.top_probability),
            confidence=moved(self.confidence),
            prefilter=moved(self.prefilter),
        )

    @property
    def unreachable(self) -> bool:
        """Whether no token can pass: more than certainty is required."""
        return any(t is not None and t > 1 for t in asdict(self).values())
