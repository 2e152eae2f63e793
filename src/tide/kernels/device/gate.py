"""The kernel of a gate without the vocabulary: candidates, prefilter, router, thresholds."""

from __future__ import annotations

import triton
import triton.language as tl

from tide.kernels.device.arithmetic import (
    moments,
    narrow,
    normalise,
    normed_part,
    product,
    scale_logits,
    silu,
)


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
def of_vector(part, head, place, at, hidden):
    """The product of a part of states with one vector of a head for each; 0 for place -1."""
    known = (place >= 0)[:, None] & (at < hidden)[None, :]
    vectors = tl.load(head + place[:, None] * hidden + at[None, :], known, 0.0)
    return tl.sum(part.to(tl.float32) * vectors.to(tl.float32), 1)


@triton.jit
def with_others(first, second, total, other_first, other_second, other_total):
    """The largest two logits and the total of exponentials, over those of two sets."""
    top = tl.maximum(first, other_first)
    second = tl.maximum(tl.maximum(second, other_second), tl.minimum(first, other_first))
    total = total * tl.exp(first - top) + other_total * tl.exp(other_first - top)
    return top, second, total


@triton.jit
def score_exits(
    x, x_stride, read, read_stride, notes, notes_stride, n, hidden,
    router_norm, down, down_bias, up, up_bias, router_eps, router_threshold,
    norm_weight, norm_bias, norm_eps, head, head_bias, multiplier, cap,
    fixed, fixed_bias, places, inner, inner_bias, outer, outer_bias, features, width, threshold,
    decision, router_logits, bottleneck, count,
    ROUTED: tl.constexpr, NORM: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr, CANDIDATES: tl.constexpr, DECIDES: tl.constexpr,
):  # fmt: skip
    """See `reference.score_exits`; one program for `TOKENS` tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < n
    notes += token * notes_stride
    exits = (tl.load(notes, live, 0) != 0).to(tl.int1)
    score = tl.full((TOKENS,), float("nan"), tl.float32)
    routed = tl.zeros((TOKENS,), tl.float32)
    if CANDIDATES:
        context = tl.load(notes + 1, live, -1)
        matched = tl.load(notes + 2, live, 0)
        table = tl.load(notes + 3, live, -1)
        chance = tl.load(notes + 4, live, 0)
        of_context = tl.load(places + context, context >= 0, -1)
        of_table = tl.load(places + table, table >= 0, -1)
        lines = token.to(tl.int64) * read_stride
        mean = tl.zeros((TOKENS,), tl.float32)
        variance = mean
        if NORM > 0:
            mean, variance = moments(read, lines, live, hidden, NORM == 2, BLOCK)
        context_logit = tl.zeros((TOKENS,), tl.float32)
        table_logit = tl.zeros((TOKENS,), tl.float32)
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            part = normed_part(
                read, lines, live, at, hidden, mean, variance, norm_weight, norm_bias, norm_eps,
                NORM,
            )  # fmt: skip
            context_logit += of_vector(part, head, of_context, at, hidden)
            table_logit += of_vector(part, head, of_table, at, hidden)
        least = tl.full((TOKENS,), float("-inf"), tl.float32)
        first, second, total = least, least, tl.zeros((TOKENS,), tl.float32)
        for block in range(0, count, BLOCK_C):
            number = block + tl.arange(0, BLOCK_C)
            logits = tl.zeros((TOKENS, BLOCK_C), tl.float32)
            for start in range(0, hidden, BLOCK):
                at = start + tl.arange(0, BLOCK)
                part = normed_part(
                    read, lines, live, at, hidden, mean, variance, norm_weight, norm_bias,
                    norm_eps, NORM,
                )  # fmt: skip
                weights = tl.load(
                    fixed + number[None, :] * hidden + at[:, None],
                    (number < count)[None, :] & (at < hidden)[:, None], 0.0,
                )  # fmt: skip
                logits = product(part, weights, logits, WIDE)
            if fixed_bias is not None:
                logits += tl.load(fixed_bias + number, number < count, 0.0).to(tl.float32)[None, :]
            logits = scale_logits(logits, multiplier, cap, CAPPED, tl.float32)
            logits = tl.where((number < count)[None, :], logits, float("-inf"))
            top = tl.max(logits, 1)
            index = block + tl.argmax(logits, 1, tie_break_left=True)
            others = tl.where(number[None, :] == index[:, None], float("-inf"), logits)
            rest = tl.sum(tl.exp(logits - top[:, None]), 1)
            first, second, total = with_others(first, second, total, top, tl.max(others, 1), rest)
        if head_bias is not None:
            context_logit += tl.load(head_bias + of_context, of_context >= 0, 0.0).to(tl.float32)
            table_logit += tl.load(head_bias + of_table, of_table >= 0, 0.0).to(tl.float32)
        context_logit = scale_logits(context_logit, multiplier, cap, CAPPED, tl.float32)
        context_logit = tl.where(of_context >= 0, context_logit, float("-inf"))
        table_logit = scale_logits(table_logit, multiplier, cap, CAPPED, tl.float32)
        table_logit = tl.where(of_table >= 0, table_logit, float("-inf"))
        first, second, total = with_others(first, second, total, context_logit, least, 1.0)
        first, second, total = with_others(first, second, total, table_logit, least, 1.0)
        whole = first + tl.log(total)
        unit = tl.arange(0, BLOCK_W)
        sums = tl.load(inner_bias + unit, unit < width, 0.0)[None, :]
        sums = add_feature(sums, tl.maximum(first - whole, -20.0), inner, 0, features, unit, width)
        sums = add_feature(sums, tl.maximum(second - whole, -20.0), inner, 1, features, unit, width)
        chances = tl.maximum(context_logit - whole, -20.0)
        sums = add_feature(sums, chances, inner, 2, features, unit, width)
        chances = tl.maximum(table_logit - whole, -20.0)
        sums = add_feature(sums, chances, inner, 3, features, unit, width)
        sums = add_feature(sums, first, inner, 4, features, unit, width)
        sums = add_feature(sums, matched.to(tl.float32), inner, 5, features, unit, width)
        sums = add_feature(sums, chance.to(tl.float32), inner, 6, features, unit, width)
        score = confidence_of(sums, outer, outer_bias, unit, width)
        exits = exits & (score >= threshold)
    if ROUTED:
        lines = token.to(tl.int64) * x_stride
        zero, squares = moments(x, lines, live, hidden, False, BLOCK)
        routed += tl.load(up_bias).to(tl.float32)
        for block in range(0, bottleneck, BLOCK_B):
            inside = block + tl.arange(0, BLOCK_B)
            inner_sums = tl.zeros((TOKENS, BLOCK_B), tl.float32)
            for start in range(0, hidden, BLOCK):
                at = start + tl.arange(0, BLOCK)
                here = live[:, None] & (at < hidden)[None, :]
                part = tl.load(x + lines[:, None] + at[None, :], here, 0.0)
                wide = normalise(part, zero, squares, router_eps, router_norm, None, at, hidden)
                weights = tl.load(
                    down + inside[None, :] * hidden + at[:, None],
                    (inside < bottleneck)[None, :] & (at < hidden)[:, None], 0.0,
                )  # fmt: skip
                inner_sums = product(narrow(wide, weights.dtype), weights, inner_sums, WIDE)
            here = inside < bottleneck
            inner_sums += tl.load(down_bias + inside, here, 0.0).to(tl.float32)[None, :]
            weights = tl.load(up + inside, here, 0.0).to(tl.float32)
            routed += tl.sum(silu(inner_sums) * weights[None, :], 1)
        if DECIDES:
            score = tl.sigmoid(routed)
            exits = exits & (score >= router_threshold)
    tl.store(decision + token * 3, exits.to(tl.float32), live)
    tl.store(decision + token * 3 + 1, tl.zeros((TOKENS,), tl.float32), live)
    tl.store(decision + token * 3 + 2, score, live)
    tl.store(router_logits + token, routed, live)
