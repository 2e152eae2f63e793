"""A model's final norm as operations take it: recognised by what it computes, not by its class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tide.kernels.arguments import Norm
from tide.kernels.arithmetic import normed


def hooked(module: nn.Module) -> bool:
    """Whether something happens around a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


@torch.no_grad()
def known_norm(module: nn.Module) -> Norm | None:
    """The norm that a module computes; None if it is none that operations know, or is hooked."""
    weight: Any = getattr(module, "weight", None)
    bias: Any = getattr(module, "bias", None)
    if hooked(module):
        return None
    if not isinstance(weight, Tensor) or weight.is_meta or weight.dim() != 1:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, len(weight), generator=generator).add_(0.5).to(weight)
    expected = module(probe).float()
    tolerance = {torch.float32: 1e-5}.get(weight.dtype, 2e-2)
    for norm in (
        Norm("rms", weight, bias, eps),
        Norm("rms", 1 + weight.float(), None, eps),  # Gemma
        Norm("layer", weight, bias, eps),
    ):
        if norm.norm == "rms" and bias is not None:
            continue
        got = normed(probe, norm).float()
        if torch.allclose(got, expected, atol=tolerance, rtol=tolerance):
            return norm
    return None
