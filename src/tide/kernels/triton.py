"""The operations as fused kernels; what each means is in `reference.py`.

Importing this needs the package `triton`; see `dispatch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from tide.kernels.arguments import (
    CANDIDATE_FEATURES,
    CONFIDENCE_FEATURES,
    Candidates,
    Confidence,
    Head,
    Norm,
    Router,
)
from tide.kernels.device import gate, movement, vocabulary
from tide.kernels.launch import interpreted, launch

TOKENS = 16  # of a program that multiplies matrices; the least that GPUs take
# In the interpreter each operation takes long, whatever its size.
BLOCK_V = 1024 if interpreted() else 128  # tokens of the vocabulary in a program
BLOCK_O = 1024 if interpreted() else 32  # numbers of a transformed state in a program
BLOCK_G = 64 if interpreted() else 32  # candidates, and numbers of a router, at once
_NORMS = {"none": 0, "rms": 1, "layer": 2}


def _block(states: Tensor) -> int:
    """Numbers of a state that a program reads at once."""
    if interpreted():
        return 512
    return 64 if states.element_size() == 2 else 32


def _wide(states: Tensor) -> bool:
    """Whether to multiply in float32: the interpreter knows no other products."""
    return interpreted() or states.dtype == torch.float32


def _norm(norm: Norm) -> dict[str, object]:
    return {
        "norm_weight": norm.norm_weight,
        "norm_bias": norm.norm_bias,
        "norm_eps": norm.norm_eps,
        "NORM": _NORMS[norm.norm],
    }


def _head(head: Head) -> dict[str, object]:
    return {
        "head": head.head,
        "head_bias": head.head_bias,
        "multiplier": head.multiplier,
        "cap": head.cap or 1.0,
        "CAPPED": head.cap != 0,
    }


def _confidence(confidence: Confidence) -> dict[str, object]:
    inner = confidence.inner
    width, features = (0, 0) if inner is None else inner.shape
    return {
        **confidence._asdict(),
        "features": features,
        "width": width,
        "BLOCK_W": max(16, next_power_of_2(width)),
    }


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
    """See `reference.score_exits`. One launch."""
    n, hidden = states.shape
    decision = states.new_empty(n, 3, dtype=torch.float32)
    routed = states.new_empty(n, dtype=torch.float32)
    bottleneck = 0 if router.down is None else len(router.down)
    count = 0 if candidates.fixed is None else len(candidates.fixed)
    launch(
        gate.score_exits, (cdiv(n, TOKENS),),
        x=states, x_stride=states.stride(0), read=read, read_stride=read.stride(0),
        notes=notes, notes_stride=notes.stride(0), n=n, hidden=hidden,
        **{**router._asdict(), "router_threshold": router.router_threshold or 0.0},
        **_norm(norm), **_head(head), **candidates._asdict(), **_confidence(prefilter),
        decision=decision, router_logits=routed, bottleneck=bottleneck, count=count,
        ROUTED=router.down is not None, DECIDES=router.router_threshold is not None,
        CANDIDATES=prefilter.inner is not None, WIDE=_wide(states), TOKENS=TOKENS,
        BLOCK=_block(states), BLOCK_B=BLOCK_G, BLOCK_C=BLOCK_G,
    )  # fmt: skip
    return decision, routed


def _parts(states: Tensor, wanted: Tensor, norm: Norm, head: Head) -> Tensor:
    """The top logits of each part of the vocabulary, `[n, parts, 4]`."""
    (n, hidden), size = states.shape, len(head.head)
    count = cdiv(size, BLOCK_V)
    parts = states.new_empty(n, count, 4, dtype=torch.float32)
    launch(
        vocabulary.top_parts, (count, cdiv(n, TOKENS)),
        x=states, x_stride=states.stride(0), wanted=wanted, wanted_stride=wanted.stride(0), n=n,
        hidden=hidden, **_norm(norm), **_head(head), vocabulary=size, parts=parts, count=count,
        WIDE=_wide(states), TOKENS=TOKENS, BLOCK=_block(states), BLOCK_V=BLOCK_V,
    )  # fmt: skip
    return parts


def top_token(
    states: Tensor, wanted: Tensor, norm: Norm, head: Head, scores: bool
) -> tuple[Tensor, Tensor]:
    """See `reference.top_token`. Two launches."""
    n = len(states)
    tokens = states.new_empty(n, dtype=torch.long)
    tops = states.new_empty(n, 2 if scores else 0, dtype=torch.float32)
    parts = _parts(states, wanted, norm, head)
    launch(
        vocabulary.top_token, (n,),
        parts=parts, wanted=wanted, wanted_stride=wanted.stride(0), count=parts.shape[1],
        tokens=tokens, tops=tops, SCORES=scores, BLOCK_P=next_power_of_2(parts.shape[1]),
    )  # fmt: skip
    return tokens, tops


def confirm_exits(
    read: Tensor,
    notes: Tensor,
    decision: Tensor,
    routed: Tensor,
    norm: Norm,
    head: Head,
    vocabulary_ids: Tensor | None,
    confidence: Confidence,
    top_probability: float,
) -> Tensor:
    """See `reference.confirm_exits`. Two launches."""
    out = torch.empty_like(decision)
    parts = _parts(read, decision[:, 0], norm, head)
    launch(
        vocabulary.confirm_exits, (len(read),),
        parts=parts, notes=notes, notes_stride=notes.stride(0), decision=decision, routed=routed,
        count=parts.shape[1], ids=vocabulary_ids, **_confidence(confidence),
        top_probability=top_probability, out=out, BLOCK_P=next_power_of_2(parts.shape[1]),
    )  # fmt: skip
    return out


def compact(exits: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.compact`. One launch."""
    n = len(exits)
    order, counts = (exits.new_empty(size, dtype=torch.long) for size in (n, 2))
    launch(
        movement.compact, (1,),
        exits=exits, stride=exits.stride(0), n=n, order=order, counts=counts,
        BLOCK=min(1024, max(16, next_power_of_2(n))),
    )  # fmt: skip
    return order, counts


