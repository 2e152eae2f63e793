"""Gives the ways in which tokens may pass the layers out of step, all ending at full depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tide.models.depth import DepthRunner

# What a scenario leaves: for each row its tokens, and the last layer's output for the latest of
# them.
Outcome = list[tuple[Tensor, Tensor]]
Scenario = Callable[[DepthRunner, Tensor], Outcome]


def cuts(runner: DepthRunner) -> tuple[tuple[int, int], ...]:
    """Three ranges that together are the whole depth."""
    n = runner.n_layers
    return (0, n // 3), (n // 3, 2 * n // 3), (2 * n // 3, n)


def descend(
    runner: DepthRunner, ids: Tensor, cache: Any, *, ranges: Any = None, **kwargs: Any
) -> Tensor:
    """Run tokens through consecutive ranges, one after the other."""
    hidden = kwargs.pop("hidden", None)
    for lo, hi in ranges or cuts(runner):
        hidden = runner.run(ids, lo, hi, cache=cache, hidden=hidden, **kwargs)
    assert hidden is not None
    return hidden


def stepwise(runner: DepthRunner, ids: Tensor) -> Outcome:
    """(a) Prefill, then one-token steps, all split into three ranges."""
    cache = runner.new_cache(len(ids))
    states = [descend(runner, ids[:, :5], cache)]
    states += [descend(runner, ids[:, t : t + 1], cache) for t in range(5, ids.shape[1])]
    return list(zip(ids, torch.cat(states, 1), strict=True))


def deferred(runner: DepthRunner, ids: Tensor) -> Outcome:
    """(b) Tokens wait after the first range, then pass the rest together."""
    cache = runner.new_cache(len(ids))
    descend(runner, ids[:, :5], cache)
    first, *rest = cuts(runner)
    waiting = [runner.run(ids[:, t : t + 1], *first, cache=cache) for t in range(5, ids.shape[1])]
    hidden = descend(runner, ids[:, 5:], cache, ranges=rest, hidden=torch.cat(waiting, 1))
    return list(zip(ids, hidden, strict=True))


def ragged(side: str) -> Scenario:
    """(c) Three prompts of different lengths; each row defers another number of tokens."""

    def scenario(runner: DepthRunner, ids: Tensor) -> Outcome:
        prompts, defers = (6, 3, 5), (1, 4, 2)
        rows = [
            ids[r % len(ids)].roll(r)[: p + d]
            for r, (p, d) in enumerate(zip(prompts, defers, strict=True))
        ]
        cache = runner.new_cache(3)
        tokens, valid = pad([row[:p] for row, p in zip(rows, prompts, strict=True)], side)
        descend(runner, tokens, cache, valid=valid)
        first, *rest = cuts(runner)
        waiting: list[list[Tensor]] = [[], [], []]
        for step in range(max(defers)):
            here = [row[p + step : p + step + 1] for row, p in zip(rows, prompts, strict=True)]
            tokens, valid = pad(here, side)
            hidden = runner.run(tokens, *first, cache=cache, valid=valid)
            for r in range(3):
                waiting[r] += [hidden[r][valid[r]]]
        tokens, valid = pad([row[p:] for row, p in zip(rows, prompts, strict=True)], side)
        states, _ = pad([torch.cat(w) for w in waiting], side)
        hidden = descend(runner, tokens, cache, ranges=rest, hidden=states, valid=valid)
        return [(rows[r], hidden[r][valid[r]]) for r in range(3)]

    return scenario


def fallen_back(runner: DepthRunner, ids: Tensor) -> Outcome:
    """(d) Fall back by k tokens, another k in each row, then other tokens."""
    cache = runner.new_cache(len(ids))
    descend(runner, ids[:, :8], cache)
    runner.run(ids[:, 8:10], *cuts(runner)[0], cache=cache)
    kept = [8 - r for r in range(len(ids))]
    cache.fall_back(kept)
    other = ids.flip(1)
    rows = [torch.cat([ids[r, :k], other[r, k:]]) for r, k in enumerate(kept)]
    tokens, valid = pad([row[k:] for row, k in zip(rows, kept, strict=True)], "right")
    hidden = descend(runner, tokens, cache, valid=valid)
    return [(row, hidden[r][valid[r]]) for r, row in enumerate(rows)]


SCENARIOS: dict[str, Scenario] = {
    "stepwise": stepwise,
    "deferred": deferred,
    "ragged, padded left": ragged("left"),
    "ragged, padded right": ragged("right"),
    "fallen back": fallen_back,
}


def pad(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths, with 0 as padding, and say what is not padding."""
    width = max(len(row) for row in rows)
    padded = rows[0].new_zeros(len(rows), width, *rows[0].shape[1:])
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for r, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        padded[r, columns], valid[r, columns] = row, True
    return padded, valid


@torch.no_grad()
def full_depth(model: Any, runner: DepthRunner, tokens: Tensor) -> Tensor:
    """The last layer's output of one plain forward over one row, in float32, seen by a hook."""
    seen: list[Tensor] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output)[0].float())

    handle = runner.parts.layers[-1].register_forward_hook(hook)
    try:
        model(tokens[None], use_cache=False)
    finally:
        handle.remove()
    return seen[0]


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the scale of the hidden state."""
    return float((got.float() - expected).abs().max() / expected.abs().max())
