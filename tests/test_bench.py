"""Tests of the comparison, of the attack and of what defends against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test_certify import ALWAYS, serve
from test_generate import WrongHead, artifact
from tide.bench.attack import Search, attack, defend
from tide.bench.compare import EngineMethods, compare
from tide.config import TIDEConfig
from tide.drift import CircuitBreaker, DriftMonitor
from tide.errors import ConfigError
from tide.exits.thresholds import Thresholds
from tiny import tiny_model, tiny_tokenizer

TEXTS = [" ".join("abcdefghijklmnop"[(i * k) % 16] * 3 for k in range(1, 7)) for i in range(1, 13)]
CONFIG = TIDEConfig(exit_threshold=None, min_layers=0, audit_tail=True)


def test_every_prompt_runs_with_every_method_in_turn() -> None:
    order: list[str] = []
    asked: list[list[int]] = []

    def method(name: str, new: int) -> Any:
        def run(prompt: Any) -> torch.Tensor:
            order.append(name)
            asked.append(prompt["input_ids"].tolist()[0])
            return torch.cat([prompt["input_ids"], torch.ones(1, new).long()], dim=1)

        return run

    prompts = [{"input_ids": torch.arange(n)[None]} for n in (3, 5)]
    seen: list[set[str]] = []
    results = compare(
        {"a": method("a", 4), "b": method("b", 6)}, prompts, lambda out: seen.append(set(out)),
        categories=["x", "y"], quiet=True, warm_up={"input_ids": torch.tensor([[7]])},
    )  # fmt: skip
    assert order[2:] == ["a", "b", "b", "a"] and sorted(order[:2]) == ["a", "b"]  # one to warm up
    assert [prompt for prompt in asked if prompt == [7]] == asked[:2]
    assert seen == [{"a", "b"}] * 2
    assert [(found["method"], found["tokens"]) for found in results] == [("a", 8), ("b", 12)]
    assert results[0]["speedup"] == 1.0 and set(results[1]["by_category"]) == {"x", "y"}
    assert set(results[1]["per_prompt_speedup"]) == {"p20", "p50", "p80"}


def test_only_the_tokens_of_answers_count() -> None:
    answers = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])  # the first ends with 0, which also pads

    def run(batch: Any) -> torch.Tensor:
        return torch.cat([batch["input_ids"], answers], dim=1)

    batch = {"input_ids": torch.ones(2, 3).long()}
    assert compare({"a": run}, [batch], ends={0}, quiet=True)[0]["tokens"] == 7
    assert compare({"a": run}, [batch], quiet=True)[0]["tokens"] == 8


def test_decoding_starts_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tide.bench.compare.time.perf_counter", lambda: now[0])

    def run(given: Any) -> torch.Tensor:
        now[0] += 10.0  # the prompt
        ids = given["input_ids"]
        for _ in range(4):
            ids = torch.cat([ids, torch.ones(1, 1).long()], dim=1)
            now[0] += 1.0 if ids.shape[1] > 4 else 0.0
            criteria = given.get("stopping_criteria")  # not in the warm-up
            assert criteria is None or not criteria(ids, None).any()
        return ids

    (found,) = compare({"a": run}, [{"input_ids": torch.ones(1, 3).long()}], quiet=True)
    assert found["ms_per_token"] == 1e3 * 13 / 4 and found["decoding_ms_per_token"] == 1e3


def test_a_baseline_that_does_not_run_is_dropped() -> None:
    def fails(prompt: Any) -> torch.Tensor:
        raise RuntimeError("no compiler found\nmore")

    def runs(prompt: Any) -> torch.Tensor:
        return torch.cat([prompt["input_ids"], torch.ones(1, 4).long()], dim=1)

    prompts = [{"input_ids": torch.ones(1, 3).long()}]
    methods = {"eager": runs, "compiled": fails, "ours": runs}
    with pytest.warns(UserWarning, match="compiled is not measured.* no compiler found$"):
        found = compare(methods, prompts, baselines=["eager", "compiled"], quiet=True)
    assert [row["method"] for row in found] == ["eager", "ours"]
    with pytest.raises(RuntimeError, match="no compiler found"):
        compare({"eager": runs, "ours": fails}, prompts, baselines=["eager"], quiet=True)


def test_engines_count_what_they_run() -> None:
    engine = serve(tiny_model("llama"), artifact(WrongHead), config=CONFIG, policy=ALWAYS)
    ours = EngineMethods({"exit": engine}, {"max_new_tokens": 8, "do_sample": False})
    prompts = [{"input_ids": torch.tensor([[5, 6, 7, 8 + i]])} for i in range(2)]
    (timed,) = compare(ours.methods, prompts, ours.add, quiet=True)
    assert 0 < timed["decoding_ms_per_token"] * 14 < timed["ms_per_token"] * 16
    found = ours.counted("exit", ["x", "y"])
    assert found["ideal_speedup"] == pytest.approx(found["layers_full"] / found["layers_run"], 1e-3)
    assert found["exit_rate"] * 16 == pytest.approx(sum(found["exits_per_layer"].values()), 1e-3)
    assert 0 < found["disagreement"] <= found["exit_rate"]
    assert set(found["layer_calls_per_token"]) == {"x", "y"}


@pytest.mark.parametrize("goal", ["wrong", "deep"])
def test_the_attack_comes_closer_to_its_goal(goal: str) -> None:
    made = artifact()
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=0.08)
    engine = serve(tiny_model("llama"), made, config=CONFIG)
    search = Search(generations=4, population=6, new_tokens=8)
    found = attack(engine, tiny_tokenizer(), TEXTS, goal, search)
    start, end = found.to_dict()["start"], found.to_dict()["end"]
    assert end["mean"] > start["mean"] and end["best"] >= start["best"]
    assert found.tried == 30
    assert attack(engine, tiny_tokenizer(), TEXTS, goal, search) == found
    with pytest.raises(ConfigError, match="must be one of wrong, deep"):
        attack(engine, tiny_tokenizer(), TEXTS, "slow", search)


def test_an_attack_is_detected_and_the_fallback_restores_full_depth() -> None:
    engine = serve(tiny_model("llama"), artifact(WrongHead), config=CONFIG, policy=ALWAYS)
    engine.circuit_breaker = CircuitBreaker(DriftMonitor(0.02))
    found = defend(engine, tiny_tokenizer(), TEXTS[:4], new_tokens=8)
    assert found["measured"] > 0.5 and found["drift_detected_after"] is not None
    assert found["after_fallback"] == {"sequences": 4, "exact_match": 4, "exited_tokens": 0}


def test_without_wrong_exits_no_drift_is_detected() -> None:
    made = artifact()
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=2.0)
    engine = serve(tiny_model("llama"), made, config=CONFIG)
    engine.circuit_breaker = CircuitBreaker(DriftMonitor(0.02))
    found = defend(engine, tiny_tokenizer(), TEXTS[:4], new_tokens=4, most=8)
    assert found == {"certified_bound": 0.02, "measured": 0.0, "drift_detected_after": None}
