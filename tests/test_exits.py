"""Mode `exit`: exited tokens are counted and audited, and the KV cache ends up exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scenarios import error
from test_generate import GREEDY, NEW, WrongHead, artifact, engine, prompts
from tide.config import TIDEConfig
from tide.decode.loop import DecodeLoop
from tide.decode.sequence import SequenceState
from tide.engine import TIDE
from tide.exits.policy import ScriptedPolicy
from tide.models.tokens import TokenBatch
from tiny import FAMILIES, tiny_model


def test_a_script_that_exits_is_what_the_counters_show() -> None:
    model = tiny_model("llama")
    tide = engine(model, "exit", "always", drafts=(), max_pending=100)
    calls = [0] * 6
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
    stats = tide.last_stats
    # The prompt at full depth, then every token exits after layer 1; nothing goes deeper.
    assert calls == [NEW, NEW, 1, 1, 1, 1]
    assert stats.layers_run == sum(calls)
    assert stats.layers_full == NEW * 6
    assert stats.exits_per_layer == {1: NEW - 1}
    assert (stats.total_tokens, stats.remaining_tokens) == (NEW, 1)
    assert stats.depths == [[6] + [2] * (NEW - 1)]
    assert stats.audited == 0


def test_the_cap_sends_pending_tokens_to_full_depth() -> None:
    tide = engine(tiny_model("llama"), "exit", "always", drafts=(), max_pending=4)
    tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
    stats = tide.last_stats
    deep = (NEW - 1) // 4
    assert tide.runner.counts.calls == [NEW, NEW] + [1 + deep] * 4
    assert stats.exits_per_layer == {1: NEW - 1}
    assert stats.audited == 4 * deep


def test_audit_tail_audits_every_exited_token() -> None:
    for policy, differed in (("always", None), ("adversarial", NEW - 1)):
        tide = engine(tiny_model("llama"), "exit", policy, drafts=(), audit_tail=True)
        tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
        assert tide.last_stats.audited == NEW - 1
        if differed is not None:
            assert tide.last_stats.differed == differed


@pytest.mark.parametrize("drafts", [(), ("context",)])
def test_audit_tail_finds_tokens_that_wait_deeper(drafts: tuple[str, ...]) -> None:
    tide = TIDE(
        tiny_model("llama"),
        artifact(),
        TIDEConfig(min_layers=0, audit_tail=True, drafts=drafts),
        policy=ScriptedPolicy(lambda at, checkpoint: checkpoint == 1),
        allow_mismatch=True,
        check=False,
    )
    tide.generate(**prompts(4), **GREEDY, eos_token_id=None)
    assert tide.last_stats.audited == tide.last_stats.exited_tokens == 4 * (NEW - 1)


@pytest.mark.parametrize("kv", ["deferred", "propagate", "zero_pad"])
@pytest.mark.parametrize("drafts", [(), ("context",)])
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(
    kv: str, drafts: tuple[str, ...]
) -> None:
    model = tiny_model("llama")
    batch = prompts(4)

    def run(sequences: list[int]) -> list[list[int]]:
        tide = TIDE(
            model,
            artifact(),
            TIDEConfig(mode="exit", min_layers=0, kv_cache_strategy=kv, drafts=drafts),
            policy=ScriptedPolicy(lambda at, c: (at.position * 5 + c) % 3 == 0),
            allow_mismatch=True,
            check=False,
        )
        some = {name: given[sequences] for name, given in batch.items()}
        out = tide.generate(**some, **GREEDY, eos_token_id=None)
        return out[:, 9:].tolist()

    together = run([0, 1, 2, 3])
    assert [run([s])[0] for s in range(4)] == together


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_deep_pass_kv_is_that_of_a_full_forward(family: str, monkeypatch: Any) -> None:
    kept: list[tuple[DecodeLoop, list[SequenceState]]] = []
    end_step = DecodeLoop.end_step

    def remember(self: DecodeLoop) -> None:
        # Finished sequences are dropped with their waterlines; audit_tail runs all of them to full
        # depth before that. Here all end together, in the last step.
        kept.append((self, list(self.batch.sequences)))
        end_step(self)

    monkeypatch.setattr(DecodeLoop, "end_step", remember)
    tide = engine(tiny_model(family), "exit", "random", audit_tail=True, drafts=())
    tide.generate(**prompts(4), **GREEDY, eos_token_id=None)
    loop, sequences = kept[-1]
    assert len(sequences) == 4
    for i, sequence in enumerate(sequences):
        fed = sequence.tokens[:-1]
        alone = tide.runner.new_cache(1)
        tide.runner.run(TokenBatch(torch.tensor([fed])), 0, 6, cache=alone)
        for layer in range(6):
            pairs = zip(loop.batch.cache.read(layer, i), alone.read(layer, 0), strict=True)
            for got, expected in pairs:
                assert got.shape == expected.shape
                assert error(got, expected) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_propagate_and_zero_pad_never_run_the_skipped_layers(family: str) -> None:
    for kv in ("propagate", "zero_pad"):
        tide = engine(tiny_model(family), "exit", "always", drafts=(), kv_cache_strategy=kv)
        tide.generate(**prompts(2), **GREEDY, eos_token_id=None)
        counts = tide.runner.counts
        assert counts.calls == [NEW, NEW, 1, 1, 1, 1]
        assert counts.fills[5] == (2 * (NEW - 1) if kv == "propagate" else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_exits_it_equals_generate(family: str) -> None:
    model = tiny_model(family)
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)
    for kv in ("deferred", "propagate", "zero_pad"):
        tide = engine(model, "exit", "never", kv_cache_strategy=kv, drafts=())
        assert torch.equal(tide.generate(**kwargs), expected)
        assert tide.last_stats.exit_rate == 0


def test_zero_pad_is_not_propagate() -> None:
    model = tiny_model("llama")
    options = {**prompts(1), **GREEDY, "eos_token_id": None}
    outputs = [
        engine(model, "exit", "random", drafts=(), kv_cache_strategy=kv).generate(**options)
        for kv in ("deferred", "propagate", "zero_pad")
    ]
    assert not torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_drafts_in_exit_mode_do_not_change_the_output() -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(4), **GREEDY, "max_new_tokens": 60, "eos_token_id": None}
    undrafted = engine(model, "exit", "random", drafts=())
    drafting = engine(model, "exit", "random", drafts=("context",), fixed_drafts=True)
    assert torch.equal(undrafted.generate(**kwargs), drafting.generate(**kwargs))
    assert sum(drafting.last_stats.accepted.values()) > 0
    assert drafting.last_stats.steps < undrafted.last_stats.steps


def test_wrong_heads_are_wrong() -> None:
    """Other tests rely on this: the adversarial policy drafts tokens that are never accepted."""
    tide = engine(
        tiny_model("llama"), "lossless", "adversarial", drafts=("exit",), fixed_drafts=True
    )
    tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
    assert isinstance(tide.artifact.checkpoints[0].head, WrongHead)
    assert tide.last_stats.drafted["exit"] > 10
    assert tide.last_stats.accepted["exit"] == 0
