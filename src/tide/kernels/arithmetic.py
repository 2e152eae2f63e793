"""What the operations compute, in torch alone: norms, logits, features, confidences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from tide.kernels.arguments import Candidates, Confidence, Head, Norm, Router

_GROUP = 32  # logits of which one maximum is taken


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
        return tokens, torch.zeros(len(logits), 0, dtype=torch.float32, device=logits.device)
    logits = logits.float()
    return tokens, logits.topk(2, dim=-1).values - logits.logsumexp(-1, keepdim=True)


def successors_of(logits: Tensor, count: int) -> Tensor:
    """The likeliest token, and the `count` likeliest, `[n, v]` to `[n, 1 + count]`.

    Among equals, the first is the one that `argmax` takes.
    """
    best, size = logits.argmax(-1, keepdim=True), logits.shape[-1]
    if size % _GROUP or size < _GROUP * count:
        return torch.cat([best, logits.topk(count).indices], -1)
    # The largest are in the groups that have the largest maxima: a maximum costs less than a sort.
    groups = logits.unflatten(-1, (_GROUP, size // _GROUP))  # [n, _GROUP, groups]
    found = groups.amax(-2).topk(count).indices  # [n, count]
    some = groups.gather(-1, found[:, None].expand(-1, _GROUP, -1)).flatten(1)
    inside = some.topk(count).indices
    top = inside // count * (size // _GROUP) + found.gather(-1, inside % count)
    return torch.cat([best, top], -1)


def router_logits(states: Tensor, router: Router) -> Tensor:
    """What a router gives for states, before its sigmoid, `[n, hidden]` to `[n]`, in float32."""
    norm, down, down_bias, up, up_bias, eps, _ = router
    if norm is None or down is None or up is None:
        return torch.zeros(len(states), dtype=torch.float32, device=states.device)
    inner = silu(linear(normed(states.to(down), Norm("rms", norm, None, eps)), down, down_bias))
    return linear(inner, up[None], up_bias).squeeze(1).float()


def candidate_features(
    states: Tensor, ngrams: Tensor, head: Head, candidates: Candidates
) -> Tensor:
    """What a prefilter looks at, `[n, CANDIDATE_FEATURES]`.

    Log-probabilities among the candidates of the first, the second, and what context and table
    predict; the logit of the first; how long the context's match is, and the table's chance.
    A prediction that is also among the others counts twice, which is cheaper than to look.

    Args:
        states: normed, `[n, hidden]`.
        ngrams: what n-grams predict, `[n, 4]`: an `NGramPrediction`, its chance in 255ths.
        head: of which only the vectors of what n-grams predict are read.
        candidates: the others.
    """
    fixed, fixed_bias, places = candidates
    assert fixed is not None and places is not None
    place = places[ngrams[:, ::2]]  # of context and table, [n, 2]; of -1, the last
    few = (head.head[place] * states[:, None]).sum(-1)
    if head.head_bias is not None:
        few = few + head.head_bias[place]
    logits = torch.cat([linear(states, fixed, fixed_bias), few], -1)
    logits = scaled(logits, head.multiplier, head.cap).float()
    logits[:, -2:].masked_fill_(place < 0, -torch.inf)
    top = logits.topk(2, dim=-1).values
    # On a CPU, faster than `logsumexp`.
    total = logits[:, :1] - logits.log_softmax(-1)[:, :1]
    chances = torch.cat([top, logits[:, -2:]], -1) - total
    told = ngrams[:, 1::2].float()  # length of the match, and the chance in 255ths
    return torch.cat([chances.clamp_min(-20), top[:, :1], told], -1)


def confidence_features(
    tokens: Tensor, tops: Tensor, routed: Tensor | None, ngrams: Tensor
) -> Tensor:
    """What a confidence model may look at once the head is read, `[n, CONFIDENCE_FEATURES]`.

    Args:
        tokens: the exit head's predictions, as token ids, `[n]`.
        tops: log-probabilities of the exit head's first and second token, `[n, 2]`.
        routed: the router's logits, `[n]`; None if there is no router.
        ngrams: what n-grams predict, `[n, 4]`: an `NGramPrediction`, its chance in 255ths.
    """
    surest, second = tops.float().unbind(-1)
    surest = surest.clamp_max(-1e-6)
    chances = (surest - torch.log(-torch.expm1(surest))).clamp(-10, 10)
    routed = torch.zeros_like(surest) if routed is None else routed.float()
    head_and_router = torch.stack([chances, (surest - second).clamp_max(10), routed], -1)
    others = ngrams[:, ::2]  # of context and table
    # 1 where a prediction agrees, -1 where not, 0 where there is none.
    votes = (2.0 * (tokens[:, None] == others) - 1) * (others >= 0)
    context = votes[:, :1] * (ngrams[:, 1:2] == torch.arange(3, 0, -1, device=ngrams.device))
    table = votes[:, 1:] * (ngrams[:, 3:] / 255)
    return torch.cat([head_and_router, context, table.clamp_min(0), (-table).clamp_min(0)], -1)


def confidences(features: Tensor, model: Confidence) -> Tensor:
    """What a confidence model gives for features, `[n, features]` to `[n]`."""
    inner, inner_bias, outer, outer_bias, _ = model
    assert inner is not None and outer is not None
    hidden = silu(linear(features.to(inner), inner, inner_bias))
    return linear(hidden, outer[None], outer_bias).squeeze(1).sigmoid()
