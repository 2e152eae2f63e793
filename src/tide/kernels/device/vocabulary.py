"""The kernels of a head: the likeliest token, without writing the logits."""

from __future__ import annotations

import triton
import triton.language as tl

from tide.kernels.device.arithmetic import moments, narrow, normed_part, product, scale_logits
from tide.kernels.device.gate import add_feature, add_ngrams, confidence_of


@triton.jit
def top_parts(
    x, x_stride, wanted, wanted_stride, n, hidden, norm_weight, norm_bias, norm_eps,
    head, head_bias, multiplier, cap, vocabulary, parts, count,
    NORM: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The top two logits of a part of the vocabulary, for `TOKENS` tokens; see `merge`."""
    part_number = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live = token < n
    live = live & (tl.load(wanted + token * wanted_stride, live, 0) != 0)
    if tl.max(live.to(tl.int32), 0) > 0:  # where no token is wanted, no weight is read
        lines = token.to(tl.int64) * x_stride
        number = part_number * BLOCK_V + tl.arange(0, BLOCK_V)
        known = number < vocabulary
        mean = tl.zeros((TOKENS,), tl.float32)
        variance = mean
        if NORM > 0:
            mean, variance = moments(x, lines, live, hidden, NORM == 2, BLOCK)
        logits = tl.zeros((TOKENS, BLOCK_V), tl.float32)
        vectors = number.to(tl.int64) * hidden
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            part = normed_part(
                x, lines, live, at, hidden, mean, variance, norm_weight, norm_bias, norm_eps, NORM
            )
            weights = tl.load(
                head + vectors[None, :] + at[:, None], known[None, :] & (at < hidden)[:, None], 0.0
            )
            logits = product(part, weights, logits, WIDE)
        if head_bias is not None:
            logits += tl.load(head_bias + number, known, 0.0).to(tl.float32)[None, :]
        # In the precision of the model's own logits, so that ties are decided alike.
        logits = narrow(logits, head.dtype.element_ty).to(tl.float32)
        logits = scale_logits(logits, multiplier, cap, CAPPED, head.dtype.element_ty)
        logits = tl.where(known[None, :], logits, float("-inf"))
        first = tl.max(logits, 1)
        index = tl.argmax(logits, 1, tie_break_left=True)
        others = tl.where(tl.arange(0, BLOCK_V)[None, :] == index[:, None], float("-inf"), logits)
        total = tl.sum(tl.exp(logits - first[:, None]), 1)
        out = parts + (token.to(tl.int64) * count + part_number) * 4
        tl.store(out, first, live)
        tl.store(out + 1, tl.max(others, 1), live)
        tl.store(out + 2, total, live)
        tl.store(out + 3, (part_number * BLOCK_V + index).to(tl.float32), live)


@triton.jit
def merge(parts, token, count, BLOCK_P: tl.constexpr):
    """From the parts of the vocabulary to the whole: first, second and total logit, and index."""
    number = tl.arange(0, BLOCK_P)
    here = number < count
    parts += (token.to(tl.int64) * count + number) * 4
    first = tl.load(parts, here, float("-inf"))
    index = tl.load(parts + 3, here, 3e38)
    top = tl.max(first, 0)
    chosen = tl.min(tl.where(first == top, index, 3e38), 0)
    second = tl.where(index == chosen, tl.load(parts + 1, here, float("-inf")), first)
    total = tl.sum(tl.where(here, tl.load(parts + 2, here, 0.0) * tl.exp(first - top), 0.0), 0)
    # NaN is the largest of nothing; the token must be one that exists.
    chosen = tl.where(chosen < 3e38, chosen, 0.0).to(tl.int64)
    return top, tl.max(second, 0), top + tl.log(total), chosen


@triton.jit
def top_token(
    parts, wanted, wanted_stride, count, tokens, tops,
    SCORES: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The end of `reference.top_token`; one program for a token."""
    token = tl.program_id(0)
    live = tl.load(wanted + token * wanted_stride) != 0
    if live:
        first, second, whole, index = merge(parts, token, count, BLOCK_P)
        tl.store(tokens + token, index)
        if SCORES:
            tl.store(tops + token * 2, first - whole)
            tl.store(tops + token * 2 + 1, second - whole)
    else:
        tl.store(tokens + token, 0)
        if SCORES:
            tl.store(tops + token * 2, 0.0)
            tl.store(tops + token * 2 + 1, 0.0)


@triton.jit
def confirm_exits(
    parts, notes, notes_stride, decision, routed, count, ids,
    inner, inner_bias, outer, outer_bias, features, width, threshold, top_probability, out,
    BLOCK_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The end of `reference.confirm_exits`; one program for a token."""
    token = tl.program_id(0)
    exits = tl.load(decision + token * 3) != 0
    score = tl.load(decision + token * 3 + 2)
    best = tl.zeros((1,), tl.int64)
    if ids is not None:  # what index 0 stands for
        best += tl.load(ids)
    if exits:
        first, second, whole, index = merge(parts, token, count, BLOCK_P)
        if ids is not None:
            index = tl.load(ids + index)
        best = tl.zeros((1,), tl.int64) + index
        surest = tl.minimum(first - whole, -1e-6)
        if inner is not None:
            unit = tl.arange(0, BLOCK_W)
            total = tl.load(inner_bias + unit, unit < width, 0.0)[None, :]
            # log(1 - p), by its series where p is small and 1 - p would lose digits.
            p = tl.exp(surest)
            rest = tl.where(p < 1e-3, -p - p * p / 2, tl.log(1 - p))
            rest = tl.where(surest > -1e-2, tl.log(-surest * (1 + surest / 2)), rest)
            feature = tl.zeros((1,), tl.float32) + (surest - rest)
            feature = tl.minimum(tl.maximum(feature, -10.0), 10.0)
            total = add_feature(total, feature, inner, 0, features, unit, width)
            feature = tl.zeros((1,), tl.float32) + tl.minimum(surest - (second - whole), 10.0)
            total = add_feature(total, feature, inner, 1, features, unit, width)
            known = tl.full((1,), 1, tl.int1)
            own = tl.zeros((1,), tl.float32) + tl.load(routed + token)
            note = notes + (token * notes_stride + tl.zeros((1,), tl.int64))
            total = add_ngrams(total, best, own, note, known, inner, features, unit, width)
            score = tl.max(confidence_of(total, outer, outer_bias, unit, width), 0)
            exits = score >= threshold
        exits = exits & (tl.exp(first - whole) >= top_probability)
    tl.store(out + token * 3, exits.to(tl.float32))
    tl.store(out + token * 3 + 1, tl.max(best, 0).to(tl.float32))
    tl.store(out + token * 3 + 2, score)
