"""A checkpoint of an artifact: the parts of one exit, and how they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tide.config import EXIT_STRATEGIES
from tide.exits.confidence import WITH_HEAD, ConfidenceModel
from tide.exits.heads import ExitHead
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.strangers import (
    listed,
    mapping,
    number,
    optional,
    require_keys,
    shown,
    text,
    whole,
)

# The two confidence models that a checkpoint may have, and the features that each may look at.
_MODELS = {"confidence_model": WITH_HEAD, "prefilter": ("candidates",)}
MOST_HIDDEN, MOST_LAYERS = 2**20, 10_000  # far above any model's


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
    index: int, entry: Any, hidden_size: int, tensors: dict[str, Tensor]
) -> Checkpoint:
    """The checkpoint that an entry of the header describes; takes its tensors out of `tensors`."""
    where = f"checkpoint {index}"
    require_keys(entry, {"layer", "strategy", "router", "thresholds", *_MODELS}, where)
    if entry["strategy"] not in EXIT_STRATEGIES:
        raise ValueError(f"unknown exit strategy {shown(entry['strategy'])} at {where}")
    # Without memory: how large they are is only what the header claims.
    with torch.device("meta"):
        head = ExitHead(entry["strategy"], hidden_size)
        router = None
        if entry["router"] is not None:
            require_keys(entry["router"], {"bottleneck"}, f"the router of {where}")
            bottleneck = entry["router"]["bottleneck"]
            router = TokenRouter(
                hidden_size, whole(bottleneck, f"the bottleneck of {where}", 1, MOST_HIDDEN)
            )
        made: dict[str, ConfidenceModel | None] = dict.fromkeys(_MODELS)
        for part, allowed in _MODELS.items():
            if entry[part] is not None:
                require_keys(entry[part], {"features"}, f"the {part} of {where}")
                made[part] = ConfidenceModel(_features(entry[part]["features"], allowed, where))
    for part, module in (("head", head), ("router", router), *made.items()):
        if module is not None:
            prefix = f"checkpoints.{index}.{part}."
            names = [name for name in tensors if name.startswith(prefix)]
            state = {name.removeprefix(prefix): tensors.pop(name).clone() for name in names}
            _check_weights(state, f"the {part} of {where}")
            module.load_state_dict(state, assign=True)  # raises on a missing tensor or wrong shape
            module.requires_grad_(False)
    thresholds = read_thresholds(entry["thresholds"], f"the thresholds of {where}")
    for name, module in (("router", router), ("confidence", made["confidence_model"]),
                         ("prefilter", made["prefilter"])):  # fmt: skip
        if module is None and getattr(thresholds, name) is not None:
            raise ValueError(f"{where} has a {name} threshold, and nothing that it is for")
    layer = whole(entry["layer"], f"the layer of {where}", 0, MOST_LAYERS - 1)
    return Checkpoint(layer, head, router, thresholds, **made)


def read_thresholds(entry: Any, what: str) -> Thresholds:
    """Thresholds from JSON values."""
    require_keys(entry, set(Thresholds.__match_args__), what)
    mapping(entry, what, optional(number))
    return Thresholds(**entry)


def _features(names: Any, allowed: tuple[str, ...], where: str) -> tuple[str, ...]:
    found = tuple(listed(names, f"the features of {where}", text))
    if not found or len(set(found)) != len(found) or not set(found) <= set(allowed):
        raise ValueError(f"the features of {where} are {shown(found)}; allowed are {allowed}")
    return found


def _check_weights(state: Mapping[str, Tensor], what: str) -> None:
    """Raise unless weights can be computed with."""
    dtypes = {tensor.dtype for tensor in state.values()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        found = sorted(map(str, dtypes))
        raise ValueError(f"{what} has tensors of {found}; allowed is one type of 16 or 32 bits")
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{what} has a weight in {shown(name)} that is not a finite number")
    if "spread" in state and not (state["spread"] > 0).all():
        raise ValueError(f"{what} has a spread that is not above 0")
