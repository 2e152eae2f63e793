"""Linear maps of few tokens on a CPU, with each weight read once.

The library behind torch's own product rearranges an fp32 matrix before it multiplies 4 tokens or
more, which costs as much as reading it once or twice more. A pass that verifies a few drafted
tokens, or catches up on a few that exited, would cost what two or three passes of one token do; see
`bench/few_tokens.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import register_fake

from tide.kernels.dispatch import wanted_backend

_TRIED = 8, 2048, 2048  # tokens, inputs and outputs

_built: list[Any] = []  # the operator, once it was wanted and found faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, by the operator if there is one; without gradients."""
    own = _built and _takes(x.device, x.dtype)
    return _built[0](x, weight, bias) if own else nn.functional.linear(x, weight, bias)


def backend_of(device: torch.device, dtype: torch.dtype, tokens: int) -> Any:
    """By what `torch.compile` is to compile a pass of so many tokens, one or several.

    The operator is compiled too, once for a machine: by the same compiler, into the same cache.
    """
    own = operator() if tokens > 1 and _takes(device, dtype) else None
    return "inductor" if own is None else partial(_compile_with, own)


def _compile_with(own: Any, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """As `torch.compile` does by default, with another operator for linear maps."""
    from torch._inductor.compile_fx import compile_fx  # takes a second

    for node in graph.graph.nodes:
        types = {type(of.meta.get("example_value")) for of in node.all_input_nodes}
        if node.target is nn.functional.linear and types == {FakeTensor}:  # not quantised
            node.target = own
    graph.recompile()
    return compile_fx(graph, inputs)


def _takes(device: torch.device, dtype: torch.dtype) -> bool:
    wanted = device.type == "cpu" and dtype is torch.float32
    return wanted and not torch.is_autocast_enabled("cpu")


@cache
def operator() -> Any:
    """`tide::linear`, compiled; None where there is no compiler, or torch's own is as fast."""
    if wanted_backend() == "reference":
        return None
    from torch._inductor.codecache import CppCodeCache  # takes a second

    source = files("tide.kernels").joinpath("few_tokens.cpp").read_text()
    try:
        CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))  # multiply and add in one
    except Exception:  # whatever a compiler may raise, or there is none
        return None
    register_fake("tide::linear", _fake)
    found = torch.ops.tide.linear.default
    if not _is_faster(found):
        return None
    _built.append(found)
    return found


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@torch.no_grad()
def _is_faster(own: Any) -> bool:
    """Whether it is, by a matrix that is too large for most caches."""
    tokens, inputs, outputs = _TRIED
    x, weight = torch.ones(tokens, inputs), torch.ones(outputs, inputs)
    seconds: dict[Any, list[float]] = {own: [], nn.functional.linear: []}
    for _ in range(10):
        for way, times in seconds.items():
            began = time.perf_counter()
            way(x, weight)
            times.append(time.perf_counter() - began)
    ours, torchs = map(median, seconds.values())
    return ours < torchs
