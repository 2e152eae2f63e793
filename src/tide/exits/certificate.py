"""Gives the certificate: which risk holds, how surely, and under which conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Certificate:
    """A promise: with probability 1 - `delta` the mean loss of a sequence is at most `risk`.

    The loss of a sequence is the share of its tokens that differ from what full depth would have
    said at that point, unless it says otherwise. The promise holds for sequences like those it was
    tested on, under the same conditions.

    Attributes:
        risk, delta: the promise.
        boldness: how far the calibrated thresholds are moved; see `Gate.at`.
        thresholds: what they then are, for each checkpoint by its layer.
        sequences: how many it was tested on.
        estimate: their mean loss.
        p_value: of "the mean loss is above the risk".
        test: which test that is of.
        loss: what was counted.
        model: fingerprint of the model.
        exits: digest of the exit heads, gates, vocabulary and table.
        min_layers: exits below this depth were not used.
        dtype: precision of the model.
        kv_cache_strategy: how K and V of early tokens were made.
        batch: rows decoded together.
        generation: options of `generate`.
        data: fingerprint of the prompts.
        tide: version of the library.
    """

    risk: float
    delta: float
    boldness: float
    thresholds: dict[str, dict[str, float | None]]
    sequences: int
    estimate: float
    p_value: float
    test: str
    loss: str
    model: dict[str, str]
    exits: str
    min_layers: int
    dtype: str
    kv_cache_strategy: str
    batch: int
    generation: dict[str, Any]
    data: str
    tide: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Certificate:
        """From plain JSON; strange or missing keys raise."""
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            strange, missing = sorted(set(values) - known), sorted(known - set(values))
            raise ValueError(f"a certificate has unknown keys {strange} and lacks {missing}")
        return cls(**values)

    def misses(
        self,
        risk: float,
        delta: float,
        exits: str,
        dtype: str,
        kv_cache_strategy: str,
        layers: Sequence[int] | None = None,
    ) -> list[str]:
        """Why it does not cover a request; empty if it does.

        Args:
            layers: after which the exits are that are used; None to use those that are certified.
        """
        mine = [int(layer) for layer in self.thresholds]
        reasons = (
            (self.risk > risk, f"is for risk {self.risk}"),
            (self.delta > delta, f"is for delta {self.delta}"),
            (self.exits != exits, "is for other exits"),
            (self.dtype != dtype, f"is for dtype {self.dtype}"),
            (
                self.kv_cache_strategy != kv_cache_strategy,
                f"is for kv_cache_strategy {self.kv_cache_strategy}",
            ),
            (
                layers is not None and mine != list(layers),
                f"is for min_layers {self.min_layers}",
            ),
        )
        return [reason for holds, reason in reasons if holds]
