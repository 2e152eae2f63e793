"""The kernel of a gate: router, candidate tokens, confidence model, thresholds."""

from __future__ import annotations

import triton
import triton.language as tl

from tide.kernels.device.arithmetic import moments, narrow, normalise, product, scale_logits, silu


@triton.jit
def add_feature(total, feature, inner, number, features, unit, width):
    """Add what a feature gives to the inner layer of a confidence model."""
    weights = tl.load(inner + unit * features + number, unit < width, 0.0)
    return total + feature[:, None] * weights[None, :]


@triton.jit
def add_ngrams(total, token, routed, notes, live, inner, features, unit, width):
    """Add the features of the router and of n-grams; `notes` points to the tokens' notes."""
    total = add_feature(total, routed, inner, 2, features, unit, width)
    context = tl.load(notes + 1, live, -1)
    matched = tl.load(notes + 2, live, 0)
    table = tl.load(notes + 3, live, -1)
    chance = tl.load(notes + 4, live, 0).to(tl.float32) / 255
    vote = tl.where(context < 0, 0.0, tl.where(token == context, 1.0, -1.0))
    for n in tl.static_range(3):
        feature = tl.where(matched == 3 - n, vote, 0.0)
        total = add_feature(total, feature, inner, 3 + n, features, unit, width)
    vote = tl.where(table < 0, 0.0, tl.where(token == table, 1.0, -1.0))
    total = add_feature(total, tl.maximum(vote, 0.0) * chance, inner, 6, features, unit, width)
    return add_feature(total, tl.maximum(-vote, 0.0) * chance, inner, 7, features, unit, width)


@triton.jit
def confidence_of(total, outer, outer_bias, unit, width):
    """The confidence, from the inner layer of a confidence model."""
    weights = tl.load(outer + unit, unit < width, 0.0)
    return tl.sigmoid(tl.sum(silu(total) * weights[None, :], 1) + tl.load(outer_bias))


@triton.jit
def score_exits(
    x, x_stride, notes, notes_stride, n, hidden,
    candidates, previous, router_norm, down, down_bias, up, up_bias, router_eps, router_threshold,
    norm_weight, norm_bias, norm_eps, head, head_bias, multiplier, cap,
    inner, inner_bias, outer, outer_bias, features, width, threshold,
    decision, router_logits, logits_out, bottleneck, count,
    ROUTED: tl.constexpr, NORM: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr, CANDIDATES: tl.constexpr, DECIDES: tl.constexpr,
):  # fmt: skip
    """See `reference.score_exits`; one program for `TOKENS` tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < n
    lines = token.to(tl.int64) * x_stride
    notes += token * notes_stride
    exits = (tl.load(notes, live, 0) != 0).to(tl.int1)
    score = tl.full((TOKENS,), float("nan"), tl.float32)
    routed = tl.zeros((TOKENS,), tl.float32)
    inside = tl.arange(0, BLOCK_B)
    number = tl.arange(0, BLOCK_C)
    sums = tl.zeros((TOKENS, BLOCK_B), tl.float32)
    logits = tl.zeros((TOKENS, BLOCK_C), tl.float32)
    zero, squares = moments(x, lines, live, hidden, False, BLOCK)
    mean, variance = zero, squares
    listed = live[:, None] & (number < count)[None, :]
    ids = tl.full((TOKENS, BLOCK_C), -1, tl.int64)
    if CANDIDATES:
        ids = tl.load(candidates + token[:, None] * count + number[None, :], listed, -1)
        if NORM == 2:
            mean, variance = moments(x, lines, live, hidden, True, BLOCK)
    there = ids >= 0
    vectors = tl.where(there, ids, 0) * hidden
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = live[:, None] & (at < hidden)[None, :]
        part = tl.load(x + lines[:, None] + at[None, :], here, 0.0)
        if ROUTED:
            own = normalise(part, zero, squares, router_eps, router_norm, None, at, hidden)
            weights = tl.load(
                down + inside[None, :] * hidden + at[:, None],
                (inside < bottleneck)[None, :] & (at < hidden)[:, None], 0.0,
            )  # fmt: skip
            sums = product(narrow(own, weights.dtype), weights, sums, WIDE)
        if CANDIDATES:
            read = part.to(tl.float32)
            if NORM > 0:
                read = normalise(part, mean, variance, norm_eps, norm_weight, norm_bias, at, hidden)
            read = narrow(read, part.dtype).to(tl.float32)
            some = there[:, :, None] & (at < hidden)[None, None, :]
            gathered = tl.load(head + vectors[:, :, None] + at[None, None, :], some, 0.0)
            logits += tl.sum(gathered.to(tl.float32) * read[:, None, :], 2)
    if ROUTED:
        sums += tl.load(down_bias + inside, inside < bottleneck, 0.0).to(tl.float32)[None, :]
        weights = tl.load(up + inside, inside < bottleneck, 0.0).to(tl.float32)
        routed = tl.sum(silu(sums) * weights[None, :], 1) + tl.load(up_bias).to(tl.float32)
        if DECIDES:
            score = tl.sigmoid(routed)
            exits = exits & (score >= router_threshold)
    best = tl.zeros((TOKENS,), tl.int64)
    if CANDIDATES:
        if head_bias is not None:
            logits += tl.load(head_bias + tl.where(there, ids, 0), there, 0.0).to(tl.float32)
        logits = tl.where(there, scale_logits(logits, multiplier, cap, CAPPED), 0.0)
        ranked = tl.where(there, logits, float("-inf"))
        first = tl.argmax(ranked, 1, tie_break_left=True)
        best = tl.maximum(tl.sum(tl.where(number[None, :] == first[:, None], ids, 0), 1), 0)
        tl.store(logits_out + token[:, None] * count + number[None, :], logits, listed)
    if inner is not None:
        unit = tl.arange(0, BLOCK_W)
        total = tl.load(inner_bias + unit, unit < width, 0.0)[None, :]
        total = add_ngrams(total, best, routed, notes, live, inner, features, unit, width)
        if CANDIDATES:
            top = tl.max(ranked, 1)
            chances = tl.where(there, tl.exp(ranked - top[:, None]), 0.0)
            chances = chances / tl.maximum(tl.sum(chances, 1), 1e-30)[:, None]
            before = tl.load(
                previous + token[:, None] * count + number[None, :], listed & there, 0.0
            )
            changes = tl.where(there, logits - before, 0.0)
            for c in range(0, count):
                one = (number == c)[None, :]
                value = tl.sum(tl.where(one, logits, 0.0), 1)
                total = add_feature(total, value, inner, 8 + c, features, unit, width)
                value = tl.sum(tl.where(one, chances, 0.0), 1)
                total = add_feature(total, value, inner, 8 + count + c, features, unit, width)
                value = tl.sum(tl.where(one, changes, 0.0), 1)
                total = add_feature(total, value, inner, 8 + 2 * count + c, features, unit, width)
        confident = confidence_of(total, outer, outer_bias, unit, width)
        score = tl.where(exits, confident, score)
        exits = exits & (score >= threshold)
    tl.store(decision + token * 3, exits.to(tl.float32), live)
    tl.store(decision + token * 3 + 1, best.to(tl.float32), live)
    tl.store(decision + token * 3 + 2, score, live)
    tl.store(router_logits + token, routed, live)
