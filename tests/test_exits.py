"""Mode `exit`: what leaves is counted, checked later, and K and V end up exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scenarios import error
from test_generate import GREEDY, NEW, WrongHead, artifact, engine, prompts
from tide.config import TIDEConfig
from tide.decode.loop import DepthDecoder
from tide.engine import TIDE
from tide.exits.policy import ScriptedPolicy
from tiny import FAMILIES, tiny_model


def test_a_script_that_exits_is_what_the_counters_show() -> None:
    model = tiny_model("llama")
    tide = engine(model, "exit", "always", drafts=(), max_pending=100)
    calls = [0] * 6
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
    stats = tide.last_stats
    # The prompt at full depth, then every token leaves after layer 1; nothing goes deeper.
    assert calls == [NEW, NEW, 1, 1, 1, 1]
    assert stats.layers_run == sum(calls)
    assert stats.layers_full == NEW * 6
    assert stats.exits_per_layer == {1: NEW - 1}
    assert (stats.total_tokens, stats.remaining_tokens) == (NEW, 1)
    assert stats.depths == [[6] + [2] * (NEW - 1)]
    assert stats.audited == 0


def test_the_cap_sends_what_waits_down() -> None:
    tide = engine(tiny_model("llama"), "exit", "always", drafts=(), max_pending=4)
    tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
    stats = tide.last_stats
    deep = (NEW - 1) // 4
    assert tide.runner.counts.calls == [NEW, NEW] + [1 + deep] * 4
    assert stats.exits_per_layer == {1: NEW - 1}
    assert stats.audited == 4 * deep


def test_audit_tail_checks_every_early_token() -> None:
    for policy, differed in (("always", None), ("adversarial", NEW - 1)):
        tide = engine(tiny_model("llama"), "exit", policy, drafts=(), audit_tail=True)
        tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
        assert tide.last_stats.audited == NEW - 1
        if differed is not None:
            assert tide.last_stats.differed == differed


@pytest.mark.parametrize("drafts", [(), ("context",)])
def test_audit_tail_finds_those_that_wait_deeper(drafts: tuple[str, ...]) -> None:
    tide = TIDE(
        tiny_model("llama"),
        artifact(),
        TIDEConfig(min_layers=0, audit_tail=True, drafts=drafts),
        policy=ScriptedPolicy(lambda place, checkpoint: checkpoint == 1),
        allow_mismatch=True,
        check=False,
    )
    tide.generate(**prompts(4), **GREEDY, eos_token_id=None)
    assert tide.last_stats.audited == tide.last_stats.exited_tokens == 4 * (NEW - 1)


@pytest.mark.parametrize("kv", ["deferred", "propagate", "zero_pad"])
@pytest.mark.parametrize("drafts", [(), ("context",)])
def test_a_row_does_not_depend_on_its_batch_mates(kv: str, drafts: tuple[str, ...]) -> None:
    model = tiny_model("llama")
    batch = prompts(4)

    def run(rows: list[int]) -> list[list[int]]:
        tide = TIDE(
            model,
            artifact(),
            TIDEConfig(mode="exit", min_layers=0, kv_cache_strategy=kv, drafts=drafts),
            policy=ScriptedPolicy(lambda place, c: (place.position * 5 + c) % 3 == 0),
            allow_mismatch=True,
            check=False,
        )
        out = tide.generate(**{k: v[rows] for k, v in batch.items()}, **GREEDY, eos_token_id=None)
        return out[:, 9:].tolist()

    together = run([0, 1, 2, 3])
    assert [run([row])[0] for row in range(4)] == together


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_flush_kv_is_that_of_a_full_forward(family: str, monkeypatch: Any) -> None:
    decoders: list[DepthDecoder] = []
    initialise = DepthDecoder.__init__

    def remember(self: DepthDecoder, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        decoders.append(self)

    monkeypatch.setattr(DepthDecoder, "__init__", remember)
    # The last row to finish is dropped with its waterlines; audit_tail flushes it before that.
    monkeypatch.setattr(DepthDecoder, "_end_step", _keep_rows(DepthDecoder._end_step))
    tide = engine(tiny_model(family), "exit", "random", audit_tail=True, drafts=())
    tide.generate(**prompts(4), **GREEDY, eos_token_id=None)
    (decoder,) = decoders
    runner = tide.runner
    for r, row in enumerate(decoder.kept_rows):  # type: ignore[attr-defined]
        fed = row.tokens[:-1]
        with runner:
            plain = runner.new_cache(1)
            runner.run(torch.tensor([fed]), 0, 6, cache=plain)
        for layer in range(6):
            for got, expected in zip(
                decoder.cache.read(layer, r), plain.read(layer, 0), strict=True
            ):
                assert got.shape == expected.shape
                assert error(got, expected) <= 1e-5


def _keep_rows(end_step: Any) -> Any:
    def wrapped(self: Any) -> None:
        self.kept_rows = list(self.rows)
        end_step(self)

    return wrapped


@pytest.mark.parametrize("family", FAMILIES)
def test_propagate_and_zero_pad_skip_layers_for_good(family: str) -> None:
    for kv in ("propagate", "zero_pad"):
        tide = engine(tiny_model(family), "exit", "always", drafts=(), kv_cache_strategy=kv)
        tide.generate(**prompts(2), **GREEDY, eos_token_id=None)
        counts = tide.runner.counts
        assert counts.calls == [NEW, NEW, 1, 1, 1, 1]
        assert counts.fills[5] == (2 * (NEW - 1) if kv == "propagate" else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_never_leaving_is_plain_generation(family: str) -> None:
    model = tiny_model(family)
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)
    for kv in ("deferred", "propagate", "zero_pad"):
        tide = engine(model, "exit", "never", kv_cache_strategy=kv, drafts=())
        assert torch.equal(tide.generate(**kwargs), expected)
        assert tide.last_stats.exit_rate == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tail_over_all_layers_above_the_checkpoint_is_the_full_model(family: str) -> None:
    """A tail that skips nothing must say what full depth says, with its provisional K and V."""
    model = tiny_model(family)
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)
    tail = artifact(strategy="tail", tail_layers=4)
    tail.checkpoints = tail.checkpoints[:1]  # after layer 1; the tail is layers 2 to 5
    for max_pending in (3, 100):
        tide = TIDE(
            model,
            tail,
            TIDEConfig(min_layers=0, max_pending=max_pending, audit_tail=True, drafts=()),
            policy=ScriptedPolicy(lambda place, c: place.position % 5 != 0),
            allow_mismatch=True,
            check=False,
        )
        assert torch.equal(tide.generate(**kwargs), expected)
        assert tide.last_stats.exit_rate > 0.5
        assert tide.last_stats.differed == 0 < tide.last_stats.audited


def test_zero_pad_is_not_propagate() -> None:
    model = tiny_model("llama")
    options = {**prompts(1), **GREEDY, "eos_token_id": None}
    outputs = [
        engine(model, "exit", "random", drafts=(), kv_cache_strategy=kv).generate(**options)
        for kv in ("deferred", "propagate", "zero_pad")
    ]
    assert not torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_drafts_in_exit_mode_do_not_change_what_is_said() -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(4), **GREEDY, "max_new_tokens": 60, "eos_token_id": None}
    plain = engine(model, "exit", "random", drafts=())
    drafting = engine(model, "exit", "random", drafts=("context",))
    assert torch.equal(plain.generate(**kwargs), drafting.generate(**kwargs))
    assert sum(drafting.last_stats.accepted.values()) > 0
    assert drafting.last_stats.rounds < plain.last_stats.rounds


def test_wrong_heads_are_wrong() -> None:
    """The adversarial policy of other tests is only as good as this."""
    tide = engine(
        tiny_model("llama"), "lossless", "adversarial", drafts=("exit",), fixed_drafts=True
    )
    tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
    assert isinstance(tide.artifact.checkpoints[0].head, WrongHead)
    assert tide.last_stats.drafted["exit"] > 10
    assert tide.last_stats.accepted["exit"] == 0
