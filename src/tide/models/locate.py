"""The parts of a causal language model: decoder, layers, final norm, head.

Runs the model only to probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tide.errors import UnsupportedModelError
from tide.models.families import FAMILIES, NORM_NAMES


@dataclass(frozen=True)
class Parts:
    """The parts of a causal language model that TIDE runs or reads.

    Attributes:
        decoder: the module that embeds tokens, loops over the layers and applies the final norm.
        layers: the decoder layers, in order.
        norm: the final norm, between the last layer and the head.
        head: the language-model head.
        found_by: which of "accessors", "family row" and "probe" found them.
    """

    decoder: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    found_by: str


def locate(model: nn.Module) -> Parts:
    """Find the parts of `model`: Hugging Face accessors first, then the family's row, then a probe.

    Raises:
        UnsupportedModelError: if none of the three finds every part.
    """
    ways: tuple[tuple[str, Callable[[Any], tuple | None]], ...] = (
        ("accessors", _by_accessors),
        ("family row", _by_family_row),
        ("probe", _by_probe),
    )
    for name, find in ways:
        found = find(model)
        if found is not None:
            decoder, layers, norm, head = found
            return Parts(decoder, layers, norm, head, found_by=name)
    raise UnsupportedModelError(
        f"{model.__class__.__name__}: cannot tell its decoder, layers, final norm and head apart "
        "(tried Hugging Face accessors, the family table and a probe). "
        "Pass an AutoModelForCausalLM, or add a row to tide/models/families.py (see "
        "CONTRIBUTING.md)."
    )


def text_config(model: Any) -> Any:
    """The config of the language model, also where it is part of a larger one."""
    return model.config.get_text_config(decoder=True)


def _by_accessors(model: Any) -> tuple | None:
    if not hasattr(model, "get_decoder") or not hasattr(model, "get_output_embeddings"):
        return None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head is None or decoder is None or decoder is model:
        return None
    depth = text_config(model).num_hidden_layers
    children = dict(decoder.named_children())
    stacks = [m for m in children.values() if isinstance(m, nn.ModuleList) and len(m) == depth]
    norms = [children[name] for name in NORM_NAMES if name in children]
    return (decoder, stacks[0], norms[0], head) if len(stacks) == len(norms) == 1 else None


def _by_family_row(model: Any) -> tuple | None:
    row = FAMILIES.get(getattr(model.config, "model_type", ""))
    if row is None:
        return None
    try:
        decoder = model.get_submodule(row.decoder)
        layers, norm = decoder.get_submodule(row.layers), decoder.get_submodule(row.norm)
    except AttributeError:
        return None
    head = model.get_output_embeddings()
    return None if head is None else (decoder, layers, norm, head)


@torch.no_grad()
def _by_probe(model: Any) -> tuple | None:
    """The longest stack of like layers, the map to the vocabulary, and the module that feeds it."""
    named = dict(model.named_modules())
    stacks = {
        name: module
        for name, module in named.items()
        if isinstance(module, nn.ModuleList) and len({type(m) for m in module}) == 1
    }
    vocabulary = getattr(model.config, "vocab_size", None)
    heads = [m for m in named.values() if getattr(m, "out_features", None) == vocabulary]
    if not stacks or len(heads) != 1:
        return None
    stack_name = max(stacks, key=lambda name: len(stacks[name]))
    decoder, head = named[stack_name.rpartition(".")[0]], heads[0]

    outputs: list[
        tuple[nn.Module, torch.Tensor]
    ] = []  # kept alive, so that no storage is used twice
    fed: list[torch.Tensor] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs.append((module, output))

    handles = [m.register_forward_hook(record) for m in named.values() if m is not head]
    handles.append(head.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0])))
    try:
        model(torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    if not fed:
        return None
    storage = fed[-1].untyped_storage().data_ptr()
    # The first module that gave this storage made it; those after it only handed it on.
    norm = next((m for m, out in outputs if out.untyped_storage().data_ptr() == storage), None)
    return None if norm is None else (decoder, stacks[stack_name], norm, head)
