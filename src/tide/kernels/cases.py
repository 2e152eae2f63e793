"""One example of each operation, at a given size: to compile, to check and to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tide.kernels.arguments import (
    CANDIDATE_FEATURES,
    CONFIDENCE_FEATURES,
    Candidates,
    Confidence,
    Head,
    Norm,
    Router,
)
from tide.kernels.arithmetic import normed

OPERATIONS = (
    "score_exits", "confirm_exits", "top_token", "compact", "exit_transform", "append_kv",
    "gather_path",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of what is done with it; by default, of a model of 8 billion weights."""

    tokens: int = 8
    hidden: int = 4096
    bottleneck: int = 128
    vocabulary: int = 32768
    candidates: int = 128
    width: int = 16
    layers: int = 32
    sequences: int = 4
    heads: int = 8
    dim: int = 128
    slots: int = 1024


TINY = Sizes(5, 123, 16, 301, 11, 16, 2, 2, 2, 16, 40)


@dataclass(frozen=True)
class Case:
    """An operation, and what it is called with.

    Attributes:
        operation: its name.
        arguments: of the function of that name.
        moved: bytes that must be read or written, whatever the kernel does.
    """

    operation: str
    arguments: tuple[Any, ...]
    moved: int

    def copied(self) -> tuple[Any, ...]:
        """The arguments, with what an operation changes copied."""
        return tuple(_copied(argument) for argument in self.arguments)


def _copied(argument: Any) -> Any:
    if isinstance(argument, list):
        return [tensor.clone() for tensor in argument]
    return argument.clone() if type(argument) is Tensor else argument


def size_of(*tensors: Tensor | None) -> int:
    """Their bytes."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def make_cases(dtype: torch.dtype, device: torch.device | str, sizes: Sizes) -> list[Case]:
    """Every operation once, on random numbers."""
    z = sizes
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, scale: float = 1.0, wide: bool = False) -> Tensor:
        if torch.device(device).type == "meta":
            return torch.empty(shape, dtype=torch.float32 if wide else dtype, device=device)
        made = torch.randn(shape, generator=generator) * scale
        return made.to(torch.float32 if wide else dtype).to(device)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    root = z.hidden**-0.5
    states, read = numbers(z.tokens, z.hidden), numbers(z.tokens, z.hidden)
    lines = torch.arange(z.tokens)
    router = Router(
        numbers(z.hidden, wide=True), numbers(z.bottleneck, z.hidden, scale=root, wide=True),
        numbers(z.bottleneck, wide=True), numbers(z.bottleneck, wide=True), numbers(1, wide=True),
        1e-6, None,
    )  # fmt: skip
    norm = Norm("rms", numbers(z.hidden), None, 1e-6)
    head = Head(numbers(z.vocabulary, z.hidden, scale=root), numbers(z.vocabulary), 1.0, 30.0)
    # One token of each is likelier than the others, so that rounding does not decide.
    head.head[lines * 7 + 1] += 0.7 * root * normed(read, norm)
    prefilter, confidence = (
        Confidence(
            numbers(z.width, features, scale=0.1, wide=True), numbers(z.width, wide=True),
            numbers(z.width, wide=True), numbers(1, wide=True), 0.4,
        )
        for features in (CANDIDATE_FEATURES, CONFIDENCE_FEATURES)
    )  # fmt: skip
    notes = torch.stack([lines % 4 != 0, lines, lines % 4, lines - 1, lines * 7 % 256], 1).long()
    notes = notes.to(device)
    decision = torch.stack([(lines % 3 != 0).float(), lines.float(), lines / z.tokens], 1).to(
        device
    )
    places = torch.arange(z.vocabulary + 1)
    places[2::5] = places[-1] = -1
    candidates = Candidates(
        numbers(z.candidates, z.hidden, scale=root), numbers(z.candidates), places.to(device)
    )
    routed = numbers(z.tokens, wide=True)
    weight, bias = numbers(z.hidden, z.hidden, scale=root), numbers(z.hidden)
    some = torch.where(lines % 4 == 1, -1, z.tokens - 1 - lines).to(device)
    ids = torch.randperm(z.vocabulary, generator=generator).to(device)
    cache = [numbers(z.sequences, z.heads, z.slots, z.dim) for _ in range(2 * z.layers)]
    new = [numbers(z.sequences, z.heads, z.tokens, z.dim) for _ in range(2)]
    first = torch.arange(z.sequences)
    slots = (first[:, None] * 3 + lines).to(device)
    counts = (first + 1).clamp_max(z.tokens)
    path = (2 * lines + 1).repeat(z.sequences, 1)
    nodes = int(counts.sum()) * 2 * z.layers * z.heads * z.dim * states.element_size()
    vectors = z.tokens * 2 * (z.hidden + 1) * states.element_size()
    exits = (lines % 3 == 1).to(device)
    return [
        Case("score_exits", (states, read, notes, router, norm, head, candidates, prefilter),
             size_of(states, read, notes, *router[:5], norm[1], *candidates[:2], *prefilter[:4],
                     decision, routed) + vectors),
        Case("confirm_exits",
             (read, notes, decision, routed, norm, head, ids, confidence, 0.01),
             size_of(read, notes, decision, decision, norm[1], *head[:2], *confidence[:4])),
        Case("top_token", (read, exits, norm, head, True),
             size_of(read, exits, norm[1], *head[:2]) + z.tokens * 16),
        Case("compact", (exits,), size_of(exits, lines) + 16),
        Case("exit_transform", (states, weight, bias, norm, some, torch.zeros_like(states)),
             size_of(states, weight, bias, norm[1], some, states)),
        Case("append_kv", (*cache[:2], *new, slots), 2 * size_of(*new) + size_of(slots)),
        Case("gather_path", (cache, path.to(device), first.to(device), counts.to(device)),
             2 * nodes + size_of(path)),
    ]  # fmt: skip
