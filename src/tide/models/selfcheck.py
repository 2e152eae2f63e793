"""Gives the proof, on the user's own model, that range-running equals its forward pass.

The proof is short: it does not reach beyond real sliding windows or chunks, which the tests do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tide.errors import SelfCheckError
from tide.models.depth import DepthRunner, first_tensor

_LENGTHS = (8, 5)  # tokens of the two rows
_PROMPTS = (5, 2)  # of which are in the prompt, left-padded
_KEPT = (3, 2)  # of which stay after a fall-back, so that the rows stand apart from there on
# Largest error of a token's hidden state, relative to its norm. On SmolLM2, rounding alone gives
# 1e-6 in fp32; in bf16 0 over 8 tokens and 2e-2 over 24. A wrong mask gives 2e-1 in layer 0, a
# position off by one 6e-2 in layer 0 and 1e-1 in layer 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 5e-2


def self_check(runner: DepthRunner) -> list[float]:
    """Compare three ranges, with unequal rows, a fall-back and deferred tokens, to the model.

    Returns:
        The error of each layer's output, relative to its norm.

    Raises:
        SelfCheckError: naming the first layer whose output differs.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = runner.config.vocab_size
    rows = [
        torch.randint(0, vocabulary, (length,), generator=generator).to(runner.input_device)
        for length in _LENGTHS
    ]
    expected = [_forward(runner, row) for row in rows]
    got, logits = _by_ranges(runner, rows)
    name, n_layers = type(runner.model).__name__, runner.n_layers
    tolerance = _TOLERANCE.get(runner.model.dtype, _HALF_TOLERANCE)
    errors = []
    for layer in range(n_layers):
        error = max(
            _relative_error(got[layer][r], expected[r][0][layer][_KEPT[r] :])
            for r in range(len(rows))
        )
        if not error <= tolerance:
            raise SelfCheckError(
                f"{name}: layer {layer} of {n_layers} gives another output when run by depth "
                f"ranges (relative error {error:.2g}, allowed {tolerance:.2g} in "
                f"{runner.model.dtype}). This model's layers depend on more than their input, "
                "mask, positions and cache, so TIDE cannot skip them safely. Please report the "
                "model; attach(model, check=False) runs it unproven."
            )
        errors.append(error)
    error = _relative_error(logits, torch.stack([last[-1] for _, last in expected]))
    if not error <= tolerance:
        raise SelfCheckError(
            f"{name}: final norm and head (found by {runner.parts.found_by}) do not give the "
            f"model's own logits (relative error {error:.2g}, allowed {tolerance:.2g}). Either "
            "the wrong modules were found, or the model does something to its logits that TIDE "
            "does not know. Please report it; see `families.py` and `scale_logits` in "
            "tide/models."
        )
    return errors


def _by_ranges(runner: DepthRunner, rows: Sequence[Tensor]) -> tuple[list[list[Tensor]], Tensor]:
    """Outputs of each layer for each row after the fall-back, and the last logits."""
    n = runner.n_layers
    a, b = max(1, n // 3), max(1, 2 * n // 3)
    counts, runner.counts = runner.counts, type(runner.counts).zeros(n)
    with runner, _layer_outputs(runner.parts.layers) as seen:
        cache = runner.new_cache(len(rows))
        ids, valid = _padded([row[:p] for row, p in zip(rows, _PROMPTS, strict=True)], left=True)
        runner.run(ids, 0, n, cache=cache, valid=valid)
        cache.fall_back(_KEPT)
        for outputs in seen:
            outputs.clear()
        rest = [row[kept:] for row, kept in zip(rows, _KEPT, strict=True)]
        waiting: list[list[Tensor]] = [[] for _ in rows]
        for step in range(max(map(len, rest))):
            ids, valid = _padded([row[step : step + 1] for row in rest])
            out = runner.run(ids, 0, a, cache=cache, valid=valid)
            for r in range(len(rows)):
                waiting[r].append(out[r][valid[r]])
        ids, valid = _padded(rest)
        hidden, _ = _padded([torch.cat(states) for states in waiting])
        for lo, hi in ((a, b), (b, n)):
            if lo < hi:
                hidden = runner.run(ids, lo, hi, cache=cache, hidden=hidden, valid=valid)
        logits = torch.stack([runner.logits(hidden[r][valid[r]][-1]) for r in range(len(rows))])
    runner.counts = counts
    # Every layer has seen these tokens, in one pass or step by step; padding stands behind them.
    states = [torch.cat(outputs, dim=1) for outputs in seen]
    return [[s[r, : len(rest[r])] for r in range(len(rows))] for s in states], logits


@torch.no_grad()
def _forward(runner: DepthRunner, row: Tensor) -> tuple[list[Tensor], Tensor]:
    """Outputs of each layer, `[tokens, hidden]`, and logits of one plain forward pass."""
    with _layer_outputs(runner.parts.layers) as outputs:
        logits = runner.model(row[None], use_cache=False, return_dict=True).logits[0]
    return [states[0][0] for states in outputs], logits


@contextmanager
def _layer_outputs(layers: nn.ModuleList) -> Iterator[list[list[Tensor]]]:
    """Collect each layer's outputs, call by call, on the CPU in float."""
    outputs: list[list[Tensor]] = [[] for _ in layers]

    def keep(index: int) -> Any:
        return lambda module, inputs, output: outputs[index].append(
            first_tensor(output).float().cpu()
        )

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _padded(rows: Sequence[Tensor], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one tensor, and what of it is not padding."""
    side = "left" if left else "right"
    pad = torch.nn.utils.rnn.pad_sequence
    valid = [torch.ones(len(row), dtype=torch.bool, device=row.device) for row in rows]
    return (
        pad(list(rows), batch_first=True, padding_side=side),
        pad(valid, batch_first=True, padding_side=side),
    )


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest over tokens of |got - expected| / |expected|; NaN counts as an error."""
    got, expected = got.float().cpu(), expected.float().cpu()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
