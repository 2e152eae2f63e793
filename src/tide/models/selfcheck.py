"""Gives the proof, on the user's own model, that range-running equals its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tide.errors import SelfCheckError
from tide.models.depth import DepthRunner

_TOKENS = 8
_SHORTER = (
    3  # the second row is shorter by this much, so that masks and alignment are part of the proof
)
# Largest error of a token's hidden state, relative to its norm. On SmolLM2, rounding alone gives
# 1e-6 in fp32; in bf16 0 over 8 tokens and 2e-2 over 24. A wrong mask or position gives 6e-2 to
# 2e-1 in the first layers.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 5e-2


def self_check(runner: DepthRunner) -> list[float]:
    """Compare three ranges, with deferred tokens and unequal rows, to the model's own forward.

    Returns:
        The error of each layer's output, relative to its norm.

    Raises:
        SelfCheckError: naming the first layer whose output differs.
    """
    model, n_layers = runner.model, runner.n_layers
    generator = torch.Generator().manual_seed(0)
    vocabulary = runner.config.vocab_size
    ids = torch.randint(0, vocabulary, (2, _TOKENS), generator=generator).to(runner.input_device)
    long, long_logits = _forward(runner, ids[:1])
    short, short_logits = _forward(runner, ids[1:, _SHORTER:])

    a, b = max(1, n_layers // 3), max(1, 2 * n_layers // 3)
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[1, :_SHORTER] = False
    half = _TOKENS // 2
    with runner, _layer_outputs(runner.parts.layers) as got:
        cache = runner.new_cache(2)
        runner.run(ids[:, :half], 0, n_layers, cache=cache, valid=valid[:, :half])
        steps = [runner.run(ids[:, t : t + 1], 0, a, cache=cache) for t in range(half, _TOKENS)]
        hidden = torch.cat(steps, dim=1)
        for lo, hi in ((a, b), (b, n_layers)):
            if lo < hi:
                hidden = runner.run(ids[:, half:], lo, hi, cache=cache, hidden=hidden)
        last = runner.logits(hidden[:, -1])
    runner.counts.reset()

    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    errors = []
    for layer in range(n_layers):
        states = torch.cat(got[layer], dim=1)  # [2, tokens, hidden]
        error = max(
            _relative_error(states[0], long[layer][0][0]),
            _relative_error(states[1, _SHORTER:], short[layer][0][0]),
        )
        if not error <= tolerance:
            raise SelfCheckError(
                f"{type(model).__name__}: layer {layer} of {n_layers} gives another output when "
                f"run by depth ranges (relative error {error:.2g}, allowed {tolerance:.2g} in "
                f"{model.dtype}). This model's layers depend on more than their input, mask, "
                f"positions and cache, so TIDE cannot skip them safely. Please report the model; "
                f"attach(model, check=False) runs it unproven."
            )
        errors.append(error)
    error = _relative_error(last, torch.cat([long_logits[:, -1], short_logits[:, -1]]))
    if not error <= tolerance:
        raise SelfCheckError(
            f"{type(model).__name__}: final norm and head (found by {runner.parts.found_by}) do "
            f"not give the model's own logits (relative error {error:.2g}, allowed "
            f"{tolerance:.2g}). The model does something to its logits that TIDE does not know. "
            f"Please report it; see `scale_logits` in tide/models/depth.py."
        )
    return errors


@torch.no_grad()
def _forward(runner: DepthRunner, ids: Tensor) -> tuple[list[list[Tensor]], Tensor]:
    with _layer_outputs(runner.parts.layers) as outputs:
        logits = runner.model(ids, use_cache=False).logits
    return outputs, logits


@contextmanager
def _layer_outputs(layers: nn.ModuleList) -> Iterator[list[list[Tensor]]]:
    """Collect each layer's outputs, call by call, on the CPU in float."""
    outputs: list[list[Tensor]] = [[] for _ in layers]

    def keep(index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            outputs[index].append(state.float().cpu())

        return hook

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest over tokens of |got - expected| / |expected|; NaN counts as an error."""
    got, expected = got.float().cpu(), expected.float().cpu()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
