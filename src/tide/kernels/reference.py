"""The meaning of each operation, in torch alone: what every faster version must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from tide.kernels.arguments import Confidence, Head, Norm, Router


def scaled(logits: Tensor, multiplier: float, cap: float) -> Tensor:
    """Logits times a factor, and softly capped; no cap if it is 0."""
    if multiplier != 1:
        logits = logits * multiplier
    if cap:
        logits = torch.tanh(logits / cap) * cap
    return logits


def normed(states: Tensor, norm: Norm) -> Tensor:
    """States after a norm, `[..., hidden]`, in their dtype."""
    if norm.norm == "none":
        return states
    weight, bias = (None if t is None else t.float() for t in norm[1:3])
    wide, size = states.float(), states.shape[-1:]
    if norm.norm == "layer":
        return layer_norm(wide, size, weight, bias, norm.norm_eps).to(states)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.norm_eps)
    return (wide if weight is None else wide * weight).to(states)


def top_of(logits: Tensor, scores: bool) -> tuple[Tensor, Tensor]:
    """The largest of logits, `[n, v]`, and log-probabilities, as `top_token` returns them."""
    tokens = logits.argmax(-1)
    if not scores:
        return tokens, torch.zeros(len(logits), 0, device=logits.device)
    logits = logits.float()
    return tokens, logits.topk(2, dim=-1).values - logits.logsumexp(-1, keepdim=True)


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
    wanted = wanted != 0
    weight, bias, *scales = head
    tokens = torch.zeros(len(states), dtype=torch.long, device=states.device)
    tops = torch.zeros(len(states), 2 if scores else 0, device=states.device)
    if states.device.type == "cpu":
        chosen = wanted.nonzero().squeeze(1)
        if not len(chosen):
            return tokens, tops
        some = states if len(chosen) == len(states) else states[chosen]
        found = top_of(scaled(linear(normed(some, norm), weight, bias), *scales), scores)
        return tokens.index_copy_(0, chosen, found[0]), tops.index_copy_(0, chosen, found[1])
    found = top_of(scaled(linear(normed(states, norm), weight, bias), *scales), scores)
    return torch.where(wanted, found[0], tokens), torch.where(wanted[:, None], found[1], tops)


def router_logits(states: Tensor, router: Router) -> Tensor:
    """What a router gives for states, before its sigmoid, `[n, hidden]` to `[n]`, in float32."""
    norm, down, down_bias, up, up_bias, eps, _ = router
    if norm is None or down is None or up is None:
        return torch.zeros(len(states), device=states.device)
    inner = silu(linear(normed(states.to(down), Norm("rms", norm, None, eps)), down, down_bias))
    return linear(inner, up[None], up_bias).squeeze(1).float()


def confidence_features(
    tokens: Tensor, tops: Tensor | None, routed: Tensor, notes: Tensor
) -> Tensor:
    """What a confidence model may look at, apart from candidates, `[n, CONFIDENCE_FEATURES]`.

    Args:
        tokens: predicted, as token ids, `[n]`.
        tops: log-probabilities of the exit head's first and second token, `[n, 2]`; None for zeros.
        routed: the router's logits, `[n]`.
        notes: of the tokens, `[n, 5]`: whether it may exit, then an `NGramPrediction`, whose
            chance is in 255ths.
    """
    _, context, matched, table, chance = notes.unbind(-1)
    if tops is None:
        head = [torch.zeros_like(routed)] * 2
    else:
        surest = tops[:, 0].clamp_max(-1e-6)
        head = [(surest - torch.log(-torch.expm1(surest))).clamp(-10, 10),
                (tops[:, 0] - tops[:, 1]).clamp_max(10)]  # fmt: skip
    context, table = (
        torch.where(other < 0, 0.0, torch.where(tokens == other, 1.0, -1.0))
        for other in (context, table)
    )
    contexts = [context * (matched == n) for n in (3, 2, 1)]
    tables = [table.clamp_min(0) * (chance / 255), (-table).clamp_min(0) * (chance / 255)]
    return torch.stack([*head, routed, *contexts, *tables], -1)


def _confident(
    exits: Tensor, scores: Tensor, features: Tensor, confidence: Confidence
) -> tuple[Tensor, Tensor]:
    """Exits and scores after a confidence model, if there is one."""
    inner, inner_bias, outer, outer_bias, threshold = confidence
    if inner is None or outer is None:
        return exits, scores
    hidden = silu(linear(features, inner[:, : features.shape[1]], inner_bias))
    confident = linear(hidden, outer[None], outer_bias).squeeze(1).sigmoid()
    scores = torch.where(exits, confident, scores)
    return exits & (scores >= threshold), scores


def score_exits(
    states: Tensor,
    notes: Tensor,
    candidates: Tensor,
    previous: Tensor,
    router: Router,
    norm: Norm,
    head: Head,
    confidence: Confidence,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide which tokens exit, from their states and a few candidate tokens each.

    Args:
        states: at a checkpoint, `[n, hidden]`.
        notes: of the tokens, `[n, 5]`; see `confidence_features`.
        candidates: token ids, `[n, c]`, any number of them; -1 for none.
        previous: logits of the candidates at the checkpoint before, `[n, c]`.
        router: of the checkpoint; it may decide, or be a feature.
        norm: before the head.
        head: of which only the candidates' vectors are read.
        confidence: with `CONFIDENCE_FEATURES`, then of all candidates the logits, then their
            probabilities among themselves, then their changes since `previous`.

    Returns:
        The decision, `[n, 3]`: whether a token exits, as which candidate, and the confidence (NaN
        where none was computed); the router's logits, `[n]`; the logits of the candidates,
        `[n, c]`, 0 for none.
    """
    exits = notes[:, 0] != 0
    scores = torch.full((len(states),), torch.nan, device=states.device)
    routed = router_logits(states, router)
    if router.router_threshold is not None:
        scores = routed.sigmoid()
        exits = exits & (scores >= router.router_threshold)
    there, weight, bias = candidates >= 0, head.head, head.head_bias
    vectors = weight[candidates.clamp_min(0)].to(states)  # [n, c, hidden]
    logits = (vectors * normed(states, norm)[:, None]).float().sum(-1)
    if bias is not None:
        logits = logits + bias[candidates.clamp_min(0)].float()
    logits = torch.where(there, scaled(logits, head.multiplier, head.cap), 0.0)
    tokens = torch.zeros_like(notes[:, 0])
    ranked = logits.masked_fill(~there, -torch.inf)
    if candidates.shape[1]:
        tokens = candidates.gather(1, ranked.argmax(1, keepdim=True)).squeeze(1).clamp_min(0)
    chances = torch.where(there, ranked.softmax(1), 0.0)  # NaN where there is no candidate at all
    changes = torch.where(there, logits - previous, 0.0)
    features = confidence_features(tokens, None, routed, notes)
    features = torch.cat([features, logits, chances, changes], 1)
    exits, scores = _confident(exits, scores, features, confidence)
    return torch.stack([exits.float(), tokens.float(), scores], -1), routed, logits


def confirm_exits(
    states: Tensor,
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
        states: transformed by the exit head, `[n, hidden]`.
        notes: of the tokens, `[n, 5]`; see `confidence_features`.
        decision, routed: from `score_exits`.
        norm: before the head.
        head: over the vocabulary, or some of it.
        vocabulary: token ids of its numbers, `[v]`; None if they are.
        confidence: with `CONFIDENCE_FEATURES`.
        top_probability: the least.

    Returns:
        The decision, `[n, 3]`; see `score_exits`.
    """
    index, tops = top_token(states, decision[:, 0], norm, head, True)
    tokens = index if vocabulary is None else vocabulary[index]
    exits, scores = decision[:, 0] != 0, decision[:, 2]
    features = confidence_features(tokens, tops, routed, notes)
    exits, scores = _confident(exits, scores, features, confidence)
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
        buffers: keys and values of all layers, `[sequences, heads, slots, dim]` each, changed.
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
