"""The meaning of each operation, in torch: what every faster version must equal.

Only `linear` may be our own on a CPU, once there are compiled graphs; see `linear.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tide.kernels.arguments import Candidates, Confidence, Head, Norm, Router
from tide.kernels.arithmetic import (
    candidate_features,
    confidence_features,
    confidences,
    normed,
    router_logits,
    scaled,
    successors_of,
    top_of,
)
from tide.kernels.linear import linear


def top_token(
    states: Tensor, wanted: Tensor, norm: Norm, head: Head, scores: bool
) -> tuple[Tensor, Tensor]:
    """The likeliest token of each state that is wanted. On a CPU, the others cost nothing.

    Args:
        states: `[n, hidden]`.
        wanted: not 0 where it is, `[n]`.
        norm: before the head.
        head: over the vocabulary, or some of it.
        scores: whether log-probabilities are wanted.

    Returns:
        The number of the token in the head, `[n]`, and the log-probabilities of the first and the
        second, `[n, 2]` (`[n, 0]` without scores); both 0 where not wanted.
    """
    weight, bias, *scales = head
    tokens = torch.zeros(len(states), dtype=torch.long, device=states.device)
    size = len(states), 2 if scores else 0
    tops = torch.zeros(size, dtype=torch.float32, device=states.device)
    some, chosen = _only(states, wanted)
    if not len(some):
        return tokens, tops
    found = top_of(scaled(linear(normed(some, norm), weight, bias), *scales), scores)
    if chosen is not None:
        return tokens.index_copy_(0, chosen, found[0]), tops.index_copy_(0, chosen, found[1])
    wanted = wanted != 0
    return torch.where(wanted, found[0], tokens), torch.where(wanted[:, None], found[1], tops)


def top_successors(states: Tensor, wanted: Tensor, head: Head, count: int) -> Tensor:
    """As `successors_of`, of each state that is wanted, `[n, 1 + count]`; on a CPU, 0 of others.

    Args:
        states: normed, `[n, hidden]`.
        wanted: not 0 where it is, `[n]`.
        head: over the vocabulary.
        count: how many successors.
    """
    weight, bias, *scales = head
    some, chosen = _only(states, wanted)
    every = torch.zeros(len(states), 1 + count, dtype=torch.long, device=states.device)
    if not len(some):
        return every
    found = successors_of(scaled(linear(some, weight, bias), *scales), count)
    return found if chosen is None else every.index_copy_(0, chosen, found)


def _only(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
    """The states that are wanted and which they are; None for all, as always beside a CPU."""
    if states.device.type != "cpu":
        return states, None
    chosen = wanted.nonzero().squeeze(1)
    return (states, None) if len(chosen) == len(states) else (states[chosen], chosen)


def score_exits(
    states: Tensor,
    read: Tensor,
    notes: Tensor,
    router: Router,
    norm: Norm,
    head: Head,
    candidates: Candidates,
    prefilter: Confidence,
) -> tuple[Tensor, Tensor]:
    """Decide which tokens may exit without the vocabulary: by a few candidates, and the router.

    Args:
        states: at a checkpoint, `[n, hidden]`; the router takes them.
        read: the same, transformed by the exit head; the candidates are read from them.
        notes: of the tokens, `[n, 5]`: whether it may exit, then what n-grams predict.
        router: of the checkpoint; it may decide, or be a feature.
        norm: before the head.
        head: the exit head, over the vocabulary or some of it.
        candidates: of which few vectors of the head are read; none if there is no prefilter.
        prefilter: from `candidate_features` to the chance that the exit is correct.

    Returns:
        The decision, `[n, 3]`: whether a token may exit, 0, and the last score that decided (NaN
        where none did); and the router's logits, `[n]`.
    """
    exits = notes[:, 0] != 0
    scores = states.new_full((len(states),), torch.nan, dtype=torch.float32)
    if prefilter.inner is not None:
        features = candidate_features(normed(read, norm), notes[:, 1:], head, candidates)
        scores = confidences(features, prefilter)
        exits = exits & (scores >= prefilter.threshold)
    routed = router_logits(states, router)
    if router.router_threshold is not None:
        scores = routed.sigmoid()
        exits = exits & (scores >= router.router_threshold)
    return torch.stack([exits.float(), torch.zeros_like(scores), scores], -1), routed


def confirm_exits(
    read: Tensor,
    notes: Tensor,
    decision: Tensor,
    routed: Tensor,
    norm: Norm,
    head: Head,
    vocabulary: Tensor | None,
    confidence: Confidence,
    top_probability: float,
) -> Tensor:
    """Decide again for the tokens that a decision lets exit, now from the whole exit head.

    Args:
        read: states transformed by the exit head, `[n, hidden]`.
        notes: of the tokens, `[n, 5]`; see `score_exits`.
        decision, routed: from `score_exits`.
        norm: before the head.
        head: over the vocabulary, or some of it.
        vocabulary: token ids of its numbers, `[v]`; None if they are.
        confidence: from `confidence_features` to the chance that the exit is correct.
        top_probability: the least.

    Returns:
        The decision, `[n, 3]`: whether a token exits, as what, and the last score that decided.
    """
    index, tops = top_token(read, decision[:, 0], norm, head, True)
    tokens = index if vocabulary is None else vocabulary[index]
    exits, scores = decision[:, 0] != 0, decision[:, 2]
    if confidence.inner is not None:
        features = confidence_features(tokens, tops, routed, notes[:, 1:])
        scores = torch.where(exits, confidences(features, confidence), scores)
        exits = exits & (scores >= confidence.threshold)
    exits = exits & (tops[:, 0].exp() >= top_probability)
    return torch.stack([exits.float(), tokens.float(), scores], -1)


def compact(exits: Tensor) -> tuple[Tensor, Tensor]:
    """Split tokens into those that continue and those that exit; the host learns nothing of it.

    Args:
        exits: not 0 where a token exits, `[n]`.

    Returns:
        Numbers of the tokens, `[n]`: those that continue, then those that exit, each in order; and
        how many there are of both, `[2]`.
    """
    exited = (exits != 0).long()
    order = exited.argsort(stable=True)
    return order, torch.stack([len(exited) - exited.sum(), exited.sum()])


def exit_transform(
    states: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    places: Tensor | None,
    out: Tensor,
) -> None:
    """Write states, after the residual affine map of an exit head and a norm, to where they belong.

    Args:
        states: `[n, hidden]`.
        weight, bias: of the map, `[hidden, hidden]` and `[hidden]`; None for no map.
        norm: after it.
        places: lines of `out`, `[n]`, each of them once; -1 for none. None if they are the same.
        out: `[m, hidden]`, changed.
    """
    if weight is not None:
        states = states + linear(states.to(weight), weight, bias).to(states)
    states = normed(states, norm)
    if places is None:
        out.copy_(states)
        return
    # What belongs nowhere is written as what is there already, in one line that is its own.
    kept = torch.cat([out, out[:1]])
    lines = torch.where(places < 0, len(out), places)
    out.copy_(kept.index_copy(0, lines, states.to(out))[:-1])


def append_kv(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    """Write KV of new tokens to the slots of their sequences.

    Args:
        keys, values: buffers, `[sequences, heads, slots, dim]`, changed.
        new_keys, new_values: `[sequences, heads, new_tokens, dim]`.
        slots: `[sequences, new_tokens]`.
    """
    lines = torch.arange(slots.shape[0], device=slots.device)[:, None]
    keys[lines, :, slots] = new_keys.transpose(1, 2)
    values[lines, :, slots] = new_values.transpose(1, 2)


def gather_path(buffers: list[Tensor], path: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Move KV of the accepted path of each sequence's draft tree to the end of its prefix.

    Args:
        buffers: keys and values of the layers that hold it, `[sequences, heads, slots, dim]` each,
            changed.
        path: numbers of the accepted nodes in their tree, ascending, `[sequences, longest]`.
        starts: slot of each tree's first node, `[sequences]`.
        counts: nodes of each path, `[sequences]`.
    """
    # Beyond the end of a path, its last move is made again; an empty one moves a slot to itself.
    last = (counts[:, None] - 1).clamp_min(0)
    steps = torch.arange(path.shape[1], device=path.device).minimum(last)
    nodes = torch.where(counts[:, None] > 0, path.gather(1, steps), steps)
    lines = torch.arange(path.shape[0], device=path.device)[:, None]
    for buffer in buffers:
        limit = buffer.shape[2] - 1
        source, target = (
            (starts[:, None] + index).clamp_max(limit).to(buffer.device) for index in (nodes, steps)
        )
        at = lines.to(buffer.device)
        buffer[at, :, target] = buffer[at, :, source]
