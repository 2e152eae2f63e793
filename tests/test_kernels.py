"""Fused kernels against the reference, on a GPU or in Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/test_kernels.py
TRITON_INTERPRET=1 TIDE_TEST_SWEEP=1 pytest tests/test_kernels.py    # every size
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("no GPU; set TRITON_INTERPRET=1", allow_module_level=True)

from tide.kernels import operators, reference  # noqa: E402
from tide.kernels import triton as fused  # noqa: E402
from tide.kernels.arguments import (  # noqa: E402
    CANDIDATE_FEATURES,
    CONFIDENCE_FEATURES,
    Candidates,
    Confidence,
    Head,
    Norm,
    Router,
)
from tide.kernels.arithmetic import normed  # noqa: E402
from tide.kernels.cases import OPERATIONS, TINY, make_cases  # noqa: E402
from tide.kernels.device.arithmetic import narrow  # noqa: E402
from tide.kernels.launch import recorded  # noqa: E402

SWEEP = bool(os.environ.get("TIDE_TEST_SWEEP"))
HIDDEN = (64, 123, 576, 640, 896, 1536, 2048, 4096, 5120)
TOKENS = (1, 2, 15, 16, 17, 64, 257)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXITED = ("none", "all", "some")


def sample(*choices: Any, count: int) -> list[tuple[Any, ...]]:
    """Some of all combinations, with every choice among them; all of them in a sweep."""
    every = list(itertools.product(*choices))
    if SWEEP:
        return every
    drawn = random.Random(0).sample(every[: len(every) // 2], count)  # the smaller hidden sizes
    for place, choice in enumerate(choices):
        for value in choice:
            if not any(found[place] == value for found in drawn):
                drawn.append(tuple(value if i == place else c[0] for i, c in enumerate(choices)))
    return drawn


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TIDE_KERNELS", "triton")
    torch.manual_seed(0)
    with torch.random.fork_rng():
        yield


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE)


def mask(exited: str, n: int) -> Tensor:
    some = torch.arange(n) % 3 == 1
    chosen = {"none": some & False, "all": some | True, "some": some}[exited]
    return chosen.to(DEVICE)


def changed(arguments: Any, change: Any) -> Any:
    """Every tensor of some arguments, changed."""
    if isinstance(arguments, Tensor):
        return change(arguments)
    if isinstance(arguments, tuple) and hasattr(arguments, "_fields"):
        return type(arguments)(*(changed(a, change) for a in arguments))
    return [changed(a, change) for a in arguments] if isinstance(arguments, list) else arguments


def in_dtype(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments in a dtype; a router and a confidence model stay in float32, as in artifacts."""
    return tuple(
        a if isinstance(a, (Router, Confidence)) else
        changed(a, lambda t: t.to(dtype) if t.is_floating_point() else t)
        for a in arguments
    )  # fmt: skip


def most(n: int) -> int:
    """Tokens for the reference's error, at least: of one or two, it may be small by chance."""
    return max(n, 33)


def first(arguments: Any, n: int) -> list[Any]:
    """Arguments for `most` tokens, cut to the first `n`."""
    return [a[:n] if isinstance(a, Tensor) and len(a) == most(n) else a for a in arguments]


def require_close(got: Tensor, same: Tensor, exact: Tensor, what: str = "") -> None:
    """The error against float32 is at most twice the reference's own, over more tokens."""
    assert got.dtype == same.dtype and got.shape[1:] == same.shape[1:]
    known = exact[: len(got)]
    assert torch.equal(got.isnan(), known.isnan())
    size = exact.nan_to_num().abs().max().item() if exact.numel() else 0.0
    pairs = ((got, known), (same, exact))
    errors = [(t.float() - e.float()).nan_to_num().abs() for t, e in pairs]
    own, their = (e.max().item() if e.numel() else 0.0 for e in errors)
    assert own <= 2 * their + 4e-6 * (1 + size), f"{what} {own} {their}"


