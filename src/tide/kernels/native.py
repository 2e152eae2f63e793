"""Operators in C++ for CPUs, compiled on this machine by what `torch.compile` compiles with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from tide.kernels.dispatch import wanted_backend

_log = logging.getLogger(__name__)

# What weights and states may be; sums are float32.
LINEAR = (torch.float32,)
GATES = (torch.float32, torch.bfloat16)

_SOURCES = "few_tokens.cpp", "gate.cpp"  # one after the other: the second calls the first

_lock = Lock()


def takes(device: torch.device, dtype: torch.dtype, dtypes: Sequence[torch.dtype] = LINEAR) -> bool:
    """Whether operators for some dtypes are for tensors like these."""
    wanted = device.type == "cpu" and dtype in dtypes
    return wanted and not torch.is_autocast_enabled("cpu")


def decides_exits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `tide::decide_exits` runs for gates like these; compiles it first."""
    return wanted_backend() == "auto" and takes(device, dtype, GATES) and load()


def load() -> bool:
    """Compile and register the operators, once for a process; whether that worked."""
    with _lock:
        return _load()


@cache
def _load() -> bool:
    from torch._inductor.codecache import CppCodeCache  # takes a second

    source = "\n".join(files("tide.kernels").joinpath(name).read_text() for name in _SOURCES)
    # What is compiled is kept by its source, and has parts of torch in it.
    source = f"// torch {torch.__version__}, {torch.version.git_version}\n{source}"
    try:
        # Multiply and add in one.
        CppCodeCache.load_async(source, extra_flags=("-ffp-contract=fast",))()
    except Exception as error:  # whatever a compiler may raise, or there is none
        _log.debug("Operators cannot be compiled, so torch's own run: %s", error)
        return False
    register_fake("tide::linear", _shape_of_linear)
    register_fake("tide::decide_exits", _shape_of_decision)
    return True


def _shape_of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _shape_of_decision(states: Tensor, *rest: Any) -> Tensor:
    return states.new_empty(states.shape[0], 3, dtype=torch.float32)
