"""Exits as an engine uses them: heads, vocabularies, tables, thresholds and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from test_generate import GREEDY, artifact, prompts
from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.decode.pass_costs import PassCosts
from tide.engine import TIDE
from tide.errors import ArtifactError, ConfigError, UnsupportedModelError
from tide.exits.gate import ExitGate
from tide.exits.heads import ExitHead, Readout
from tide.exits.policy import ScriptedPolicy
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.tokens import TokenBatch
from tiny import tiny_model

ALWAYS = ScriptedPolicy(lambda at, checkpoint: True)


def test_a_token_whose_vocabulary_is_ruled_out_does_not_exit() -> None:
    model = tiny_model("llama")
    exits = artifact()
    exits.vocabulary = torch.arange(3, 40)
    options = {**prompts(2), **GREEDY, "eos_token_id": None, "suppress_tokens": list(range(40))}
    for mode in ("lossless", "exit"):
        config = TIDEConfig(mode=mode, min_layers=0)
        tide = TIDE(model, exits, config, policy=ALWAYS, allow_mismatch=True, check=False)
        assert torch.equal(tide.generate(**options), model.generate(**options))
        assert tide.last_stats.exited_tokens == 0


def test_a_reduced_vocabulary_predicts_its_own_tokens() -> None:
    """An exit predicts the likeliest of its tokens, as the whole head with the others barred."""
    model = tiny_model("llama")
    outputs = []
    for vocabulary in (torch.tensor([50, 60, 7, 80]), None):
        exits = artifact()
        exits.vocabulary = vocabulary
        barred = [t for t in range(97) if t not in (50, 60, 7, 80)]
        for extra in ({}, {"suppress_tokens": barred}):
            if vocabulary is None and not extra:
                continue
            config = TIDEConfig(min_layers=0, drafts=(), max_pending=100)
            tide = TIDE(model, exits, config, policy=ALWAYS, allow_mismatch=True, check=False)
            first = {"forced_bos_token_id": None, **prompts(1), **GREEDY, "eos_token_id": None}
            outputs.append(tide.generate(**first, **extra)[0, 10:].tolist())
    # The first new token is the full model's and differs when it is barred; the rest is compared
    # between the two runs that bar.
    assert outputs[1] == outputs[2]
    assert set(outputs[0]) <= {50, 60, 7, 80}


def test_states_go_to_the_device_of_a_reduced_head() -> None:
    """Tied to the embeddings, it may be on another device than the norm (device_map="auto")."""
    moves: list[Any] = []

    class Elsewhere(torch.Tensor):
        """Stands for a tensor on another device."""

        def to(self, device: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            moves.append(device)
            return self.as_subclass(torch.Tensor)

    class Norm(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.as_subclass(Elsewhere)

    head, states = torch.nn.Linear(32, 97), torch.randn(3, 32)
    config = SimpleNamespace(vocab_size=97)
    logits = Readout(Norm(), head, config, torch.tensor([4, 50, 7]))(states)
    assert moves == [head.weight.device]
    assert not isinstance(logits, Elsewhere)
    assert torch.allclose(logits, head(states)[:, [4, 50, 7]], atol=1e-6)


def test_the_table_drafts_and_an_affine_head_predicts() -> None:
    model = tiny_model("llama")
    options = {**prompts(1), **GREEDY, "eos_token_id": None}
    expected = model.generate(**options)[0].tolist()
    exits = artifact(strategy="affine")
    exits.table = build_table([expected], 97)
    config = TIDEConfig(mode="lossless", min_layers=0, drafts=("table",))
    tide = TIDE(model, exits, config, allow_mismatch=True, check=False)
    tide.drafter.fixed = True
    assert tide.generate(**options)[0].tolist() == expected
    assert sum(tide.last_stats.accepted.values()) > 15

    def output(bias: float) -> list[int]:
        made = artifact(strategy="affine")
        for checkpoint in made.checkpoints:
            checkpoint.head.affine.bias.data.fill_(bias)  # type: ignore[union-attr]
        config = TIDEConfig(min_layers=0, drafts=())
        exiting = TIDE(model, made, config, policy=ALWAYS, allow_mismatch=True, check=False)
        return exiting.generate(**options)[0].tolist()

    assert output(0.0) != output(3.0)


def test_thresholds_come_from_the_settings_or_from_calibration() -> None:
    model = tiny_model("llama")
    exits = artifact()
    for checkpoint in exits.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=0.0)

    def rate(**config: Any) -> float:
        tide = TIDE(
            model, exits, TIDEConfig(min_layers=0, drafts=(), **config), allow_mismatch=True,
            check=False,
        )  # fmt: skip
        tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
        return tide.last_stats.exit_rate

    assert rate(exit_threshold=None) == 23 / 24  # calibrated: all but the first
    assert rate(exit_threshold=2.0) == 0
    assert 0 < rate(exit_threshold=0.05) < 23 / 24
    with pytest.raises(ConfigError, match="needs an exit"):
        TIDE(model, exits, TIDEConfig(), allow_mismatch=True, check=False)
    with pytest.raises(ValueError, match="no router"):
        ExitGate(ExitHead("identity", 32), None, Thresholds(router=0.5))
    exits.hidden_size = 64
    with pytest.raises(ArtifactError, match="hidden size 64; the model has 32"):
        TIDE(model, exits, allow_mismatch=True, check=False)


class CountedHead(ExitHead):
    """Counts the states that it is given."""

    read = 0

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        CountedHead.read += len(hidden)
        return super().transform(hidden)


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_gates_that_no_token_can_pass_are_not_evaluated(mode: str) -> None:
    model = tiny_model("llama")
    ranges: list[tuple[int, int]] = []

    def ran(*thresholds: Thresholds) -> set[tuple[int, int]]:
        made = artifact(CountedHead)
        for checkpoint, wanted in zip(made.checkpoints, thresholds, strict=True):
            checkpoint.router, checkpoint.thresholds = TokenRouter(32, 4), wanted
        config = TIDEConfig(exit_threshold=None, min_layers=0, mode=mode, drafts=("exit",))
        tide = TIDE(model, made, config, allow_mismatch=True, check=False)
        tide.drafter.fixed = True
        run = tide.runner.run_then

        def record(then: Any, tokens: TokenBatch, layers: Any, **kwargs: Any) -> Any:
            ranges.append(layers)
            return run(then, tokens, layers, **kwargs)

        tide.runner.run_then = record  # type: ignore[method-assign]
        ranges.clear()
        CountedHead.read = 0
        tide.generate(**prompts(2), **GREEDY, eos_token_id=None)
        assert tide.runner.counts.calls == [tide.last_stats.steps + 1] * 6
        return set(ranges)

    never, seldom = Thresholds(router=2.0), Thresholds(router=0.0, top_probability=1.0)
    assert ran(never, Thresholds(top_probability=1.01)) == {(0, 6)}
    assert CountedHead.read == 0
    # The other checkpoint is evaluated still, with its own thresholds and head.
    assert ran(never, seldom) == {(0, 6), (0, 4), (4, 6)}
    assert CountedHead.read == 2 * 23


def test_without_exits_no_part_of_the_head_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, exits = tiny_model("llama"), artifact()
    exits.vocabulary = torch.arange(3, 40)
    weight = model.lm_head.weight
    # A packed head, which cannot be read in part.
    model.lm_head.weight = torch.nn.Parameter(weight.detach()[:50].clone())
    options = {"allow_mismatch": True, "check": False}
    TIDE(model, exits, TIDEConfig(mode="off", min_layers=0), **options)
    with pytest.raises(UnsupportedModelError, match="packed, and cannot be read in part"):
        TIDE(model, exits, TIDEConfig(mode="exit", min_layers=0), **options)


def test_logits_are_the_models_own_once_the_circuit_breaker_has_tripped() -> None:
    model = tiny_model("llama")
    config = TIDEConfig(mode="exit", min_layers=0)
    tide = TIDE(model, artifact(), config, policy=ALWAYS, allow_mismatch=True, check=False)
    ids = prompts(2)["input_ids"]
    assert not torch.equal(tide(ids), model(ids).logits)
    tide.circuit_breaker = SimpleNamespace(tripped=True)  # type: ignore[assignment]
    assert torch.equal(tide(ids), model(ids).logits)


def test_steps_with_exits_are_booked_by_the_tokens_they_begin_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    booked: list[int] = []
    monkeypatch.setattr(
        PassCosts, "add", lambda self, batch, tokens, seconds: booked.append(tokens)
    )
    model = tiny_model("llama")
    for mode, every in (("exit", True), ("lossless", False)):
        config = TIDEConfig(mode=mode, min_layers=0, drafts=("exit",), max_tree=0, max_pending=4)
        tide = TIDE(model, artifact(), config, policy=ALWAYS, allow_mismatch=True, check=False)
        booked.clear()
        tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
        if every:  # each begins with one token, also where a deep pass takes others along
            assert booked == [1] * tide.last_stats.steps
        else:  # only deep passes, by all that they verify
            assert len(booked) < tide.last_stats.steps and max(booked) > 1


def test_one_artifact_serves_engines_of_different_dtypes() -> None:
    exits, config = artifact(strategy="affine"), TIDEConfig(min_layers=0)
    models = [tiny_model("llama", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    engines = [
        TIDE(model, exits, config, policy=ALWAYS, allow_mismatch=True, check=False)
        for model in models
    ]
    for tide in engines:
        tide.generate(**prompts(1), **GREEDY, eos_token_id=None)


def test_checkpoints_that_make_no_sense_are_refused() -> None:
    model = tiny_model("llama")
    late = artifact()
    late.checkpoints[1].layer = 5
    with pytest.raises(ConfigError, match="before the last of 6 layers"):
        TIDE(model, late, TIDEConfig(min_layers=0), allow_mismatch=True, check=False)
    # Checkpoints before min_layers are not used.
    config = TIDEConfig(min_layers=4, drafts=())
    tide = TIDE(model, artifact(), config, policy=ALWAYS, allow_mismatch=True, check=False)
    tide.generate(**prompts(1), **GREEDY)
    assert set(tide.last_stats.exits_per_layer) == {3}
