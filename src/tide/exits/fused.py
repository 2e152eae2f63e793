"""A gate as fused operations: the decisions of `ExitGate`, in at most four launches on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tide.exits.confidence import FEATURES, ConfidenceModel
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.kernels.arguments import CONFIDENCE_FEATURES, Confidence, Head, Norm, Router
from tide.kernels.dispatch import fused
from tide.kernels.operators import confirm_exits, exit_transform, score_exits


class FusedGate:
    """What `ExitGate` computes, by the operations of `tide.kernels`.

    Args:
        head: of the checkpoint.
        readout: whose norm and head operations can take; see `Readout.fused`.
        thresholds: a token exits if it passes all that are set.
        router, confidence_model: None where there is none.
    """

    def __init__(
        self,
        head: ExitHead,
        readout: Readout | None,
        thresholds: Thresholds,
        router: TokenRouter | None,
        confidence_model: ConfidenceModel | None,
    ) -> None:
        self.affine = head.affine
        self.router = Router() if router is None else router_arguments(router, thresholds.router)
        self.confidence = Confidence()
        if confidence_model is not None and thresholds.confidence is not None:
            self.confidence = confidence_arguments(confidence_model, thresholds.confidence)
        self.top_probability = thresholds.top_probability or 0.0
        self.readout = readout

    @property
    def usable(self) -> bool:
        """Whether norm and head are still what they were: a hook may have come since."""
        return self.readout is None or self.readout.fused is not None

    def __call__(self, states: Tensor, notes: Tensor) -> Tensor:
        """Decide for tokens, `[n, hidden]` and `[n, NOTES]`: a packed decision, `[n, 3]`."""
        none = states.new_empty(len(states), 0, dtype=torch.float32)
        found = None if self.readout is None else self.readout.fused
        norm, head = found or (Norm(), Head(states))
        decision, routed, _ = score_exits(
            states, notes, notes[:, :0], none, self.router, norm, head, Confidence()
        )
        if self.readout is None:
            return decision
        transformed = states
        if self.affine is not None:
            transformed = torch.empty_like(states)
            weight, bias = self.affine.weight, self.affine.bias
            exit_transform(states, weight, bias, Norm(), None, transformed)
        return confirm_exits(
            transformed, notes, decision, routed, norm, head, self.readout.vocabulary,
            self.confidence, self.top_probability,
        )  # fmt: skip


def router_arguments(router: TokenRouter, threshold: float | None) -> Router:
    """A router as operations take it."""
    eps = router.norm.eps
    assert eps is not None
    weights = router.norm.weight, router.down.weight, router.down.bias
    return Router(*weights, router.up.weight[0], router.up.bias, eps, threshold)


@torch.no_grad()
def confidence_arguments(model: ConfidenceModel, threshold: float) -> Confidence:
    """A confidence model as operations take it: its scaling of features part of its weights."""
    mean, spread = model.mean.float(), model.spread.float()
    scaled = model.down.weight.float() / spread
    inner = scaled.new_zeros(len(scaled), CONFIDENCE_FEATURES)
    first = own = 0
    for name, size in FEATURES.items():
        if name in model.features:
            inner[:, first : first + size] = scaled[:, own : own + size]
            own += size
        first += size
    bias = model.down.bias.float() - scaled @ mean
    return Confidence(inner, bias, model.up.weight[0].float(), model.up.bias.float(), threshold)


def fuse(gate: Any) -> FusedGate | None:
    """A gate as fused operations; None where its parts are on several devices, or unknown."""
    readout: Readout | None = gate.readout
    modules: list[nn.Module] = [
        part for part in (gate.head, gate.router, gate.confidence_model) if part is not None
    ]
    tensors: list[Tensor] = [tensor for module in modules for tensor in module.parameters()]
    if readout is not None:
        readout.fuse()
        found = readout.fused
        if found is None:
            return None
        tensors.append(found[1].head)
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not fused(tensors[0]):
        return None
    return FusedGate(gate.head, readout, gate.thresholds, gate.router, gate.confidence_model)
