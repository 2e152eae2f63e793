"""The options that commands share, and loading: a model and its tokenizer by hub id or folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from tide.cli import did_you_mean
from tide.errors import UnsupportedModelError

# Strategies by which accelerate spreads a model over devices; all else names one device.
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")

DTYPES = ("auto", "float32", "bfloat16", "float16")


def from_1(given: str) -> int:
    """A number of at least 1, of an option."""
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number from 1 on")
    return int(given)


def share(given: str) -> float:
    """A share between 0 and 1, of an option."""
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not between 0 and 1: 2 % is 0.02")
    return found


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that loads a model."""
    parser.add_argument("model", metavar="MODEL", help="a hub id or a folder")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the weights")
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:1, ..., or auto: over all there are (default: cpu)"
    )
    parser.add_argument("--threads", type=from_1, help="CPU threads (default: torch's choice)")


def data_options(parser: argparse.ArgumentParser, samples: int) -> None:
    """Options of every command that reads prompts."""
    parser.add_argument(
        "--data",
        default="wikitext",
        help="prompts: a .txt or .jsonl file, a data set, or starter, which comes with TIDE",
    )
    parser.add_argument(
        "--samples", type=from_1, default=samples, help="number of prompts, at most"
    )


_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # what the speed of a CPU depends on


def processor() -> str:
    """The name of the CPU, and which of the instructions it has that matrices are fast with."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = [flag for flag in _FLAGS if flag in found.get("flags", "").split()]
    name = found.get("model name", platform.machine())
    return f"{name} ({', '.join(flags)})" if flags else name


def conditions(model: Any) -> dict[str, Any]:
    """What a measurement depends on, apart from the options."""
    import torch
    import transformers

    from tide import __version__
    from tide.models.fingerprint import dtype_name, model_name

    return {
        "model": model_name(model),
        "dtype": dtype_name(model),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tide": __version__,
    }


def _near(model: str) -> list[str]:
    """Models on this machine with a similar name: in the hub's cache, or next to the folder."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = [repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        found = []
    folder = Path(model).parent
    if folder.is_dir():
        found += [str(folder / path.parent.name) for path in folder.glob("*/config.json")]
    return [] if model in found else found  # if it exists, its name is not the problem


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, in evaluation mode, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and "LOCAL_RANK" in os.environ:  # one device for each process
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    # Without it, the tokenizer would try the hub twice, at half a minute each while offline.
    config = load_config(args.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, config=config, padding_side="left")
    except (OSError, ValueError) as error:
        raise cannot_load(args.model, error) from error
    return load_model(args.model, args.dtype, args.device), tokenizer


def load_config(name: str) -> Any:
    """The config of a model, from a hub id or a folder."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise cannot_load(name, error) from error


def load_model(name: str, dtype: str = "auto", device: str | None = None) -> Any:
    """A model in evaluation mode, from a hub id or a folder."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_accelerate_available

    # With accelerate, weights are loaded to where they are wanted, and quantised ones know it.
    mapped = device in _SPREAD or is_accelerate_available()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device if mapped else None,
        )  # fmt: skip
        if device is not None and not mapped:
            model.to(torch.device(device))  # type: ignore[arg-type]
    except (
        AssertionError,
        ImportError,
        OSError,
        RuntimeError,
        SafetensorError,
        ValueError,
    ) as error:
        raise cannot_load(name, error) from error
    return model.eval()


def cannot_load(name: str, error: Exception) -> UnsupportedModelError:
    """The error for a model that is not there, or not to be loaded."""
    near = did_you_mean(name, _near(name))
    # A hub id has at most one slash, and no part of it begins with a dot.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).exists():
        return UnsupportedModelError(
            f"There is no folder {name}: MODEL is a folder or a hub id.{near}"
        )
    return UnsupportedModelError(
        f"{name!r} cannot be loaded as a causal language model.{near} MODEL is a folder or a hub "
        f"id. {error}"
    )
