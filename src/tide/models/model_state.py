"""What a graph takes for granted of its model, looked at once for a generation.

`torch.compile` has every graph look at hundreds of attributes of each layer before each run, which
small graphs feel. Here a call compares the model once, and its graphs do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_ARGUMENTS = "packed", "hidden", "keys", "values"  # of a pass
_SIMPLE = {bool, int, float, str, type(None)}
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


def state_of(model: nn.Module) -> list[Any]:
    """What graphs of a model depend on, to be compared later: if it differs, they are not for it.

    Its config, and of each module the hooks, training mode, other attributes (those of adapters,
    for one) and which weights there are; not their values, which graphs read where they are. Code
    that replaces a class's own is not noticed, nor are attributes that are objects, nor those of
    whole models: `generate` keeps there what its last call was.
    """
    config = getattr(model, "config", None)
    of_config = None if config is None else config.to_dict()
    return [of_config, *map(_state_of_module, model.modules())]


def _state_of_module(module: nn.Module) -> tuple[Any, ...]:
    weights = chain(module._parameters.items(), module._buffers.items())
    own = {} if isinstance(module, PreTrainedModel) else vars(module)
    return (
        id(module), type(module), vars(module).get("forward"),
        *module._forward_hooks, *module._forward_pre_hooks,
        *((name, repr(value)) for name, value in own.items()
          if name not in _OF_EVERY_MODULE and _is_simple(value)),
        *((name, type(t.data), t.dtype, t.shape, t.stride(), t.device)
          for name, t in weights if t is not None),
        *map(id, module._parameters.values()),
    )  # fmt: skip


def _is_simple(value: Any) -> bool:
    """Whether it can be compared, as settings can: a value, or a collection of values."""
    if type(value) is dict:
        return all(type(each) in _SIMPLE for each in value.values())
    if type(value) in (list, tuple, set):
        return all(type(each) in _SIMPLE for each in value)
    return type(value) in _SIMPLE


def compile_options(device: torch.device) -> dict[str, Any] | None:
    """Options of `torch.compile`, which empties them, for a graph of a model that is compared."""
    # On a GPU, CUDA graphs: there the host is what a step waits for.
    options: dict[str, Any] = {"triton.cudagraphs": True} if device.type == "cuda" else {}
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):  # before 2.8, torch takes no filter
        options["guard_filter_fn"] = _checks_to_keep
    return options or None


def _checks_to_keep(checks: Sequence[Any]) -> list[bool]:
    """Those on the arguments of a pass, and those on what torch is set to, which have no name."""
    return [not check.name or check.name.split("[")[0] in _ARGUMENTS for check in checks]
