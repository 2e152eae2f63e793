"""A short identity of a model: hashes of its config, its head and its layers.

An artifact carries the fingerprint of the model it was made for. Reading a few hundred numbers per
weight takes milliseconds where a hash of all of an 8B model takes a minute, and still tells
fine-tunes and quantisations apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tide.models.locate import Parts, text_config

_SAMPLES = 256
_STEP = 2_654_435_761

# Config keys that change without the model changing.
_NOT_IDENTITY = (
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
)


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of a model's parts, each 16 hex digits.

    A model loaded in fp32 and in bf16 has the same; in fp16, rounded otherwise, it has its
    own.
    """

    config: str
    head: str
    layers: str

    def to_dict(self) -> dict[str, str]:
        """As JSON values."""
        return asdict(self)

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the parts in which two fingerprints differ; empty if they are of one model."""
        return [part for part, value in self.to_dict().items() if value != other.to_dict()[part]]


def fingerprint(model: Any, parts: Parts) -> Fingerprint:
    """Take the fingerprint of `model`; offloaded weights are read where they are kept."""
    known = [
        ("norm", parts.norm),
        ("head", parts.head),
        ("embeddings", model.get_input_embeddings()),
    ]
    layers = [(str(i), layer) for i, layer in enumerate(parts.layers)]
    hashed = {id(module) for _, whole in [*known, *layers] for module in whole.modules()}
    # What else the decoder has, such as embeddings of positions.
    others = [(name, m) for name, m in parts.decoder.named_modules() if id(m) not in hashed]
    return Fingerprint(
        config=config_hash(text_config(model)),
        head=_hash_weights([*_modules(known), *others]),
        layers=_hash_weights(_modules(layers)),
    )


def _modules(of: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The modules inside of modules, each with its name."""
    return [pair for prefix, module in of for pair in module.named_modules(prefix=prefix)]


def config_hash(config: Any) -> str:
    """Hash of a text config, without what changes while the model stays the same."""
    known = {k: v for k, v in config.to_dict().items() if k not in _NOT_IDENTITY}
    return _digest(json.dumps(known, sort_keys=True, default=str).encode())


@torch.no_grad()
def _hash_weights(modules: list[tuple[str, nn.Module]]) -> str:
    digest = hashlib.sha256()
    for name, owner in modules:
        with _weights_at_hand(owner):
            for key, weight in _stored(owner):
                digest.update(f"{name}.{key}{tuple(weight.shape)}".encode())
                digest.update(_sample(weight))
    return digest.hexdigest()[:16]


def _stored(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module itself that belong to its checkpoint."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _sample(weight: Tensor) -> bytes:
    """Scattered values in bf16, so that a model is the same loaded in fp32 and in bf16."""
    if hasattr(weight, "dequantize") and type(weight) not in (Tensor, nn.Parameter):
        weight = weight.dequantize()
    flat = weight.detach().reshape(-1)
    # Steps of a large prime: they reach all parts of a weight, whatever its width.
    places = torch.arange(min(_SAMPLES, flat.numel()), device=flat.device) * _STEP % flat.numel()
    return flat[places].to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()


def _weights_at_hand(module: nn.Module) -> Any:
    """A context in which weights that accelerate has offloaded are there to be read."""
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        from accelerate.utils import align_module_device

        return align_module_device(module)
    return nullcontext()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def model_name(model: Any) -> str:
    """The model's hub id, or the name of its folder; never where that folder is."""
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def dtype_name(model: Any) -> str:
    """The precision of a model's or a config's weights, as in artifacts and on command lines."""
    return str(model.dtype).removeprefix("torch.")
