"""The self-check: proof, on the user's own model, that range-running equals its forward pass.

The proof is short: it does not reach beyond real sliding windows or chunks, which the tests do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tide.errors import SelfCheckError
from tide.models.runner import DepthRunner, first_tensor
from tide.models.tokens import TokenBatch

_LENGTHS = (8, 5)  # tokens of the two sequences
_PROMPTS = (5, 2)  # of which are in the prompt, left-padded
_KEPT = (
    3,
    2,
)  # of which stay after a rollback, so that the sequences are out of step from there on
# Largest error of a token's hidden state, relative to its norm. On SmolLM2, rounding alone gives
# 1e-6 in fp32; in bf16 0 over 8 tokens and 2e-2 over 24. A wrong mask gives 2e-1 in layer 0, a
# position off by one 6e-2 in layer 0 and 1e-1 in layer 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 5e-2


def self_check(runner: DepthRunner) -> list[float]:
    """Compare three ranges, with unequal sequences, a rollback and deferred tokens, to the model.

    Also compares a draft tree. A model that gives another output for it runs without trees:
    `runner.takes_trees`.

    Returns:
        The error of each layer's output, relative to its norm.

    Raises:
        SelfCheckError: naming the first layer whose output differs.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = runner.config.vocab_size
    sequences = [
        torch.randint(0, vocabulary, (length,), generator=generator).to(runner.input_device)
        for length in _LENGTHS
    ]
    expected = [_forward(runner, sequence) for sequence in sequences]
    got, logits = _by_ranges(runner, sequences)
    name, n_layers = runner.model.__class__.__name__, runner.n_layers
    tolerance = _TOLERANCE.get(runner.model.dtype, _HALF_TOLERANCE)
    errors = []
    for layer in range(n_layers):
        error = max(
            _relative_error(got[layer][s], expected[s][0][layer][_KEPT[s] :])
            for s in range(len(sequences))
        )
        if not error <= tolerance:
            raise SelfCheckError(
                f"{name}: layer {layer} of {n_layers} gives another output when run by depth "
                f"ranges as {runner.name} (relative error {error:.2g}, allowed {tolerance:.2g} in "
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
    expected_last = expected[0][0][-1][_PROMPTS[0] :]
    runner.takes_trees = runner.takes_trees and _takes_trees(runner, sequences[0], expected_last)
    return errors


def _takes_trees(runner: DepthRunner, sequence: Tensor, expected: Tensor) -> bool:
    """Whether a draft tree gives the states that the text gives."""
    tolerance = _TOLERANCE.get(runner.model.dtype, _HALF_TOLERANCE)
    try:
        return _relative_error(_by_tree(runner, sequence), expected) <= tolerance
    except Exception:  # whatever it is: chains do without
        return False


def require_equal(model: Any, what: str, got: Tensor, expected: Tensor) -> None:
    """Raise if states, `[tokens, hidden]`, differ from what they must be by more than rounding."""
    error, tolerance = _relative_error(got, expected), _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if not error <= tolerance:
        raise SelfCheckError(
            f"{model.__class__.__name__}: {what} differ from the uncompiled ones (relative error "
            f"{error:.2g}, allowed {tolerance:.2g} in {model.dtype})."
        )


def _by_ranges(
    runner: DepthRunner, sequences: Sequence[Tensor]
) -> tuple[list[list[Tensor]], Tensor]:
    """Outputs of each layer for each sequence after the rollback, and the last logits."""
    n, count = runner.n_layers, len(sequences)
    a, b = max(1, n // 3), max(1, 2 * n // 3)
    with runner.uncounted(), _layer_outputs(runner.parts.layers) as seen:
        cache = runner.new_cache(count)
        prompts = [s[:p] for s, p in zip(sequences, _PROMPTS, strict=True)]
        runner.run(_packed(prompts, left=True), 0, n, cache=cache)
        cache.rollback(_KEPT)
        for outputs in seen:
            outputs.clear()
        rest = [s[kept:] for s, kept in zip(sequences, _KEPT, strict=True)]
        waiting: list[list[Tensor]] = [[] for _ in sequences]
        for step in range(max(map(len, rest))):
            tokens = _packed([s[step : step + 1] for s in rest])
            out = runner.run(tokens, 0, a, cache=cache)
            for s in range(count):
                waiting[s].append(out[s][tokens.valid[s]])  # type: ignore[index]
        tokens = _packed(rest)
        hidden = _padded([torch.cat(states) for states in waiting])
        for lo, hi in ((a, b), (b, n)):
            if lo < hi:
                hidden = runner.run(tokens, lo, hi, cache=cache, hidden=hidden)
        logits = torch.stack([runner.logits(hidden[s, len(rest[s]) - 1]) for s in range(count)])
    # Every layer has seen these tokens, in one pass or step by step; padding stands behind them.
    states = [torch.cat(outputs, dim=1) for outputs in seen]
    return [[layer[s, : len(rest[s])] for s in range(count)] for layer in states], logits


def _by_tree(runner: DepthRunner, sequence: Tensor) -> Tensor:
    """Last states of what follows the prompt of a sequence, run as a path of a tree and after."""
    prompt, n = _PROMPTS[0], runner.n_layers
    root, second, last = sequence[prompt:].cpu()
    ids = torch.stack([root, last, second, root])[None]  # the second and the last are not in it
    tree = TokenBatch(ids, parents=np.array([[-1, 0, 0, 2]]))
    cache = runner.new_cache(1)
    with runner.uncounted():
        runner.run(TokenBatch(sequence[None, :prompt]), 0, n, cache=cache)
        states = runner.run(tree, 0, n, cache=cache)[0]
        cache.keep_paths({0: (prompt + 1, [1])})
        cache.rollback([prompt + 2])
        after = runner.run(TokenBatch(sequence[None, -1:]), 0, n, cache=cache)[0]
    return torch.stack([states[0], states[2], after[0]])


@torch.no_grad()
def _forward(runner: DepthRunner, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Outputs of each layer, `[tokens, hidden]`, and logits of one forward pass of the model."""
    with _layer_outputs(runner.parts.layers) as outputs:
        logits = runner.model(ids[None], use_cache=False, return_dict=True).logits[0]
    return [states[0][0] for states in outputs], logits


@contextmanager
def _layer_outputs(layers: nn.ModuleList) -> Iterator[list[list[Tensor]]]:
    """Collect each layer's outputs in this thread, call by call, on the CPU in float."""
    outputs: list[list[Tensor]] = [[] for _ in layers]
    thread = threading.get_ident()

    def keep(index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                outputs[index].append(first_tensor(output).float().cpu())

        return hook

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _packed(sequences: Sequence[Tensor], *, left: bool = False) -> TokenBatch:
    """Token ids of sequences of different lengths, padded."""
    valid = [torch.ones(len(s), dtype=torch.bool, device=s.device) for s in sequences]
    return TokenBatch(_padded(sequences, left=left), _padded(valid, left=left))


def _padded(sequences: Sequence[Tensor], *, left: bool = False) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        list(sequences), batch_first=True, padding_side="left" if left else "right"
    )


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest over tokens of |got - expected| / |expected|; NaN counts as an error."""
    got, expected = got.float().cpu(), expected.float().cpu()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
