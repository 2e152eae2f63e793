"""Launching kernels, and knowing what was launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

WARPS = 4


@dataclass
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: from `tide.kernels.device`.
        grid: programs along each axis.
        arguments: by name, constants too.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return str(self.kernel.__name__)


_recorders: list[list[Launch]] = []
_dry: list[bool] = []


@contextmanager
def recorded(*, run: bool = True) -> Iterator[list[Launch]]:
    """Record what is launched; without `run`, nothing is, and tensors need no memory."""
    launches: list[Launch] = []
    _recorders.append(launches)
    _dry.append(not run)
    try:
        yield launches
    finally:
        _recorders.remove(launches)
        _dry.pop()


def launch(kernel: Any, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """Launch a kernel. A grid without a program launches nothing."""
    if 0 in grid:
        return
    for launches in _recorders:
        launches.append(Launch(kernel, grid, arguments))
    if not any(_dry):
        # Triton launches on the current device, which need not be where the tensors are.
        where = next(value for value in arguments.values() if isinstance(value, Tensor))
        with torch.cuda.device_of(where):
            kernel[grid](**arguments, num_warps=WARPS)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: `TRITON_INTERPRET=1` when it was imported."""
    return isinstance(triton.language.sum, InterpretedFunction)
