"""A gate as fused operations: the decisions of `ExitGate`, in at most four launches on a GPU, and
in one operation of our own on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tide.exits.candidates import Prefilter
from tide.exits.confidence import FEATURES, WITH_HEAD, ConfidenceModel
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.kernels import native, reference
from tide.kernels.arguments import Candidates, Confidence, Head, Norm, Router
from tide.kernels.operators import confirm_exits, exit_transform, score_exits


class FusedGate:
    """What `ExitGate` computes, by the operations of `tide.kernels`.

    Args:
        head: of the checkpoint.
        readout: whose norm and head operations can take; see `Readout.fused`.
        thresholds: a token exits if it passes all that are set.
        router, confidence_model, prefilter: None where there is none.
    """

    def __init__(
        self,
        head: ExitHead,
        readout: Readout,
        thresholds: Thresholds,
        router: TokenRouter | None,
        confidence_model: ConfidenceModel | None,
        prefilter: Prefilter | None,
    ) -> None:
        self.affine, self.readout, self.native = head.affine, readout, readout.native
        self.router = Router() if router is None else router_arguments(router, thresholds.router)
        self.candidates = Candidates() if prefilter is None else prefilter.candidates.arguments
        self.prefilter = self.confidence = Confidence()
        if prefilter is not None and thresholds.prefilter is not None:
            self.prefilter = confidence_arguments(prefilter.model, thresholds.prefilter)
        if confidence_model is not None and thresholds.confidence is not None:
            self.confidence = confidence_arguments(confidence_model, thresholds.confidence)
        self.top_probability = thresholds.top_probability or 0.0
        if self.native:
            self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        """Put what only this gate reads into one tensor, in the order of the operator.

        A graph pays for every tensor that it is given, and there would be more of a gate's than of
        a layer's. The affine map stays a tensor of its own, in bfloat16 if that has all of it.
        Thresholds are in it too: graphs that differ in them alone are the same code.
        """
        fixed, fixed_bias, self._places = self.candidates
        self._affine = affine_bias = None
        if self.affine is not None:
            affine_bias, rounded = self.affine.bias, self.affine.weight.bfloat16()
            weight = self.affine.weight
            self._affine = (rounded if rounded.equal(weight) else weight).contiguous()
        # Not in the default dtype, which vLLM sets to the model's while it loads weights.
        as_numbers = partial(torch.tensor, dtype=torch.float32)
        routed = self.router.router_threshold
        router_threshold = None if routed is None else as_numbers([routed])
        thresholds = as_numbers(
            [self.prefilter.threshold, self.confidence.threshold, self.top_probability]
        )
        parts = (
            affine_bias, fixed, fixed_bias, *self.router[:5], *self.prefilter[:4],
            *self.confidence[:4], router_threshold, thresholds,
        )  # fmt: skip
        there = (torch.empty(0) if part is None else part.float().flatten() for part in parts)
        self._weights = torch.cat(list(there))
        self._sizes = [0 if part is None else part.numel() for part in parts]

    def takes(self, states: Tensor) -> bool:
        """Whether it decides for such states, and norm and head have no hook by now."""
        found = self.readout.fused
        return found is not None and (not self.native or (
            states.dtype is found[1].head.dtype
            and native.takes(states.device, states.dtype, native.GATES)
        ))  # fmt: skip

    def __call__(self, states: Tensor, notes: Tensor) -> Tensor:
        """Decide for tokens, `[n, hidden]` and `[n, NOTES]`: a packed decision, `[n, 3]`."""
        found = self.readout.fused
        assert found is not None
        if self.native:
            return self._decide(states, notes, *found)
        read = states
        if self.affine is not None:
            read = torch.empty_like(states)
            exit_transform(states, self.affine.weight, self.affine.bias, Norm(), None, read)
        decision, routed = score_exits(
            states, read, notes, self.router, *found, self.candidates, self.prefilter
        )
        return confirm_exits(
            read, notes, decision, routed, *found, self.readout.vocabulary, self.confidence,
            self.top_probability,
        )  # fmt: skip

    def by_reference(self, states: Tensor, notes: Tensor) -> Tensor:
        """The same decision in torch alone, computed in float32 whatever the weights are."""
        found = self.readout.fused
        assert found is not None
        wide = (self.router, *found, self.candidates, self.prefilter, self.confidence)
        router, norm, head, candidates, prefilter, confidence = map(_in_float32, wide)
        read = states = states.float()
        if self.affine is not None:
            read = states + linear(states, self.affine.weight.float(), self.affine.bias.float())
        decision, routed = reference.score_exits(
            states, read, notes, router, norm, head, candidates, prefilter
        )
        return reference.confirm_exits(
            read, notes, decision, routed, norm, head, self.readout.vocabulary, confidence,
            self.top_probability,
        )  # fmt: skip

    def _decide(self, states: Tensor, notes: Tensor, norm: Norm, head: Head) -> Tensor:
        of, weight, bias, eps = norm
        return torch.ops.tide.decide_exits(
            states.contiguous(), notes, self._affine, self._weights, self._sizes, weight, bias, eps,
            of == "layer", *head, self._places, self.readout.vocabulary, self.router.router_eps,
        )  # fmt: skip


def _in_float32(of: Any) -> Any:
    """Arguments of operations with float32 in place of other floating-point numbers."""
    return type(of)(*(
        value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in of
    ))  # fmt: skip


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
    inner = model.down.weight.float() / spread
    bias = model.down.bias.float() - inner @ mean
    if "candidates" not in model.features:  # it may look at some only; the others count nothing
        own = iter(inner.split([FEATURES[name] for name in WITH_HEAD if name in model.features], 1))
        inner = torch.cat(
            [next(own) if name in model.features else inner.new_zeros(len(inner), FEATURES[name])
             for name in WITH_HEAD], 1,
        )  # fmt: skip
    return Confidence(inner, bias, model.up.weight[0].float(), model.up.bias.float(), threshold)


def fuse(
    readout: Readout,
    thresholds: Thresholds,
    head: ExitHead,
    router: TokenRouter | None,
    confidence_model: ConfidenceModel | None,
    prefilter: Prefilter | None,
) -> FusedGate | None:
    """A gate as fused operations; None where its parts are unknown, or on several devices.

    Also where our operator would have to read parts in another precision than it can.
    """
    if (found := readout.fused) is None:
        return None
    weight = found[1].head
    modules = (head, router, confidence_model, prefilter)
    parameters = [p for m in modules if m is not None for p in m.parameters()]
    if any(p.device != weight.device for p in parameters):
        return None
    if readout.native and any(p.dtype not in (weight.dtype, torch.float32) for p in parameters):
        return None
    return FusedGate(head, readout, thresholds, router, confidence_model, prefilter)
