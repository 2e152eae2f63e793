"""Which version of an operation runs: by device, by size, or as `TIDE_KERNELS` wants it.

An automatic choice may take the reference; what is wanted by name loads or raises.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from tide.errors import ConfigError, MissingPackageError

BACKENDS = ("auto", "triton", "reference")
CAPABILITY = (7, 0)  # the least of an NVIDIA GPU
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool)  # bool: for `compact`
# Beyond so many tokens, a product of large matrices is bound by arithmetic, and torch's is tuned.
MOST_TOKENS = 64
_BY_SIZE = ("top_token", "confirm_exits")


def wanted_backend() -> str:
    """What `TIDE_KERNELS` wants: "auto" unless set."""
    wanted = os.environ.get("TIDE_KERNELS", "auto")
    if wanted not in BACKENDS:
        raise ConfigError(f"Got TIDE_KERNELS={wanted!r}; allowed are {', '.join(BACKENDS)}.")
    return wanted


def choose(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The backend for tensors of a dtype on a device, "triton" or "reference", and why it is."""
    wanted = wanted_backend()
    if wanted == "reference":
        return "reference", "TIDE_KERNELS=reference"
    if wanted == "auto" and device.type == "cpu":  # without importing triton
        return "reference", "the device is a CPU"
    obstacle = _obstacle(device, dtype)
    if wanted == "triton":
        if obstacle is not None:
            raise MissingPackageError(
                f"TIDE_KERNELS=triton, but {obstacle}. Unset TIDE_KERNELS to use what runs here."
            )
        return "triton", "TIDE_KERNELS=triton"
    if obstacle is not None:
        return "reference", obstacle
    return "triton", f"{device.type}, {_name(device)}"


def fused(tensor: torch.Tensor) -> bool:
    """Whether operations on a tensor run as kernels; the same for all of its shapes."""
    return choose(tensor.device, tensor.dtype)[0] == "triton"


def implementation(operation: str, tensor: torch.Tensor) -> Any:
    """The function that runs an operation on a tensor, `[n, ...]`."""
    backend, _ = choose(tensor.device, tensor.dtype)
    large = operation in _BY_SIZE and len(tensor) > MOST_TOKENS
    if large and wanted_backend() == "auto":
        backend = "reference"
    return getattr(_module(backend), operation)


@cache
def _module(backend: str) -> Any:
    from importlib import import_module

    return import_module(f"tide.kernels.{backend}")


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels cannot run; None if they can."""
    if dtype not in DTYPES:
        return f"kernels take {', '.join(str(d)[6:] for d in DTYPES)}, not {str(dtype)[6:]}"
    missing = _missing()
    if missing is not None:
        return missing
    if device.type == "cuda":
        return _too_old(device) or _failing(device)
    if device.type == "cpu":
        from tide.kernels.launch import interpreted

        return None if interpreted() else (
            "the device is a CPU, where kernels run only in Triton's interpreter "
            "(TRITON_INTERPRET=1)"
        )  # fmt: skip
    return f"kernels run on CUDA and ROCm, not on {device.type}"


@cache
def _missing() -> str | None:
    try:
        _module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); pip install 'tide-llm[triton]'"
    return None


@cache
def _too_old(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return f"the GPU has capability {found}; kernels need {CAPABILITY}"
    return None


@cache
def _failing(device: torch.device) -> str | None:
    """Why a first small kernel fails: Triton needs a compiler and a driver that suit it."""
    try:
        _module("triton").compact(torch.ones(1, dtype=torch.bool, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever it is: the reference does without
        return f"a first kernel failed ({type(error).__name__}: {error})"
    return None


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