def gate_arguments(n: int, hidden: int, dtype: torch.dtype, **sizes: int) -> tuple[Any, ...]:
    """What `score_exits` takes, in float32; the numbers are those of the dtype."""
    bottleneck, v = sizes.get("bottleneck", 24), sizes.get("vocabulary", 301)
    c, w = sizes.get("candidates", 20), sizes.get("width", 16)
    root = hidden**-0.5
    router = Router(
        numbers(hidden), numbers(bottleneck, hidden, scale=root), numbers(bottleneck),
        numbers(bottleneck, scale=0.3), numbers(1), 1e-6, 0.0,
    )  # fmt: skip
    head = Head(numbers(v, hidden, scale=root), None, 1.0, 0.0)
    places = torch.cat([torch.randperm(v), torch.tensor([-1])]).to(DEVICE)
    places[3::4] = -1
    candidates = Candidates(numbers(c, hidden, scale=root), None, places)
    prefilter = Confidence(
        numbers(w, CANDIDATE_FEATURES, scale=0.1), numbers(w), numbers(w, scale=0.3),
        numbers(1), 0.0,
    )  # fmt: skip
    notes = torch.randint(-1, v, (n, 5), device=DEVICE)
    notes[:, 0], notes[:, 2], notes[:, 4] = 1, notes[:, 2] % 4, notes[:, 4] % 256
    norm = Norm("rms", numbers(hidden), None, 1e-6)
    made = numbers(n, hidden), numbers(n, hidden), notes, router, norm, head, candidates, prefilter
    # The exact result is that of the rounded numbers, in float32.
    return in_dtype(in_dtype(made, dtype), torch.float32)


@pytest.mark.parametrize(
    ("hidden", "n", "dtype", "exited"), sample(HIDDEN, TOKENS, DTYPES, EXITED, count=4)
)
def test_score_exits(hidden: int, n: int, dtype: torch.dtype, exited: str) -> None:
    exact = gate_arguments(most(n), hidden, dtype)
    exact[2][:, 0] = mask(exited, most(n))
    for decides in (0.0, None):  # the score is the router's, or the prefilter's
        exact = (*exact[:3], exact[3]._replace(router_threshold=decides), *exact[4:])
        low = in_dtype(exact, dtype)
        wide = reference.score_exits(*exact)
        same, got = reference.score_exits(*low), fused.score_exits(*first(low, n))
        for own, their, best in zip(got, same, wide, strict=True):
            require_close(own, their, best)
        assert torch.equal(got[0][:, 0] != 0, mask(exited, n))


@pytest.mark.parametrize(
    ("candidates", "norm"), [(2, "layer"), (16, "none"), (128, "rms"), (130, "layer")]
)
def test_score_exits_with_any_number_of_candidates(candidates: int, norm: str) -> None:
    sizes = {"candidates": candidates, "width": 20, "bottleneck": 70}
    arguments = list(gate_arguments(19, 123, torch.float32, **sizes))
    arguments[4] = Norm(norm, numbers(123), numbers(123) if norm == "layer" else None, 1e-5)
    arguments[5] = Head(arguments[5].head, numbers(301), 0.5, 3.0)
    arguments[6] = arguments[6]._replace(fixed_bias=numbers(candidates))
    whole = list(arguments)
    passed = set()
    # Thresholds between the scores, so that rounding decides nothing.
    for router, prefilter in ((None, 0.0), (0.45, 0.0), (0.45, 0.45), (None, 1.0)):
        arguments[3] = whole[3]._replace(router_threshold=router)
        arguments[7] = whole[7]._replace(threshold=prefilter)
        passed.add(int(require_same(arguments)[0][:, 0].sum()))
    assert len(passed) > 2
    require_same([*whole[:6], Candidates(), Confidence()])
    require_same([*whole[:3], Router(), *whole[4:]])


def require_same(arguments: list[Any]) -> Any:
    """What both versions of `score_exits` return in float32."""
    expected, got = reference.score_exits(*arguments), fused.score_exits(*arguments)
    for own, best in zip(got, expected, strict=True):
        torch.testing.assert_close(own, best, atol=2e-5, rtol=2e-5, equal_nan=True)
    return got


