"""The kernels that move states and KV to where they belong."""

from __future__ import annotations

import triton
import triton.language as tl

from tide.kernels.device.arithmetic import narrow, normalise, product


@triton.jit
def compact(exits, stride, n, order, counts, BLOCK: tl.constexpr):
    """See `reference.compact`; one program in all."""
    within = tl.arange(0, BLOCK)
    exited = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        at = start + within
        exited += tl.sum((tl.load(exits + at * stride, at < n, 0) != 0).to(tl.int32), 0)
    last = n - exited
    before = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        at = start + within
        gone = ((tl.load(exits + at * stride, at < n, 0) != 0) & (at < n)).to(tl.int32)
        earlier = before + tl.cumsum(gone, 0) - gone
        place = tl.where(gone == 1, last + earlier, at - earlier)
        tl.store(order + place, at.to(tl.int64), at < n)
        before += tl.sum(gone, 0)
    tl.store(counts, last.to(tl.int64))
    tl.store(counts + 1, exited.to(tl.int64))


@triton.jit
def affine(
    x, x_stride, weight, bias, places, out, out_stride, n, hidden,
    WIDE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Add a linear map of states to them: `BLOCK_O` numbers of `TOKENS` tokens."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live = token < n
    lines = token.to(tl.int64) * x_stride
    number = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros((TOKENS, BLOCK_O), tl.float32)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = live[:, None] & (at < hidden)[None, :]
        part = tl.load(x + lines[:, None] + at[None, :], here, 0.0)
        weights = tl.load(
            weight + number[None, :].to(tl.int64) * hidden + at[:, None],
            (number < hidden)[None, :] & (at < hidden)[:, None], 0.0,
        )  # fmt: skip
        total = product(narrow(part.to(tl.float32), weights.dtype), weights, total, WIDE)
    if bias is not None:
        total += tl.load(bias + number, number < hidden, 0.0).to(tl.float32)[None, :]
    here = live[:, None] & (number < hidden)[None, :]
    own = tl.load(x + lines[:, None] + number[None, :], here, 0.0).to(tl.float32)
    place = token.to(tl.int64)
    if places is not None:
        place = tl.load(places + token, live, -1)
    written = here & (place >= 0)[:, None]
    out += place[:, None] * out_stride + number[None, :]
    tl.store(out, narrow(own + total, out.dtype.element_ty), written)


@triton.jit
def norm_lines(
    x, x_stride, norm_weight, norm_bias, norm_eps, places, out, out_stride, hidden,
    NORM: tl.constexpr, MOVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm the state of one token, on its way to its place or, if `MOVED`, there."""
    token = tl.program_id(0).to(tl.int64)
    place = token
    if places is not None:
        place = tl.load(places + token)
    if place >= 0:
        if MOVED:
            line = tl.zeros((1,), tl.int64) + place * out_stride
        else:
            line = tl.zeros((1,), tl.int64) + token * x_stride
        at = tl.arange(0, BLOCK)
        here = (at < hidden)[None, :]
        part = tl.load(x + line[:, None] + at[None, :], here, 0.0).to(tl.float32)
        if NORM > 0:
            mean = tl.zeros((1,), tl.float32)
            if NORM == 2:
                mean = tl.sum(part, 1) / hidden
            centred = tl.where(here, part - mean[:, None], 0.0)
            variance = tl.sum(centred * centred, 1) / hidden
            part = normalise(part, mean, variance, norm_eps, norm_weight, norm_bias, at, hidden)
        target = out + (tl.zeros((1,), tl.int64) + place * out_stride)[:, None] + at[None, :]
        tl.store(target, narrow(part, out.dtype.element_ty), here)


@triton.jit
def copy_token(
    source, source_head, target, target_head, heads, dim,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy what all heads have of a token."""
    across = tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, heads, BLOCK):
        head = (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        here = (head < heads) & (across < dim)
        numbers = tl.load(source + head * source_head + across, here)
        tl.store(target + head * target_head + across, numbers, here)


@triton.jit
def append_kv(
    keys, values, new_keys, new_values, slots, slots_sequence, slots_token, tokens, heads,
    k0, k1, k2, v0, v1, v2, nk0, nk1, nk2, nv0, nv1, nv2, key_dim, value_dim,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """See `reference.append_kv`; one program for keys or values of one token.

    Of the strides, 0 is for the sequence, 1 for the head, 2 for the slot or token.
    """
    sequence = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    slot = tl.load(slots + sequence * slots_sequence + token * slots_token)
    if tl.program_id(1) == 0:
        copy_token(
            new_keys + sequence * nk0 + token * nk2, nk1, keys + sequence * k0 + slot * k2, k1,
            heads, key_dim, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        copy_token(
            new_values + sequence * nv0 + token * nv2, nv1,
            values + sequence * v0 + slot * v2, v1, heads, value_dim, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def gather_path(
    example, buffers, path, path_sequence, path_step, starts, counts,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """See `reference.gather_path`; one program for one sequence in one buffer.

    Args:
        example: any of the buffers, for its type.
        buffers: of each its address, its strides by sequence, head and slot, its heads and its
            last dimension, `[buffers, 6]`.
    """
    sequence = tl.program_id(0).to(tl.int64)
    buffers += tl.program_id(1) * 6
    head, stride = tl.load(buffers + 2), tl.load(buffers + 3)
    base = tl.load(buffers).to(example.dtype) + sequence * tl.load(buffers + 1)
    base += tl.load(starts + sequence) * stride
    for step in range(0, tl.load(counts + sequence)):
        node = tl.load(path + sequence * path_sequence + step * path_step)
        if node != step:
            copy_token(
                base + node * stride, head, base + step * stride, head,
                tl.load(buffers + 4), tl.load(buffers + 5), BLOCK, BLOCK_D,
            )  # fmt: skip
        # A node's slot may be the target of a later step, which must not overtake this one.
        tl.debug_barrier()
