"""Range-running equals the model's own forward in every family, however tokens pass the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scenarios import SCENARIOS, cuts, error, full_depth, pad
from tide.errors import RangeError, UnsupportedModelError
from tide.models.depth import DepthRunner
from tiny import FAMILIES, VOCABULARY, tiny_model

TOKENS = 12  # more than the windows of the sliding families


def random_ids(rows: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


def worst_error(model: Any, scenario: str, reference: Any = None) -> float:
    runner = DepthRunner(model)
    with runner:
        outcome = SCENARIOS[scenario](runner, random_ids())
    reference = reference or model
    at = DepthRunner(reference)
    return max(error(got, full_depth(reference, at, row)[-len(got) :]) for row, got in outcome)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_full_forward(family: str, scenario: str) -> None:
    assert worst_error(tiny_model(family), scenario) <= 1e-5


@pytest.mark.parametrize("scenario", ["deferred", "ragged, padded left", "fallen back"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_full_forward_with_eager_attention(family: str, scenario: str) -> None:
    assert worst_error(tiny_model(family, attention="eager"), scenario) <= 1e-5


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_within_twice_the_error_of_a_full_bf16_forward(family: str, scenario: str) -> None:
    exact, rounded = tiny_model(family), tiny_model(family, dtype=torch.bfloat16)
    runner = DepthRunner(rounded)
    with runner:
        outcome = SCENARIOS[scenario](runner, random_ids())
    ours = full = 0.0
    for row, got in outcome:
        expected = full_depth(exact, DepthRunner(exact), row)[-len(got) :]
        ours = max(ours, error(got, expected))
        full = max(full, error(full_depth(rounded, runner, row)[-len(got) :], expected))
    assert ours <= 2 * full


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_full_forward(data: st.DataObject) -> None:
    """Random steps, flushes and fall-backs on rows out of step with each other.

    Gemma3 has both kinds of layer.
    """
    model = tiny_model("gemma3_text")
    runner = DepthRunner(model)
    segments, rows = cuts(runner), 2
    tokens: list[Tensor] = [torch.empty(0, dtype=torch.long) for _ in range(rows)]
    # passed[s][row]: outputs of segment s for the tokens of the row so far, [tokens, hidden]
    passed = [[torch.empty(0, 32) for _ in range(rows)] for _ in segments]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="token seed"))

    def advance(s: int, counts: list[int]) -> None:
        side = data.draw(st.sampled_from(["left", "right"]), label="padding")
        spans = [slice(len(passed[s][r]), len(passed[s][r]) + counts[r]) for r in range(rows)]
        ids, valid = pad([tokens[r][spans[r]] for r in range(rows)], side)
        below = None if s == 0 else pad([passed[s - 1][r][spans[r]] for r in range(rows)], side)[0]
        out = runner.run(ids, *segments[s], cache=cache, hidden=below, valid=valid)
        for r in range(rows):
            passed[s][r] = torch.cat([passed[s][r], out[r][valid[r]]])

    def step(counts: list[int]) -> None:
        for r in range(rows):
            new = torch.randint(3, VOCABULARY, (counts[r],), generator=generator)
            tokens[r] = torch.cat([tokens[r], new])
        advance(0, counts)

    def ledge(s: int) -> list[int]:
        return [len(passed[s - 1][r]) - len(passed[s][r]) for r in range(rows)]

    with runner:
        cache = runner.new_cache(rows)
        step(data.draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows), label="prompts"))
        for _ in range(data.draw(st.integers(1, 8), label="actions")):
            action = data.draw(st.sampled_from(["step", "flush", "fall back"]), label="action")
            if action == "step":
                counts = data.draw(
                    st.lists(st.integers(0, 3), min_size=rows, max_size=rows), label="counts"
                )
                if any(counts):
                    step(counts)
            elif action == "flush":
                s = data.draw(st.integers(1, len(segments) - 1), label="segment")
                take = [data.draw(st.integers(0, waiting), label="take") for waiting in ledge(s)]
                if any(take):
                    advance(s, take)
            else:
                keep = [
                    data.draw(st.integers(1, len(tokens[r])), label="keep") for r in range(rows)
                ]
                cache.fall_back(keep)
                tokens = [row[:k] for row, k in zip(tokens, keep, strict=True)]
                passed = [[p[:k] for p, k in zip(rows_, keep, strict=True)] for rows_ in passed]
        for s in range(1, len(segments)):
            if any(ledge(s)):
                advance(s, ledge(s))
    for r in range(rows):
        assert error(passed[-1][r], full_depth(model, runner, tokens[r])) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_fill_is_bit_identical_to_a_full_call(family: str) -> None:
    runner = DepthRunner(tiny_model(family))
    n, ids = runner.n_layers, random_ids()
    with runner:
        called, filled = runner.new_cache(2), runner.new_cache(2)
        for cache in (called, filled):
            runner.run(ids[:, :7], 0, n, cache=cache)
            left = runner.run(ids[:, 7:], 0, 2, cache=cache)
        for layer in range(2, n):
            runner.run(ids[:, 7:], layer, layer + 1, cache=called, hidden=left)
        runner.counts.reset()
        runner.fill_kv(ids[:, 7:], 2, n, cache=filled, hidden=left)
    assert runner.counts.calls == [0] * n
    assert runner.counts.fills == [0, 0] + [ids[:, 7:].numel()] * (n - 2)
    for layer in range(n):
        for row in range(2):
            for got, expected in zip(filled.read(layer, row), called.read(layer, row), strict=True):
                assert got.shape[1] == TOKENS
                assert torch.equal(got, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_of_deferred_tokens_is_that_of_a_full_forward(family: str) -> None:
    runner = DepthRunner(tiny_model(family))
    n, ids = runner.n_layers, random_ids()
    with runner:
        at_once, late = runner.new_cache(2), runner.new_cache(2)
        runner.run(ids, 0, n, cache=at_once)
        waiting = [runner.run(ids[:, t : t + 1], 0, 2, cache=late) for t in range(TOKENS)]
        runner.run(ids, 2, n, cache=late, hidden=torch.cat(waiting, 1))
    for layer in range(n):
        for row in range(2):
            for got, expected in zip(late.read(layer, row), at_once.read(layer, row), strict=True):
                assert error(got, expected) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_counters_equal_the_calls_that_hooks_saw(family: str) -> None:
    runner = DepthRunner(tiny_model(family))
    calls = [0] * runner.n_layers
    inner = [0] * runner.n_layers

    def count(into: list[int], index: int) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            into[index] += 1

        return hook

    with runner:  # learns what layers return before the hooks are there
        pass
    for i, layer in enumerate(runner.parts.layers):
        layer.register_forward_pre_hook(count(calls, i))
        next(layer.children()).register_forward_pre_hook(count(inner, i))
    with runner:
        ids = random_ids()
        cache = runner.new_cache(2)
        runner.run(ids[:, :4], 0, 6, cache=cache)
        waiting = [runner.run(ids[:, t : t + 1], 0, 2, cache=cache) for t in range(4, 9)]
        runner.run(ids[:, 4:9], 2, 4, cache=cache, hidden=torch.cat(waiting, 1))
    assert runner.counts.calls == calls == inner == [6, 6, 2, 2, 1, 1]
    assert runner.counts.tokens == [18, 18, 18, 18, 8, 8]


def snapshot(model: Any) -> Any:
    """Everything about a model that attaching might change."""
    modules = [
        (name, id(module), type(module), sorted(vars(module)), vars(module).get("forward"))
        for name, module in model.named_modules()
    ]
    return modules, model.config.to_dict(), model(random_ids()).logits.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_detach_leaves_the_model_as_it_was(family: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    runner = DepthRunner(model)
    with runner:
        runner.run(random_ids(), 0, 4, cache=runner.new_cache(2))
    assert snapshot(model) == before


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_exception_inside_a_run_leaves_model_and_cache_as_they_were(family: str) -> None:
    model = tiny_model(family)
    runner = DepthRunner(model)
    ids = random_ids()
    before = snapshot(model)

    def interrupt(module: Any, inputs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), runner:
        cache = runner.new_cache(2)
        runner.run(ids[:, :5], 0, 6, cache=cache)
        handle = runner.parts.layers[3].register_forward_pre_hook(interrupt)
        try:
            runner.run(ids[:, 5:7], 0, 6, cache=cache)
        finally:
            handle.remove()
    assert snapshot(model) == before
    with runner:
        hidden = runner.run(ids[:, 5:], 0, 6, cache=cache)
    for row in range(2):
        assert error(hidden[row], full_depth(model, runner, ids[row])[5:]) <= 1e-5


def test_the_model_itself_still_works_while_attached() -> None:
    model = tiny_model("llama")
    ids = random_ids()
    with torch.no_grad():
        before = model(ids).logits
        with DepthRunner(model):
            assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_the_models_own(family: str) -> None:
    model = tiny_model(family)
    ids = random_ids()
    with DepthRunner(model) as runner:
        hidden = runner.run(ids, 0, 6, cache=runner.new_cache(2))
        assert error(runner.logits(hidden), model(ids).logits) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_tokens_may_pass_in_any_order_at_given_positions(family: str) -> None:
    """Even tokens first, then odd ones: each sees what stands before it, once that is there."""
    model = tiny_model(family)
    runner = DepthRunner(model)
    ids, half = random_ids(), TOKENS // 2
    places = torch.arange(TOKENS).expand(2, -1)
    with runner:
        cache = runner.new_cache(2)
        below = runner.run(ids, 0, 3, cache=cache)
        # K and V of the early ones first, so that the late ones find all that they may see.
        kept, gone = places[:, 1::2], places[:, ::2]
        runner.fill_kv(ids[:, ::2], 3, 6, cache=cache, hidden=below[:, ::2], positions=gone)
        late = runner.run(ids[:, 1::2], 3, 6, cache=cache, hidden=below[:, 1::2], positions=kept)

        again = runner.new_cache(2)
        runner.run(ids, 0, 3, cache=again)
        mixed = []
        for t in range(TOKENS):  # one by one, in order, with the same K and V
            one = {"cache": again, "hidden": below[:, t : t + 1]}
            if t % 2:
                mixed.append(runner.run(ids[:, t : t + 1], 3, 6, **one))
            else:
                runner.fill_kv(ids[:, t : t + 1], 3, 6, **one)
    assert cache.lengths(5) == again.lengths(5) == (TOKENS, TOKENS)
    assert late.shape[1] == half
    assert error(late, torch.cat(mixed, 1)) <= 1e-5


def test_a_provisional_pass_leaves_no_trace() -> None:
    model = tiny_model("llama")
    ids = random_ids()
    with DepthRunner(model) as runner:
        cache = runner.new_cache(2)
        runner.run(ids[:, :8], 0, 6, cache=cache)
        below = runner.run(ids[:, 8:], 0, 2, cache=cache)
        places = torch.arange(8, TOKENS).expand(2, -1)
        runner.run(ids[:, 8:], 4, 6, cache=cache, hidden=below, positions=places, provisional=True)
        assert cache.lengths(5) == (8, 8)
        hidden = runner.run(ids[:, 8:], 2, 6, cache=cache, hidden=below)
    for row in range(2):
        assert error(hidden[row], full_depth(model, runner, ids[row])[8:]) <= 1e-5


def test_padding_is_no_token_and_may_hold_anything() -> None:
    model = tiny_model("llama")
    runner = DepthRunner(model)
    ids = random_ids()
    valid = torch.ones_like(ids)  # integers, as an attention mask has them
    valid[1, :4] = 0
    with runner:
        cache = runner.new_cache(2)
        below = runner.run(ids, 0, 3, cache=cache, valid=valid)
        below[1, :4] = torch.nan
        hidden = runner.run(ids, 3, 6, cache=cache, hidden=below, valid=valid)
    assert runner.counts.tokens == [2 * TOKENS - 4] * 6
    assert error(hidden[0], full_depth(model, runner, ids[0])) <= 1e-5
    assert error(hidden[1, 4:], full_depth(model, runner, ids[1, 4:])) <= 1e-5


def test_two_runners_on_one_model_and_a_layer_put_in_its_place() -> None:
    model = tiny_model("llama")
    ids = random_ids()
    first, second = DepthRunner(model), DepthRunner(model)
    with first, second:
        a = first.run(ids, 0, 6, cache=first.new_cache(2))
        assert torch.equal(second.run(ids, 0, 6, cache=second.new_cache(2)), a)
    model.model.layers[2] = model.model.layers[4]
    with first:
        cache = first.new_cache(2)
        changed = first.run(ids[:, :1], 0, 2, cache=cache)
        assert first._gates is not None
        assert first._gates[2].layer is model.model.layers[4]
    assert changed.shape == (2, 1, 32)


def test_misuse_is_refused_by_name() -> None:
    runner = DepthRunner(tiny_model("llama"))
    ids = random_ids()
    with pytest.raises(UnsupportedModelError, match="not attached"):
        runner.run(ids, 0, 6, cache=runner.new_cache(2))
    with runner:
        cache = runner.new_cache(2)
        with pytest.raises(RangeError, match=r"\[0, 7\); allowed"):
            runner.run(ids, 0, 7, cache=cache)
        with pytest.raises(RangeError, match="without a hidden state"):
            runner.run(ids, 2, 6, cache=cache)
        with pytest.raises(RangeError, match=r"need \[2, new_tokens\]"):
            runner.run(ids[:1], 0, 6, cache=cache)
        hidden = runner.run(ids, 0, 2, cache=cache)
        with pytest.raises(RangeError, match="first two dimensions"):
            runner.run(ids, 2, 6, cache=cache, hidden=hidden[:, :3])
        with pytest.raises(RangeError, match="valid of shape"):
            runner.run(ids, 0, 2, cache=cache, valid=torch.ones(1, TOKENS, dtype=torch.bool))
        with pytest.raises(RangeError, match="hold different lengths"):
            runner.run(ids, 0, 6, cache=cache)
        runner.run(ids, 2, 6, cache=cache, hidden=hidden)
        with pytest.raises(RangeError, match="tokens must pass the layers below first"):
            runner.run(ids, 2, 6, cache=cache, hidden=hidden)
