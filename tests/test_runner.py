"""Range-running equals the model's own forward in every family, however tokens pass the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scenarios import SCENARIOS, cuts, error, full_depth, pack, pad
from tide.errors import RangeError
from tide.models.attach import RUNNERS
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch
from tiny import FAMILIES, VOCABULARY, tiny_model

TOKENS = 12  # more than the windows of the sliding families

every_family = pytest.mark.parametrize("family", FAMILIES)
every_runner = pytest.mark.parametrize("runner", RUNNERS)

# Both runners make the same calls of the same layers, so some matrices run whole for one of them,
# and for the other only on: one type of layer, two types, learned positions, layers that return
# tuples, attention sinks.
FEW_FAMILIES = ("llama", "gemma3_text", "gpt2", "falcon", "gpt_oss")
MOST_PAIRS = [("segments", family) for family in FAMILIES] + [("shims", f) for f in FEW_FAMILIES]


def random_ids(sequences: int = 2, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (sequences, tokens), generator=generator)


def worst_error(model: Any, runner: DepthRunner, scenario: str) -> float:
    outcome = SCENARIOS[scenario](runner, random_ids())
    return max(error(got, full_depth(model, runner, ids)[-len(got) :]) for ids, got in outcome)


@pytest.mark.parametrize("scenario", SCENARIOS)
@every_family
@every_runner
def test_equals_full_forward(runner: str, family: str, scenario: str) -> None:
    model = tiny_model(family)
    assert worst_error(model, RUNNERS[runner](model), scenario) <= 1e-5


@pytest.mark.parametrize("scenario", ["deferred", "ragged, padded left", "rolled back"])
@pytest.mark.parametrize(("runner", "family"), MOST_PAIRS)
def test_equals_full_forward_with_eager_attention(runner: str, family: str, scenario: str) -> None:
    model = tiny_model(family, attention="eager")
    assert worst_error(model, RUNNERS[runner](model), scenario) <= 1e-5


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("runner", "family"), MOST_PAIRS)
def test_bf16_is_within_twice_the_error_of_a_full_bf16_forward(
    runner: str, family: str, scenario: str
) -> None:
    exact, rounded = tiny_model(family), tiny_model(family, dtype=torch.bfloat16)
    of_exact, of_rounded = RUNNERS[runner](exact), RUNNERS[runner](rounded)
    ours = full = 0.0
    for ids, got in SCENARIOS[scenario](of_rounded, random_ids()):
        expected = full_depth(exact, of_exact, ids)[-len(got) :]
        ours = max(ours, error(got, expected))
        full = max(full, error(full_depth(rounded, of_rounded, ids)[-len(got) :], expected))
    assert ours <= 2 * full


class Schedule:
    """Sequences whose tokens pass the segments at different times, as `data` draws it."""

    def __init__(self, runner: DepthRunner, data: st.DataObject, sequences: int = 2) -> None:
        self.runner, self.data, self.segments = runner, data, cuts(runner)
        self.cache = runner.new_cache(sequences)
        self.batch = range(sequences)
        self.ids = [torch.empty(0, dtype=torch.long) for _ in self.batch]
        # passed[k][s]: outputs of segment k for the tokens of sequence s so far, [tokens, hidden]
        self.passed = [[torch.empty(0, 32) for _ in self.batch] for _ in self.segments]
        seed = data.draw(st.integers(0, 99), label="token seed")
        self.generator = torch.Generator().manual_seed(seed)

    def draw_counts(self, least: int, most: int) -> list[int]:
        return [self.data.draw(st.integers(least, most), label="tokens") for _ in self.batch]

    def step(self, counts: list[int]) -> None:
        """New tokens pass the first segment."""
        for s in self.batch:
            new = torch.randint(3, VOCABULARY, (counts[s],), generator=self.generator)
            self.ids[s] = torch.cat([self.ids[s], new])
        self.advance(0, counts)

    def advance(self, k: int, counts: list[int]) -> None:
        """The next tokens of each sequence pass segment k."""
        if not any(counts):
            return
        padding_side = self.data.draw(st.sampled_from(["left", "right"]), label="padding")
        done = [len(states) for states in self.passed[k]]
        spans = [slice(n, n + count) for n, count in zip(done, counts, strict=True)]
        tokens = pack([self.ids[s][spans[s]] for s in self.batch], padding_side)
        below = None
        if k:
            below, _ = pad([self.passed[k - 1][s][spans[s]] for s in self.batch], padding_side)
        out = self.runner.run(tokens, *self.segments[k], cache=self.cache, hidden=below)
        for s in self.batch:
            self.passed[k][s] = torch.cat([self.passed[k][s], out[s][tokens.valid[s]]])

    def pending(self, k: int) -> list[int]:
        """Tokens of each sequence that wait before segment k."""
        return [len(self.passed[k - 1][s]) - len(self.passed[k][s]) for s in self.batch]

    def act(self) -> None:
        action = self.data.draw(st.sampled_from(["step", "flush", "roll back"]), label="action")
        if action == "step":
            self.step(self.draw_counts(0, 3))
        elif action == "flush":
            k = self.data.draw(st.integers(1, len(self.segments) - 1), label="segment")
            take = [self.data.draw(st.integers(0, n), label="take") for n in self.pending(k)]
            self.advance(k, take)
        else:
            keep = [self.data.draw(st.integers(1, len(ids)), label="keep") for ids in self.ids]
            self.cache.rollback(keep)
            self.ids = [ids[:n] for ids, n in zip(self.ids, keep, strict=True)]
            self.passed = [
                [states[:n] for states, n in zip(passed, keep, strict=True)]
                for passed in self.passed
            ]

    def finish(self) -> list[Tensor]:
        """All tokens pass the segments that they have not; outputs of the last, by sequence."""
        for k in range(1, len(self.segments)):
            self.advance(k, self.pending(k))
        return self.passed[-1]


@every_runner
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_full_forward(runner: str, data: st.DataObject) -> None:
    """Random steps, flushes and rollbacks on sequences of different lengths.

    Gemma 3 has both types of layer.
    """
    model = tiny_model("gemma3_text")
    schedule = Schedule(RUNNERS[runner](model), data)
    schedule.step(schedule.draw_counts(1, 6))
    for _ in range(data.draw(st.integers(1, 8), label="actions")):
        schedule.act()
    for ids, got in zip(schedule.ids, schedule.finish(), strict=True):
        assert error(got, full_depth(model, schedule.runner, ids)) <= 1e-5


@every_family
@every_runner
def test_kv_fill_is_bit_identical_to_a_full_call(runner: str, family: str) -> None:
    made = RUNNERS[runner](tiny_model(family))
    n, ids = made.n_layers, random_ids()
    prompt, rest = TokenBatch(ids[:, :7]), TokenBatch(ids[:, 7:])
    called, filled = made.new_cache(2), made.new_cache(2)
    for cache in (called, filled):
        made.run(prompt, 0, n, cache=cache)
        exited = made.run(rest, 0, 2, cache=cache)
    for layer in range(2, n):
        made.run(rest, layer, layer + 1, cache=called, hidden=exited)
    given = exited.clone()
    made.counts.reset()
    made.fill_kv(rest, 2, n, cache=filled, hidden=exited)
    assert torch.equal(exited, given)
    assert made.counts.calls == made.counts.tokens == [0] * n
    assert made.counts.fills == [0, 0] + [rest.ids.numel()] * (n - 2)
    for layer in range(n):
        for s in range(2):
            for got, expected in zip(filled.read(layer, s), called.read(layer, s), strict=True):
                assert got.shape[1] == TOKENS
                assert torch.equal(got, expected)


@every_family
@every_runner
def test_kv_of_deferred_tokens_is_that_of_a_full_forward(runner: str, family: str) -> None:
    made = RUNNERS[runner](tiny_model(family))
    n, ids = made.n_layers, random_ids()
    at_once, late = made.new_cache(2), made.new_cache(2)
    made.run(TokenBatch(ids), 0, n, cache=at_once)
    waiting = [made.run(TokenBatch(ids[:, t : t + 1]), 0, 2, cache=late) for t in range(TOKENS)]
    made.run(TokenBatch(ids), 2, n, cache=late, hidden=torch.cat(waiting, 1))
    for layer in range(n):
        for s in range(2):
            for got, expected in zip(late.read(layer, s), at_once.read(layer, s), strict=True):
                assert error(got, expected) <= 1e-5


@every_family
@every_runner
def test_counters_equal_the_calls_that_hooks_saw(runner: str, family: str) -> None:
    made = RUNNERS[runner](tiny_model(family))
    calls = [0] * made.n_layers
    inner = [0] * made.n_layers

    def count(into: list[int], index: int) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            into[index] += 1

        return hook

    assert sum(made.counts.calls) == 0
    for i, layer in enumerate(made.parts.layers):
        layer.register_forward_pre_hook(count(calls, i))
        next(layer.children()).register_forward_pre_hook(count(inner, i))
    ids = random_ids()
    cache = made.new_cache(2)
    made.run(TokenBatch(ids[:, :4]), 0, 6, cache=cache)
    waiting = [made.run(TokenBatch(ids[:, t : t + 1]), 0, 2, cache=cache) for t in range(4, 9)]
    made.run(TokenBatch(ids[:, 4:9]), 2, 4, cache=cache, hidden=torch.cat(waiting, 1))
    assert made.counts.calls == calls == inner == [6, 6, 2, 2, 1, 1]
    assert made.counts.tokens == [18, 18, 18, 18, 8, 8]


def structure(model: Any) -> Any:
    """Everything about a model's modules and config that a runner might change."""
    modules = [
        (
            name,
            id(module),
            type(module),
            sorted(vars(module)),
            [id(child) for child in module._modules.values()],
            [id(hook) for hook in module._forward_hooks.values()],
            [id(hook) for hook in module._forward_pre_hooks.values()],
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return modules, model.config.to_dict()


def snapshot(model: Any) -> Any:
    return structure(model), model(random_ids()).logits.tolist()


def run_everything(runner: DepthRunner) -> None:
    """A pass of each type: prompt, range, KV fill, and a batch of different lengths."""
    ids, n = random_ids(), runner.n_layers
    cache = runner.new_cache(2)
    runner.run(TokenBatch(ids[:, :7]), 0, n, cache=cache)
    cache.rollback([7, 5])
    tokens = TokenBatch(ids[:, 7:])
    hidden = runner.run(tokens, 0, 2, cache=cache)
    hidden = runner.run(tokens, 2, 4, cache=cache, hidden=hidden)
    runner.fill_kv(tokens, 4, n, cache=cache, hidden=hidden)


@every_family
@every_runner
@torch.no_grad()
def test_the_model_is_as_it_was_after_a_pass(runner: str, family: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    run_everything(RUNNERS[runner](model))
    assert snapshot(model) == before


@every_family
def test_segments_do_not_change_the_model_even_while_a_pass_runs(family: str) -> None:
    model = tiny_model(family)
    runners = {name: runner(model) for name, runner in RUNNERS.items()}
    during: list[Any] = []
    for module in (model.get_input_embeddings(), *runners["segments"].parts.layers):
        module.register_forward_pre_hook(lambda *_: during.append(structure(model)))
    before = structure(model)
    run_everything(runners["segments"])
    assert len(during) == 2 + 6 + 2 + 2 + 2  # embeddings; layers of the four passes
    assert all(seen == before for seen in during)
    during.clear()
    run_everything(runners["shims"])  # which do: the comparison can tell
    assert any(seen != before for seen in during)
    assert structure(model) == before


@every_family
@every_runner
@torch.no_grad()
def test_an_exception_inside_a_run_restores_model_and_cache(runner: str, family: str) -> None:
    model = tiny_model(family)
    made = RUNNERS[runner](model)
    ids = random_ids()
    before = snapshot(model)

    def interrupt(module: Any, inputs: Any) -> None:
        raise KeyboardInterrupt

    cache = made.new_cache(2)
    made.run(TokenBatch(ids[:, :5]), 0, 6, cache=cache)
    handle = made.parts.layers[3].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.run(TokenBatch(ids[:, 5:7]), 0, 6, cache=cache)
    handle.remove()
    assert snapshot(model) == before
    assert cache.lengths(0) == (5, 5)
    assert made.counts.calls == [1] * 6
    hidden = made.run(TokenBatch(ids[:, 5:]), 0, 6, cache=cache)
    for s in range(2):
        assert error(hidden[s], full_depth(model, made, ids[s])[5:]) <= 1e-5


@every_runner
@torch.no_grad()
def test_the_model_itself_still_works_while_it_has_a_runner(runner: str) -> None:
    model = tiny_model("llama")
    ids = random_ids()
    before = model(ids).logits
    made = RUNNERS[runner](model)
    assert torch.equal(model(ids).logits, before)
    cache = made.new_cache(2)
    hidden = made.run(TokenBatch(ids), 0, 3, cache=cache)
    assert torch.equal(model(ids).logits, before)  # between two passes of one batch
    hidden = made.run(TokenBatch(ids), 3, 6, cache=cache, hidden=hidden)
    assert error(made.logits(hidden), before) <= 1e-5


@every_family
@every_runner
@torch.no_grad()
def test_logits_are_the_models_own(runner: str, family: str) -> None:
    model = tiny_model(family)
    ids = random_ids()
    made = RUNNERS[runner](model)
    hidden = made.run(TokenBatch(ids), 0, 6, cache=made.new_cache(2))
    assert error(made.logits(hidden), model(ids).logits) <= 1e-5


@every_runner
@torch.no_grad()
def test_target_tokens_are_those_of_one_forward_pass_and_are_not_counted(runner: str) -> None:
    model = tiny_model("gemma3_text")
    made = RUNNERS[runner](model)
    ids = random_ids()[0]
    expected = model(ids[None]).logits[0].argmax(-1).tolist()
    assert made.target_tokens(ids, 0) == expected
    assert made.target_tokens(ids, 3, step=2) == expected[3:]
    assert sum(made.counts.calls) == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@every_runner
def test_tokens_may_pass_in_any_order_at_given_positions(runner: str, family: str) -> None:
    """Even tokens first, then odd ones: each attends to what stands before it, once it is there."""
    made = RUNNERS[runner](tiny_model(family))
    ids, half = random_ids(), TOKENS // 2
    positions = torch.arange(TOKENS).expand(2, -1)
    even = TokenBatch(ids[:, ::2], positions=positions[:, ::2])
    odd = TokenBatch(ids[:, 1::2], positions=positions[:, 1::2])
    cache = made.new_cache(2)
    below = made.run(TokenBatch(ids), 0, 3, cache=cache)
    # KV of those that exit first, so that the others find all that they may attend to.
    made.fill_kv(even, 3, 6, cache=cache, hidden=below[:, ::2])
    late = made.run(odd, 3, 6, cache=cache, hidden=below[:, 1::2])

    again = made.new_cache(2)
    made.run(TokenBatch(ids), 0, 3, cache=again)
    mixed = []
    for t in range(TOKENS):  # one by one, in order, with the same KV
        one, hidden = TokenBatch(ids[:, t : t + 1]), below[:, t : t + 1]
        if t % 2:
            mixed.append(made.run(one, 3, 6, cache=again, hidden=hidden))
        else:
            made.fill_kv(one, 3, 6, cache=again, hidden=hidden)
    assert cache.lengths(5) == again.lengths(5) == (TOKENS, TOKENS)
    assert late.shape[1] == half
    assert error(late, torch.cat(mixed, 1)) <= 1e-5


@every_runner
def test_padding_is_no_token_and_may_hold_anything(runner: str) -> None:
    model = tiny_model("llama")
    made = RUNNERS[runner](model)
    ids = random_ids()
    valid = torch.ones_like(ids)  # integers, as an attention mask has them
    valid[1, :4] = 0
    tokens = TokenBatch(ids, valid)
    cache = made.new_cache(2)
    below = made.run(tokens, 0, 3, cache=cache)
    below[1, :4] = torch.nan
    hidden = made.run(tokens, 3, 6, cache=cache, hidden=below)
    assert made.counts.tokens == [2 * TOKENS - 4] * 6
    assert error(hidden[0], full_depth(model, made, ids[0])) <= 1e-5
    assert error(hidden[1, 4:], full_depth(model, made, ids[1, 4:])) <= 1e-5


@pytest.mark.parametrize("second", RUNNERS)
@pytest.mark.parametrize("first", RUNNERS)
def test_two_runners_take_turns_on_one_model(first: str, second: str) -> None:
    model = tiny_model("llama")
    tokens = TokenBatch(random_ids())
    one, other = RUNNERS[first](model), RUNNERS[second](model)
    caches = one.new_cache(2), other.new_cache(2)
    a = one.run(tokens, 0, 3, cache=caches[0])
    b = other.run(tokens, 0, 3, cache=caches[1])
    assert torch.equal(a, b)
    a = one.run(tokens, 3, 6, cache=caches[0], hidden=a)
    assert torch.equal(other.run(tokens, 3, 6, cache=caches[1], hidden=b), a)


@every_runner
def test_modules_that_are_replaced_after_attach_are_the_ones_that_run(runner: str) -> None:
    """As adapters, quantisation and `resize_token_embeddings` replace them."""
    model = tiny_model("llama")
    made = RUNNERS[runner](model)
    tokens = TokenBatch(random_ids())
    original = made.run(tokens, 0, 6, cache=made.new_cache(2))
    replacement = tiny_model("llama", seed=1).model
    model.model.layers[2] = replacement.layers[2]
    model.model.layers[2].self_attn.layer_idx = 2
    after_layer = made.run(tokens, 0, 6, cache=made.new_cache(2))
    assert error(after_layer, original) > 1e-2
    assert error(after_layer[0], full_depth(model, made, tokens.ids[0])) <= 1e-5
    model.set_input_embeddings(replacement.embed_tokens)
    after_embeddings = made.run(tokens, 0, 6, cache=made.new_cache(2))
    assert error(after_embeddings, after_layer) > 1e-2
    assert error(after_embeddings[0], full_depth(model, made, tokens.ids[0])) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@every_runner
def test_attention_may_be_changed_after_attach(runner: str, family: str) -> None:
    """The decoder makes its own masks for prompts, and eager attention needs another type."""
    model = tiny_model(family)
    made = RUNNERS[runner](model)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        for scenario in ("deferred", "ragged, padded left"):
            assert worst_error(model, made, scenario) <= 1e-5


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("llama", {"output_hidden_states": True}),
        ("gpt2", {"output_hidden_states": True}),
        ("falcon", {"output_hidden_states": True}),
        ("gemma3_text", {"output_attentions": True}),
        ("mixtral", {"output_router_logits": True}),
    ],
)
@every_runner
@torch.no_grad()
def test_settings_that_make_the_model_return_more(runner: str, family: str, setting: Any) -> None:
    """Transformers collects hidden states by hooks that it adds to layers once for each decoder."""
    model = tiny_model(family, attention="eager", **setting)
    ids = random_ids()
    expected = tiny_model(family, attention="eager", **setting)(ids)
    made = RUNNERS[runner](model)
    run_everything(made)
    assert worst_error(model, made, "deferred") <= 1e-5
    got = model(ids)
    assert len(got) == len(expected)
    for name in ("hidden_states", "attentions", "router_logits"):
        if (of_model := getattr(expected, name, None)) is not None:
            assert len(getattr(got, name)) == len(of_model)


@every_runner
def test_misuse_is_refused_by_name(runner: str) -> None:
    made = RUNNERS[runner](tiny_model("llama"))
    tokens = TokenBatch(random_ids())
    cache = made.new_cache(2)
    with pytest.raises(RangeError, match=r"\[0, 7\); allowed"):
        made.run(tokens, 0, 7, cache=cache)
    with pytest.raises(RangeError, match="without a hidden state"):
        made.run(tokens, 2, 6, cache=cache)
    with pytest.raises(RangeError, match=r"need \[2, new_tokens\]"):
        made.run(TokenBatch(tokens.ids[:1]), 0, 6, cache=cache)
    with pytest.raises(RangeError, match=r"tokens as a Tensor; pass TokenBatch"):
        made.run(tokens.ids, 0, 6, cache=cache)  # type: ignore[arg-type]
    hidden = made.run(tokens, 0, 2, cache=cache)
    with pytest.raises(RangeError, match="with a hidden state"):
        made.run(tokens, 0, 2, cache=cache, hidden=hidden)
    with pytest.raises(RangeError, match="first two dimensions"):
        made.run(tokens, 2, 6, cache=cache, hidden=hidden[:, :3])
    with pytest.raises(RangeError, match="valid of shape"):
        made.run(TokenBatch(tokens.ids, torch.ones(1, TOKENS)), 0, 2, cache=cache)
    with pytest.raises(RangeError, match="positions of shape"):
        made.run(TokenBatch(tokens.ids, positions=torch.arange(3)[None]), 0, 2, cache=cache)
    with pytest.raises(RangeError, match="hold different lengths"):
        made.run(tokens, 0, 6, cache=cache)
    made.run(tokens, 2, 6, cache=cache, hidden=hidden)
    with pytest.raises(RangeError, match="tokens must pass the layers below first"):
        made.run(tokens, 2, 6, cache=cache, hidden=hidden)
