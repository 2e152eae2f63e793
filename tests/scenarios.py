"""The ways in which tokens may pass the layers at different times, all ending at full depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tide.models.cache import WaterlineCache
from tide.models.runner import DepthRunner, first_tensor
from tide.models.tokens import TokenBatch

# What a scenario returns: for each sequence its tokens, and the last layer's output for the latest
# of them.
Outcome = list[tuple[Tensor, Tensor]]
Scenario = Callable[[DepthRunner, Tensor], Outcome]


def cuts(runner: DepthRunner) -> tuple[tuple[int, int], ...]:
    """Three ranges that together are the whole depth."""
    n = runner.n_layers
    return (0, n // 3), (n // 3, 2 * n // 3), (2 * n // 3, n)


def descend(
    runner: DepthRunner,
    tokens: TokenBatch,
    cache: WaterlineCache,
    *,
    ranges: Sequence[tuple[int, int]] | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Run tokens through consecutive ranges, one after the other."""
    for lo, hi in ranges or cuts(runner):
        hidden = runner.run(tokens, lo, hi, cache=cache, hidden=hidden)
    assert hidden is not None
    return hidden


def stepwise(runner: DepthRunner, ids: Tensor) -> Outcome:
    """(a) Prefill, then one-token steps, all split into three ranges."""
    cache = runner.new_cache(len(ids))
    states = [descend(runner, TokenBatch(ids[:, :5]), cache)]
    for t in range(5, ids.shape[1]):
        states.append(descend(runner, TokenBatch(ids[:, t : t + 1]), cache))
    return list(zip(ids, torch.cat(states, 1), strict=True))


def deferred(runner: DepthRunner, ids: Tensor) -> Outcome:
    """(b) Tokens wait after the first range, then pass the rest together."""
    cache = runner.new_cache(len(ids))
    descend(runner, TokenBatch(ids[:, :5]), cache)
    first, *rest = cuts(runner)
    waiting = [
        runner.run(TokenBatch(ids[:, t : t + 1]), *first, cache=cache)
        for t in range(5, ids.shape[1])
    ]
    hidden = torch.cat(waiting, 1)
    hidden = descend(runner, TokenBatch(ids[:, 5:]), cache, ranges=rest, hidden=hidden)
    return list(zip(ids, hidden, strict=True))


def ragged(padding_side: str) -> Scenario:
    """(c) Three prompts of different lengths; each sequence defers another number of tokens."""

    def scenario(runner: DepthRunner, ids: Tensor) -> Outcome:
        prompts, defers = (6, 3, 5), (1, 4, 2)
        sequences = [
            ids[s % len(ids)].roll(s)[: p + d]
            for s, (p, d) in enumerate(zip(prompts, defers, strict=True))
        ]
        cache = runner.new_cache(3)
        begun = [ids[:p] for ids, p in zip(sequences, prompts, strict=True)]
        rest = [ids[p:] for ids, p in zip(sequences, prompts, strict=True)]
        descend(runner, pack(begun, padding_side), cache)
        first, *others = cuts(runner)
        waiting: list[list[Tensor]] = [[], [], []]
        for step in range(max(defers)):
            tokens = pack([ids[step : step + 1] for ids in rest], padding_side)
            hidden = runner.run(tokens, *first, cache=cache)
            for s in range(3):
                waiting[s] += [hidden[s][tokens.valid[s]]]
        tokens = pack(rest, padding_side)
        states, _ = pad([torch.cat(w) for w in waiting], padding_side)
        hidden = descend(runner, tokens, cache, ranges=others, hidden=states)
        return [(sequences[s], hidden[s][tokens.valid[s]]) for s in range(3)]

    return scenario


def rolled_back(runner: DepthRunner, ids: Tensor) -> Outcome:
    """(d) Roll back by k tokens, another k in each sequence, then go on with other tokens."""
    cache = runner.new_cache(len(ids))
    descend(runner, TokenBatch(ids[:, :8]), cache)
    runner.run(TokenBatch(ids[:, 8:10]), *cuts(runner)[0], cache=cache)
    kept = [8 - s for s in range(len(ids))]
    cache.rollback(kept)
    other = ids.flip(1)
    sequences = [torch.cat([ids[s, :k], other[s, k:]]) for s, k in enumerate(kept)]
    tokens = pack([s[k:] for s, k in zip(sequences, kept, strict=True)], "right")
    hidden = descend(runner, tokens, cache)
    return [(ids, hidden[s][tokens.valid[s]]) for s, ids in enumerate(sequences)]


SCENARIOS: dict[str, Scenario] = {
    "stepwise": stepwise,
    "deferred": deferred,
    "ragged, padded left": ragged("left"),
    "ragged, padded right": ragged("right"),
    "rolled back": rolled_back,
}


def pad(sequences: Sequence[Tensor], padding_side: str) -> tuple[Tensor, Tensor]:
    """Sequences of different lengths as one tensor, padded with 0, and what is not padding."""
    longest = max(map(len, sequences))
    padded = sequences[0].new_zeros(len(sequences), longest, *sequences[0].shape[1:])
    valid = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for s, sequence in enumerate(sequences):
        first = longest - len(sequence) if padding_side == "left" else 0
        here = slice(first, first + len(sequence))
        padded[s, here], valid[s, here] = sequence, True
    return padded, valid


def pack(sequences: Sequence[Tensor], padding_side: str) -> Any:
    """Token ids of sequences of different lengths as one batch."""
    return TokenBatch(*pad(sequences, padding_side))


@torch.no_grad()
def full_depth(model: Any, runner: DepthRunner, ids: Tensor) -> Tensor:
    """The last layer's output in one forward pass of the model over one sequence, in float32."""
    seen: list[Tensor] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        seen.append(first_tensor(output)[0].float())

    handle = runner.parts.layers[-1].register_forward_hook(hook)
    try:
        model(ids[None], use_cache=False)
    finally:
        handle.remove()
    return seen[0]


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the scale of the hidden state."""
    return float((got.float() - expected).abs().max() / expected.abs().max())
