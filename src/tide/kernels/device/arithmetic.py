"""What several kernels compute: norms, products, roundings."""

from __future__ import annotations

import triton
import triton.language as tl

from tide.kernels.launch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """To a smaller type, to the nearest number as on a GPU; the interpreter cuts bfloat16 off."""
    if TYPE == tl.float32:
        return x.to(tl.float32)
    elif INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & -0x10000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(TYPE)


@triton.jit
def product(a, b, total, WIDE: tl.constexpr):
    """Add a matrix product. `WIDE`: in float32, which is exact; the interpreter needs it."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def silu(x):
    """SiLU."""
    return x * tl.sigmoid(x)


@triton.jit
def moments(x, lines, live, hidden, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    """Mean (0 for an RMS norm) and variance of each token's state."""
    mean = tl.zeros(lines.shape, tl.float32)
    if LAYER:
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            here = live[:, None] & (at < hidden)[None, :]
            part = tl.load(x + lines[:, None] + at[None, :], here, 0.0).to(tl.float32)
            mean += tl.sum(part, 1)
        mean = mean / hidden
    squares = tl.zeros(lines.shape, tl.float32)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = live[:, None] & (at < hidden)[None, :]
        part = tl.load(x + lines[:, None] + at[None, :], here, 0.0).to(tl.float32)
        part = tl.where(here, part - mean[:, None], 0.0)
        squares += tl.sum(part * part, 1)
    return mean, squares / hidden


@triton.jit
def normalise(part, mean, variance, eps, weight, bias, at, hidden):
    """A part of states after their norm, in float32."""
    part = (part.to(tl.float32) - mean[:, None]) / tl.sqrt(variance + eps)[:, None]
    if weight is not None:
        part = part * tl.load(weight + at, at < hidden, 0.0).to(tl.float32)[None, :]
    if bias is not None:
        part = part + tl.load(bias + at, at < hidden, 0.0).to(tl.float32)[None, :]
    return part


@triton.jit
def normed_part(x, lines, live, at, hidden, mean, variance, weight, bias, eps, NORM: tl.constexpr):
    """A part of states as a head reads them, in their dtype."""
    here = live[:, None] & (at < hidden)[None, :]
    part = tl.load(x + lines[:, None] + at[None, :], here, 0.0)
    if NORM > 0:
        wide = normalise(part, mean, variance, eps, weight, bias, at, hidden)
        part = narrow(tl.where(here, wide, 0.0), part.dtype)
    return part


@triton.jit
def scale_logits(logits, multiplier, cap, CAPPED: tl.constexpr, TYPE: tl.constexpr):
    """Logits times a factor, and softly capped; rounded after each step, as torch does it."""
    logits = narrow(logits * multiplier, TYPE).to(tl.float32)
    if CAPPED:
        logits = narrow(logits / cap, TYPE).to(tl.float32)
        logits = narrow(2 * tl.sigmoid(2 * logits) - 1, TYPE).to(tl.float32)
        logits = narrow(logits * cap, TYPE).to(tl.float32)
    return logits
