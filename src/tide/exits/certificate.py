"""The certificate: which risk is certified, how surely, and under which conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tide.exits.checkpoint import read_thresholds
from tide.strangers import (
    listed,
    mapping,
    number,
    optional,
    require_keys,
    share,
    shown,
    text,
    whole,
)

# What a certificate counts: by default, and where the caller has a loss of their own.
TOKEN_LOSS, TASK_LOSS = "tokens that differ from full depth", "task loss"


@dataclass(frozen=True)
class Certificate:
    """A certified bound: with probability 1 - `delta` the mean loss of a sequence is below `risk`.

    The loss of a sequence is the share of its tokens that differ from full depth's prediction at
    that position, unless `loss` names another. The bound holds for sequences like those it was
    tested on, under the same conditions.

    Attributes:
        risk, delta: the bound.
        threshold_scale: how far the calibrated thresholds are moved; see `Thresholds.scaled`.
        thresholds: what they then are, for each checkpoint by its layer.
        sequences: how many it was tested on.
        estimate: their mean loss.
        p_value: of "the mean loss is above the risk".
        test: which test that is of.
        loss: what was counted: `TOKEN_LOSS`, or `TASK_LOSS` with a loss of the caller's.
        model: fingerprint of the model.
        exits: digest of the exit heads, thresholds, vocabulary and table.
        min_layers: exits below this depth were not used.
        dtype: precision of the model.
        kv_cache_strategy: how KV of exited tokens was made.
        batch: sequences decoded together.
        generation: options of `generate`.
        data: fingerprint of the prompts.
        tide: version of the library.
    """

    risk: float
    delta: float
    threshold_scale: float
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
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Certificate:
        """From JSON values; unknown or missing keys, and values that cannot be, raise."""
        require_keys(values, {field.name for field in fields(cls)}, "a certificate")
        for name, check in _CHECKS.items():
            check(values[name], f"{name} of a certificate")
        for layer, thresholds in values["thresholds"].items():
            if not layer.isdecimal():
                raise ValueError(f"a certificate has thresholds for layer {shown(layer)}")
            read_thresholds(thresholds, f"the thresholds of a certificate for layer {layer}")
        if not 0 < values["risk"] < 1 or not 0 < values["delta"] < 1:
            raise ValueError("risk and delta of a certificate must be between 0 and 1")
        generation = values["generation"]
        for limit in ("max_new_tokens", "max_prompt"):
            optional(whole)(generation.get(limit), f"{limit} of a certificate")
        listed(generation.get("logits_processors", []), "logits_processors of a certificate", text)
        return cls(**values)


def _texts(value: Any, what: str) -> None:
    mapping(value, what, text)


# What each value must be; risk and delta moreover neither 0 nor 1.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("risk", "delta", "estimate", "p_value"), share),
    **dict.fromkeys(("sequences", "min_layers", "batch"), whole),
    **dict.fromkeys(("test", "loss", "exits", "dtype", "kv_cache_strategy", "data", "tide"), text),
    **dict.fromkeys(("thresholds", "generation"), mapping),
    "threshold_scale": lambda value, what: number(value, what, 0),
    "model": _texts,
}
