"""The race counts what it runs; the attack finds what is there to be found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test_certify import ALWAYS, serve
from test_generate import WrongHead, artifact
from tide.bench.attack import attack, defend
from tide.bench.race import race
from tide.config import TIDEConfig
from tide.errors import ConfigError
from tide.exits.policy import Gate
from tide.watch import Guard, Watch
from tiny import tiny_model, tiny_tokenizer

TEXTS = [" ".join("abcdefghijklmnop"[(i * k) % 16] * 3 for k in range(1, 7)) for i in range(1, 13)]
CONFIG = TIDEConfig(exit_threshold=None, min_layers=0, audit_tail=True)


def test_every_prompt_goes_through_every_side_in_turn() -> None:
    order: list[str] = []

    def side(name: str, new: int) -> Any:
        def run(prompt: Any) -> torch.Tensor:
            order.append(name)
            return torch.cat([prompt["input_ids"], torch.ones(1, new).long()], dim=1)

        return run

    prompts = [{"input_ids": torch.ones(1, n).long()} for n in (3, 5)]
    seen: list[set[str]] = []
    rows = race(
        {"a": side("a", 4), "b": side("b", 6)}, prompts, lambda out: seen.append(set(out)),
        categories=["x", "y"], quiet=True,
    )  # fmt: skip
    assert order[2:] == ["a", "b", "b", "a"] and sorted(order[:2]) == ["a", "b"]  # one to warm up
    assert seen == [{"a", "b"}] * 2
    assert [(row["side"], row["tokens"]) for row in rows] == [("a", 8), ("b", 12)]
    assert rows[0]["speedup"] == 1.0 and set(rows[1]["by_category"]) == {"x", "y"}


@pytest.mark.parametrize("goal", ["wrong", "deep"])
def test_the_attack_comes_closer_to_its_goal(goal: str) -> None:
    made = artifact()
    for checkpoint in made.checkpoints:
        checkpoint.gate = Gate(top_probability=0.08)
    engine = serve(tiny_model("llama"), made, config=CONFIG)
    options: Any = {"rounds": 4, "population": 6, "new_tokens": 8}
    found = attack(engine, tiny_tokenizer(), TEXTS, goal, **options)
    start, end = found.to_dict()["start"], found.to_dict()["end"]
    assert end["mean"] > start["mean"] and end["best"] >= start["best"]
    assert found.tried == 30
    assert attack(engine, tiny_tokenizer(), TEXTS, goal, **options) == found
    with pytest.raises(ConfigError, match="must be one of wrong, deep"):
        attack(engine, tiny_tokenizer(), TEXTS, "slow")


def test_an_attack_is_noticed_and_the_breaker_ends_it() -> None:
    engine = serve(tiny_model("llama"), artifact(WrongHead), config=CONFIG, policy=ALWAYS)
    engine.guard = Guard(Watch(0.02))
    found = defend(engine, tiny_tokenizer(), TEXTS[:4], new_tokens=8)
    assert found["measured"] > 0.5 and found["watch_fired_after"] is not None
    assert found["after_the_breaker"] == {"sequences": 4, "identical": 4, "early_tokens": 0}


def test_where_nothing_is_wrong_the_watch_is_silent() -> None:
    made = artifact()
    for checkpoint in made.checkpoints:
        checkpoint.gate = Gate(top_probability=2.0)
    engine = serve(tiny_model("llama"), made, config=CONFIG)
    engine.guard = Guard(Watch(0.02))
    found = defend(engine, tiny_tokenizer(), TEXTS[:4], new_tokens=4, most=8)
    assert found == {"promised": 0.02, "measured": 0.0, "watch_fired_after": None}