def top_arguments(n: int, hidden: int, v: int, dtype: torch.dtype, exited: str) -> tuple[Any, ...]:
    root = hidden**-0.5
    head = Head(numbers(v, hidden, scale=3 * root), numbers(v, scale=0.1), 1.0, 0.0)
    norm = Norm("rms", numbers(hidden), None, 1e-6)
    made = numbers(n, hidden), mask(exited, n), norm, head, True
    return in_dtype(in_dtype(made, dtype), torch.float32)


@pytest.mark.parametrize(
    ("hidden", "n", "v", "dtype", "exited"),
    [*sample(HIDDEN, TOKENS, (127, 1024, 1500), DTYPES, EXITED, count=4),
     (64, 2, 49152, torch.bfloat16, "some"), (64, 2, 151936, torch.float16, "some")],
)  # fmt: skip
def test_top_token(hidden: int, n: int, v: int, dtype: torch.dtype, exited: str) -> None:
    exact = top_arguments(most(n), hidden, v, dtype, exited)
    low = in_dtype(exact, dtype)
    wide, same = reference.top_token(*exact), reference.top_token(*low)
    got = fused.top_token(*first(low, n))
    require_close(got[1], same[1], wide[1])
    states, wanted, norm, head, _ = first(exact, n)
    logits = torch.nn.functional.linear(normed(states, norm), head.head, head.head_bias)
    best, own, their = logits.amax(1), *(
        logits.gather(1, t[:n, None]).squeeze(1) for t in (got[0], same[0])
    )  # fmt: skip
    assert not got[0][~wanted].any() and not got[1][~wanted].any()
    off = [((best - t)[wanted].max().item() if wanted.any() else 0.0) for t in (own, their)]
    assert off[0] <= 2 * off[1] + (1e-5 if dtype == torch.float32 else 0.06)
    if dtype == torch.float32:
        assert torch.equal(got[0], wide[0][:n])


def test_top_token_decides_ties_as_the_head_does() -> None:
    """Logits that are as large in the dtype: the first token, as argmax has it."""
    states = torch.ones(2, 32, dtype=torch.bfloat16, device=DEVICE)
    head = torch.full((300, 32), 0.25, dtype=torch.bfloat16, device=DEVICE)
    head[[170, 40]] = 0.5
    head[170, 0] += 0.01  # lost when the logit is rounded
    wanted = torch.ones(2, dtype=torch.bool, device=DEVICE)
    for module in (fused, reference):
        tokens, tops = module.top_token(states, wanted, Norm(), Head(head), True)
        assert tokens.tolist() == [40, 40]
        assert torch.equal(tops[:, 0], tops[:, 1])
    head[[40, 170]] = 3.125
    head[170, 0] += 1  # 100 and 101, whose soft caps are one number of the dtype
    for module in (fused, reference):
        tokens, _ = module.top_token(states, wanted, Norm(), Head(head, None, 1.0, 30.0), True)
        assert tokens.tolist() == [40, 40]