def exit_transform(
    states: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
    places: Tensor | None,
    out: Tensor,
) -> None:
    """See `reference.exit_transform`. One launch for the map, one for the norm."""
    n, hidden = states.shape
    target = {"places": places, "out": out, "out_stride": out.stride(0), "hidden": hidden}
    if weight is not None:
        launch(
            movement.affine, (cdiv(hidden, BLOCK_O), cdiv(n, TOKENS)),
            x=states, x_stride=states.stride(0), weight=weight, bias=bias, n=n, **target,
            WIDE=_wide(weight), TOKENS=TOKENS, BLOCK=_block(states), BLOCK_O=BLOCK_O,
        )  # fmt: skip
    if weight is None or norm.norm != "none":
        moved = weight is not None
        source = out if moved else states
        launch(
            movement.norm_lines, (n,),
            x=source, x_stride=source.stride(0), **_norm(norm), **target, MOVED=moved,
            BLOCK=next_power_of_2(hidden),
        )  # fmt: skip


def append_kv(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor
) -> None:
    """See `reference.append_kv`. One launch."""
    new_keys, new_values = (
        new if new.stride(3) == 1 else new.contiguous() for new in (new_keys, new_values)
    )
    sequences, heads, tokens, key_dim = new_keys.shape
    value_dim = new_values.shape[3]
    named = {"k": keys, "v": values, "nk": new_keys, "nv": new_values}
    strides = {f"{name}{i}": t.stride(i) for name, t in named.items() for i in range(3)}
    block_d = next_power_of_2(max(key_dim, value_dim))
    launch(
        movement.append_kv, (sequences * tokens, 2),
        keys=keys, values=values, new_keys=new_keys, new_values=new_values,
        slots=slots, slots_sequence=slots.stride(0), slots_token=slots.stride(1), tokens=tokens,
        heads=heads, **strides, key_dim=key_dim, value_dim=value_dim,
        BLOCK=max(1, min(next_power_of_2(heads), 1024 // block_d)), BLOCK_D=block_d,
    )  # fmt: skip


def gather_path(buffers: list[Tensor], path: Tensor, starts: Tensor, counts: Tensor) -> None:
    """See `reference.gather_path`. One launch, and the addresses of the buffers are sent."""
    first = buffers[0]
    table = torch.tensor([[b.data_ptr(), *b.stride()[:3], b.shape[1], b.shape[3]] for b in buffers])
    if first.is_cuda:
        table = table.pin_memory()
    block_d = next_power_of_2(max(b.shape[3] for b in buffers))
    launch(
        movement.gather_path, (len(first), len(buffers)),
        example=first, buffers=table.to(first.device, non_blocking=True), path=path,
        path_sequence=path.stride(0), path_step=path.stride(1), starts=starts, counts=counts,
        BLOCK=max(1, min(next_power_of_2(first.shape[1]), 1024 // block_d)), BLOCK_D=block_d,
    )  # fmt: skip


# As `device/gate.py` and `device/vocabulary.py` number them.
assert (CONFIDENCE_FEATURES, CANDIDATE_FEATURES) == (8, 7)
