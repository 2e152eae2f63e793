"""A checkpoint of an artifact: the parts of one exit, and how they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tide.config import EXIT_STRATEGIES
from tide.exits.confidence import ConfidenceModel
from tide.exits.heads import ExitHead
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds

_MODELS = ("confidence_model", "prefilter")


@dataclass
class Checkpoint:
    """One exit: the layer after which it sits (from 0), its head, and its gate.

    Attributes:
        layer: tokens may exit after it.
        head: from the state there to logits.
        router: scores states without logits; None if there is none.
        thresholds: of the gate.
        confidence_model: of the gate; None if there is none.
        prefilter: decides by candidates whether the head is read; None if there is none.
    """

    layer: int
    head: ExitHead
    router: TokenRouter | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    confidence_model: ConfidenceModel | None = None
    prefilter: ConfidenceModel | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move it to where it is evaluated; only the head takes the model's dtype."""
        self.head.to(device, dtype)
        for scorer in (self.router, self.confidence_model, self.prefilter):
            if scorer is not None:
                scorer.to(device)

    def header(self) -> dict[str, Any]:
        """What is not a tensor, as JSON values."""
        return {
            "layer": self.layer,
            "strategy": self.head.strategy,
            "router": None if self.router is None else {"bottleneck": self.router.up.in_features},
            "thresholds": asdict(self.thresholds),
            **{
                part: None if (model := getattr(self, part)) is None
                else {"features": list(model.features)}
                for part in _MODELS
            },
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The weights of its parts, by name."""
        parts = {part: getattr(self, part) for part in ("head", "router", *_MODELS)}
        return {
            f"{part}.{name}": tensor
            for part, module in parts.items()
            if module is not None
            for name, tensor in module.state_dict().items()
        }


def read_checkpoint(
    number: int, entry: Any, hidden_size: int, tensors: dict[str, Tensor]
) -> Checkpoint:
    """The checkpoint that an entry of the header describes; takes its tensors out of `tensors`."""
    where = f"checkpoint {number}"
    require_keys(entry, {"layer", "strategy", "router", "thresholds", *_MODELS}, where)
    require_keys(entry["thresholds"], set(Thresholds.__match_args__), f"the thresholds of {where}")
    if entry["strategy"] not in EXIT_STRATEGIES:
        raise ValueError(f"unknown exit strategy {entry['strategy']!r} at {where}")
    head = ExitHead(entry["strategy"], hidden_size)
    router = None
    if entry["router"] is not None:
        require_keys(entry["router"], {"bottleneck"}, f"the router of {where}")
        router = TokenRouter(hidden_size, int(entry["router"]["bottleneck"]))
    made: dict[str, ConfidenceModel | None] = dict.fromkeys(_MODELS)
    for part in _MODELS:
        if entry[part] is not None:
            require_keys(entry[part], {"features"}, f"the {part} of {where}")
            made[part] = ConfidenceModel(tuple(entry[part]["features"]))
    for part, module in (("head", head), ("router", router), *made.items()):
        if module is not None:
            prefix = f"checkpoints.{number}.{part}."
            names = [name for name in tensors if name.startswith(prefix)]
            state = {name.removeprefix(prefix): tensors.pop(name) for name in names}
            module.load_state_dict(state)  # strict: raises on a missing or unknown tensor
            module.to(next(iter(state.values())).dtype if state else torch.float32)
            module.requires_grad_(False)
    thresholds = Thresholds(**entry["thresholds"])
    return Checkpoint(int(entry["layer"]), head, router, thresholds, **made)


def require_keys(entry: Any, allowed: set[str], what: str) -> None:
    """Raise unless an entry of the header has exactly the keys allowed."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"{what} is a {type(entry).__name__}, not an object")
    if set(entry) != allowed:
        unknown, missing = sorted(set(entry) - allowed), sorted(allowed - set(entry))
        raise ValueError(f"{what} has unknown keys {unknown} and lacks {missing}")