@pytest.mark.parametrize(
    ("norm", "multiplier", "cap"), [("none", 1.0, 0.0), ("rms", 0.5, 0.0), ("layer", 1.0, 4.0)]
)
def test_confirm_exits(norm: str, multiplier: float, cap: float) -> None:
    n, hidden, v = 18, 123, 1301
    _, _, notes, _, _, head, _, confidence = gate_arguments(n, hidden, torch.float32, vocabulary=v)
    confidence = confidence._replace(inner=numbers(16, CONFIDENCE_FEATURES, scale=0.1))
    states = numbers(n, hidden)
    head = Head(head.head * 3, numbers(v), multiplier, cap)
    decision, routed = numbers(n, 3), numbers(n)
    decision[:, 0] = mask("some", n)
    decision[:, 2][::5] = torch.nan
    of = Norm(norm, numbers(hidden), numbers(hidden) if norm == "layer" else None, 1e-5)
    ids = torch.randperm(v).to(DEVICE)
    notes[::2, 1] = reference.confirm_exits(
        states, notes, decision, routed, of, head, ids, Confidence(), 0.0
    )[::2, 1].long()  # some n-gram predictions are those of the head
    for known, gate in ((ids, confidence), (None, confidence), (ids, Confidence())):
        for threshold, least in ((0.0, 0.0), (0.5, 0.1)):
            given = states, notes, decision, routed, of, head, known
            gate = gate._replace(threshold=threshold)
            expected = reference.confirm_exits(*given, gate, least)
            got = fused.confirm_exits(*given, gate, least)
            torch.testing.assert_close(got, expected, atol=3e-5, rtol=3e-5, equal_nan=True)


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("exited", EXITED)
def test_compact(n: int, exited: str) -> None:
    exits = mask(exited, n)
    order, counts = fused.compact(exits)
    assert order.tolist() == [*(~exits).nonzero().flatten().tolist(),
                              *exits.nonzero().flatten().tolist()]  # fmt: skip
    assert counts.tolist() == [n - int(exits.sum()), int(exits.sum())]
    decision = torch.stack([exits.float(), numbers(n), numbers(n)], 1)
    for own, first in zip(fused.compact(decision[:, 0]), (order, counts), strict=True):
        assert torch.equal(own, first)


@given(st.lists(st.booleans(), min_size=1, max_size=1100))
@settings(max_examples=12, deadline=None)
def test_compact_of_anything(exits: list[bool]) -> None:
    given_ = torch.tensor(exits, device=DEVICE)
    for own, expected in zip(fused.compact(given_), reference.compact(given_), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("hidden", "n", "dtype", "exited"), sample(HIDDEN, TOKENS[:-1], DTYPES, EXITED, count=2)
)
def test_exit_transform(hidden: int, n: int, dtype: torch.dtype, exited: str) -> None:
    for norm in ("none", "rms", "layer") if SWEEP or hidden < 200 else ("rms",):
        check_exit_transform(hidden, n, dtype, exited, norm)


def check_exit_transform(hidden: int, n: int, dtype: torch.dtype, exited: str, norm: str) -> None:
    lines = most(n)
    places = torch.where(mask(exited, lines), torch.arange(lines, device=DEVICE).flip(0) + 2, -1)
    of = Norm(norm, numbers(hidden), numbers(hidden) if norm == "layer" else None, 1e-5)
    weight, bias = numbers(hidden, hidden, scale=0.3 * hidden**-0.5), numbers(hidden)
    made = numbers(lines, hidden), weight, bias, of, places, numbers(lines + 3, hidden)
    exact = in_dtype(in_dtype(made, dtype), torch.float32)
    for affine in (True, False):
        results = []
        for module, precision in ((reference, torch.float32), (reference, dtype), (fused, dtype)):
            states, *rest, out = in_dtype(exact, precision)
            if not affine:
                rest[0] = rest[1] = None
            if module is fused:
                states, rest[-1] = states[:n], places[:n]
            out = out.clone()
            module.exit_transform(states, *rest, out)
            results.append(out)
        wide, same, got = results
        there = [place for place in places[:n].tolist() if place >= 0]
        order = [*there, *(i for i in range(lines + 3) if i not in there)]
        require_close(got[there], same[order], wide[order], f"{affine}")
        # What belongs nowhere changes nothing.
        assert torch.equal(got[order[len(there) :]], exact[-1].to(dtype)[order[len(there) :]])
        same_place = torch.empty_like(states)
        fused.exit_transform(states, *rest[:-1], None, same_place)
        assert torch.equal(same_place[places[:n] >= 0], got[there])


