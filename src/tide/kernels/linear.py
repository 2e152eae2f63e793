"""Linear maps of few tokens on a CPU, with each weight read once.

The library behind torch's own product rearranges an fp32 matrix before it multiplies 4 tokens or
more, which costs as much as reading it once or twice more. A pass that verifies a few drafted
tokens, or catches up on a few that exited, would cost what two or three passes of one token do; see
`bench/few_tokens.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tide.kernels import native
from tide.kernels.dispatch import wanted_backend

_TRIED = 8, 20  # tokens
_SIZE = 4096  # inputs and outputs; most caches hold no such matrix
_FASTER = 0.95  # of torch's time: near it, chance would decide

_lock = threading.Lock()
_built: list[Any] = []  # the operator, once a graph has it


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, without gradients; as in graphs, once there are some."""
    own = _built and native.takes(x.device, x.dtype) and wanted_backend() != "reference"
    return _built[0](x, weight, bias) if own else nn.functional.linear(x, weight, bias)


def backend_of(device: torch.device, dtype: torch.dtype, tokens: int) -> Any:
    """By what `torch.compile` is to compile a pass of so many tokens, one or several.

    The operator is compiled too, once for a machine: by the same compiler, into the same cache.
    """
    own = operator() if tokens > 1 and native.takes(device, dtype) else None
    return "inductor" if own is None else partial(_compile_with, own)


def _compile_with(own: Any, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """As `torch.compile` does by default, with another operator for linear maps."""
    from torch._inductor.compile_fx import compile_fx  # takes a second

    for node in graph.graph.nodes:
        of = [each.meta.get("example_value") for each in node.all_input_nodes]
        if node.target is nn.functional.linear and all(map(_is_taken, of)):
            node.target = own
    graph.recompile()
    return compile_fx(graph, inputs)


def _is_taken(value: Any) -> bool:
    """Whether a tensor of a graph is one that the operator takes: not quantised, not elsewhere."""
    return type(value) is FakeTensor and native.takes(value.device, value.dtype)


@cache
def operator() -> Any:
    """`tide::linear`, compiled; None where there is no compiler, or torch's own is as fast."""
    if wanted_backend() == "reference":
        return None
    with _lock:
        if not native.load() or not _is_faster(torch.ops.tide.linear.default):
            return None
        _built[:] = [torch.ops.tide.linear.default]
        return _built[0]


@torch.no_grad()
def _is_faster(own: Any) -> bool:
    """Whether it is, where weights come from memory."""
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    weight = torch.ones(_SIZE, _SIZE, **on_cpu)
    some = [torch.ones(tokens, _SIZE, **on_cpu) for tokens in _TRIED]
    seconds: dict[Any, list[float]] = {own: [], nn.functional.linear: []}
    for _ in range(8):
        for way, times in seconds.items():
            began = time.perf_counter()
            for x in some:
                way(x, weight)
            times.append(time.perf_counter() - began)
    ours, torchs = map(median, seconds.values())
    return ours < _FASTER * torchs
