"""The operations as custom operators of torch, `tide::...`: a compiled graph holds each as it is.

Which version runs is decided at each call, by `dispatch.py`. What they mean is in `reference.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from tide.kernels import reference
from tide.kernels.arguments import Candidates, Confidence, Head, Norm, Router
from tide.kernels.dispatch import choose, implementation


@custom_op("tide::score_exits", mutates_args=())
def _score_exits(
    states: Tensor, read: Tensor, notes: Tensor,
    router_norm: Tensor | None, down: Tensor | None, down_bias: Tensor | None, up: Tensor | None,
    up_bias: Tensor | None, router_eps: float, router_threshold: float | None,
    norm: str, norm_weight: Tensor | None, norm_bias: Tensor | None, norm_eps: float,
    head: Tensor, head_bias: Tensor | None, multiplier: float, cap: float,
    fixed: Tensor | None, fixed_bias: Tensor | None, places: Tensor | None,
    inner: Tensor | None, inner_bias: Tensor | None, outer: Tensor | None,
    outer_bias: Tensor | None, threshold: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return implementation("score_exits", states)(
        states, read, notes,
        Router(router_norm, down, down_bias, up, up_bias, router_eps, router_threshold),
        Norm(norm, norm_weight, norm_bias, norm_eps), Head(head, head_bias, multiplier, cap),
        Candidates(fixed, fixed_bias, places),
        Confidence(inner, inner_bias, outer, outer_bias, threshold),
    )  # fmt: skip


@_score_exits.register_fake
def _(states: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    n, wide = states.shape[0], torch.float32
    return states.new_empty(n, 3, dtype=wide), states.new_empty(n, dtype=wide)


@custom_op("tide::confirm_exits", mutates_args=())
def _confirm_exits(
    read: Tensor, notes: Tensor, decision: Tensor, routed: Tensor,
    norm: str, norm_weight: Tensor | None, norm_bias: Tensor | None, norm_eps: float,
    head: Tensor, head_bias: Tensor | None, multiplier: float, cap: float,
    vocabulary: Tensor | None, inner: Tensor | None, inner_bias: Tensor | None,
    outer: Tensor | None, outer_bias: Tensor | None, threshold: float, top_probability: float,
) -> Tensor:  # fmt: skip
    return implementation("confirm_exits", read)(
        read, notes, decision, routed, Norm(norm, norm_weight, norm_bias, norm_eps),
        Head(head, head_bias, multiplier, cap), vocabulary,
        Confidence(inner, inner_bias, outer, outer_bias, threshold), top_probability,
    )  # fmt: skip


@_confirm_exits.register_fake
def _(read: Tensor, notes: Tensor, decision: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(decision)


@custom_op("tide::top_token", mutates_args=())
def _top_token(
    states: Tensor, wanted: Tensor,
    norm: str, norm_weight: Tensor | None, norm_bias: Tensor | None, norm_eps: float,
    head: Tensor, head_bias: Tensor | None, multiplier: float, cap: float, scores: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return implementation("top_token", states)(
        states, wanted, Norm(norm, norm_weight, norm_bias, norm_eps),
        Head(head, head_bias, multiplier, cap), scores,
    )  # fmt: skip


@_top_token.register_fake
def _(states: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return (
        states.new_empty(states.shape[0], dtype=torch.long),
        states.new_empty(states.shape[0], 2 if rest[-1] else 0, dtype=torch.float32),
    )


@custom_op("tide::top_successors", mutates_args=())
def _top_successors(
    states: Tensor, wanted: Tensor, head: Tensor, head_bias: Tensor | None, multiplier: float,
    cap: float, count: int,
) -> Tensor:  # fmt: skip
    return reference.top_successors(states, wanted, Head(head, head_bias, multiplier, cap), count)


@_top_successors.register_fake
def _(states: Tensor, *rest: Any) -> Tensor:
    return states.new_empty(states.shape[0], 1 + rest[-1], dtype=torch.long)


@custom_op("tide::compact", mutates_args=())
def _compact(exits: Tensor) -> tuple[Tensor, Tensor]:
    return implementation("compact", exits)(exits)


@_compact.register_fake
def _(exits: Tensor) -> tuple[Tensor, Tensor]:
    sizes = exits.shape[0], 2
    first, second = (exits.new_empty(size, dtype=torch.long) for size in sizes)
    return first, second


@custom_op("tide::exit_transform", mutates_args=("out",))
def _exit_transform(
    states: Tensor, weight: Tensor | None, bias: Tensor | None,
    norm: str, norm_weight: Tensor | None, norm_bias: Tensor | None, norm_eps: float,
    places: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    of = Norm(norm, norm_weight, norm_bias, norm_eps)
    implementation("exit_transform", states)(states, weight, bias, of, places, out)


@custom_op("tide::append_kv", mutates_args=("keys", "values"))
def _append_kv(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    implementation("append_kv", keys)(keys, values, new_keys, new_values, slots)


@custom_op("tide::gather_path", mutates_args=("buffers",))
def _gather_path(buffers: list[Tensor], path: Tensor, starts: Tensor, counts: Tensor) -> None:
    implementation("gather_path", buffers[0])(buffers, path, starts, counts)


for _changes in (_exit_transform, _append_kv, _gather_path):
    _changes.register_fake(lambda *arguments: None)


def score_exits(
    states: Tensor, read: Tensor, notes: Tensor, router: Router, norm: Norm, head: Head,
    candidates: Candidates, prefilter: Confidence,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `reference.score_exits`."""
    return _score_exits(states, read, notes, *router, *norm, *head, *candidates, *prefilter)


def confirm_exits(
    read: Tensor, notes: Tensor, decision: Tensor, routed: Tensor, norm: Norm, head: Head,
    vocabulary: Tensor | None, confidence: Confidence, top_probability: float,
) -> Tensor:  # fmt: skip
    """See `reference.confirm_exits`."""
    return _confirm_exits(
        read, notes, decision, routed, *norm, *head, vocabulary, *confidence, top_probability
    )


def top_token(
    states: Tensor, wanted: Tensor, norm: Norm, head: Head, scores: bool
) -> tuple[Tensor, Tensor]:
    """See `reference.top_token`."""
    return _top_token(states, wanted, *norm, *head, scores)


def top_successors(states: Tensor, wanted: Tensor, head: Head, count: int) -> Tensor:
    """See `reference.top_successors`, which is all there is."""
    return _top_successors(states, wanted, *head, count)


def compact(exits: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.compact`."""
    return _compact(exits)


def exit_transform(
    states: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm,
    places: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """See `reference.exit_transform`."""
    _exit_transform(states, weight, bias, *norm, places, out)


def append_kv(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    """See `reference.append_kv`."""
    _append_kv(keys, values, new_keys, new_values, slots)


def append_kv_on(device: torch.device, dtype: torch.dtype) -> Any:
    """`append_kv` for a device: the operator where it is a kernel, else what a graph can fuse."""
    return append_kv if choose(device, dtype)[0] == "triton" else reference.append_kv


def gather_path(buffers: list[Tensor], path: Tensor, starts: Tensor, counts: Tensor) -> None:
    """See `reference.gather_path`."""
    _gather_path(buffers, path, starts, counts)