@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.sampled_from([8, 24, 128]),
    st.sampled_from([8, 6]), st.sampled_from(DTYPES), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_append_kv_of_ragged_sequences(
    sequences: int, heads: int, tokens: int, key_dim: int, value_dim: int,
    dtype: torch.dtype, draw: random.Random,
) -> None:  # fmt: skip
    slots = 24
    places = torch.tensor([draw.sample(range(slots), tokens) for _ in range(sequences)])
    # As models give them: new keys transposed, buffers a part of larger ones.
    new_keys = numbers(sequences, tokens, heads, key_dim).to(dtype).transpose(1, 2)
    new_values = numbers(sequences, heads, value_dim, tokens).to(dtype).transpose(2, 3)
    buffers = [numbers(sequences, heads, slots + 5, d).to(dtype) for d in (key_dim, value_dim)]
    copies = [b.clone() for b in buffers]
    wide = torch.stack([places, places + 1], -1).to(DEVICE)
    for module, pair in ((reference, buffers), (fused, copies)):
        module.append_kv(*(b[:, :, 5:] for b in pair), new_keys, new_values, wide[..., 0])
    assert torch.equal(buffers[0], copies[0]) and torch.equal(buffers[1], copies[1])
    assert torch.equal(buffers[0][0, :, 5 + places[0, -1]], new_keys[0, :, -1])


@given(st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None)
def test_gather_path_of_any_tree(sequences: int, nodes: int, draw: random.Random) -> None:
    counts = [draw.randint(0, nodes) for _ in range(sequences)]
    paths = [sorted(draw.sample(range(nodes), count)) for count in counts]
    starts = [draw.randint(0, 20) for _ in range(sequences)]
    longest = max(1, *counts)
    buffers = [numbers(sequences, 3, 20 + nodes + layer, 8 - 2 * (layer % 2)) for layer in range(4)]
    expected = [b.clone() for b in buffers]
    for buffer in expected:
        for s, path in enumerate(paths):
            moved = buffer[s, :, [starts[s] + node for node in path]]
            buffer[s, :, starts[s] : starts[s] + len(path)] = moved
    padded = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths]).to(DEVICE)
    given_ = padded, torch.tensor(starts, device=DEVICE), torch.tensor(counts, device=DEVICE)
    for module in (reference, fused):
        copies = [b.clone() for b in buffers]
        module.gather_path(copies, *given_)
        for copy, own in zip(copies, expected, strict=True):
            assert torch.equal(copy, own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators(operation: str, dtype: torch.dtype) -> None:
    """What torch requires of a custom operator: schema, fake, and that a graph can hold it."""
    case = {c.operation: c for c in make_cases(dtype, DEVICE, TINY)}[operation]
    flat: list[Any] = []
    for argument in case.copied():
        named = hasattr(argument, "_fields")
        flat += argument if named else [argument]
    if dtype == torch.float32:
        called = getattr(torch.ops.tide, operation).default
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(called, tuple(flat), test_utils=checks)
    with recorded() as launches:
        mutated = case.copied()
        got = getattr(operators, operation)(*mutated)
    assert launches
    other = case.copied()
    expected = getattr(reference, operation)(*other)
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    pairs = zip((mutated, got), (other, expected), strict=True)
    for own, best in pairs:
        compare(own, best, tolerance)


def compare(own: Any, best: Any, tolerance: float) -> None:
    if isinstance(own, Tensor):
        torch.testing.assert_close(own, best, atol=tolerance, rtol=tolerance, equal_nan=True)
    elif isinstance(own, (tuple, list)):
        for a, b in zip(own, best, strict=True):
            compare(a, b, tolerance)


@triton.jit
def narrowed(x, out, n: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    tl.store(out + at, narrow(tl.load(x + at), kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    x, out = numbers(1024), torch.empty(1024, dtype=dtype, device=DEVICE)
    narrowed[(1,)](x, out, 1024, getattr(tl, str(dtype).removeprefix("torch.")))
    assert torch.equal(out, x.to(dtype))


def test_nothing_to_do() -> None:
    """No token at all launches nothing."""
    with recorded() as launches:
        empty = torch.zeros(0, 8, device=DEVICE)
        fused.top_token(empty, empty[:, 0], Norm(), Head(torch.zeros(4, 8, device=DEVICE)), True)
    assert not launches
