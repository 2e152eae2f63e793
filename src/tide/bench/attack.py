"""Gives the attack: a search for prompts that fool the exits, or that keep them from saving.

An attacker who sees only how deep tokens went and how often the audit objected, and who sends text:
prompts are recombined word by word, and those that come closer to the goal have offspring.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide.calibration.collect import pad_left
from tide.calibration.data import encode_prompts
from tide.engine import TIDE
from tide.errors import ConfigError
from tide.watch import DriftWarning, Guard, Watch

MAX_PROMPT = 512  # tokens

# What is made as large as possible, of a row of the last call.
GOALS: dict[str, Callable[[TIDE, int], float]] = {
    "wrong": lambda engine, row: engine.last_stats.losses[row] or 0.0,
    "deep": lambda engine, row: _depth(engine, row),
}


@dataclass(frozen=True)
class Attempt:
    """A prompt and how close it came to the goal, from 0 to 1."""

    text: str
    score: float


@dataclass(frozen=True)
class Attack:
    """What a search has found: attempts of the start and of the end, best first."""

    goal: str
    start: list[Attempt]
    end: list[Attempt]
    tried: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON; the three best prompts are kept."""
        return {
            "goal": self.goal,
            "tried": self.tried,
            "start": {"mean": _mean(self.start), "best": self.start[0].score},
            "end": {"mean": _mean(self.end), "best": self.end[0].score},
            "prompts": [attempt.text for attempt in self.end[:3]],
        }


def attack(
    engine: TIDE,
    tokenizer: Any,
    texts: Sequence[str],
    goal: str,
    *,
    rounds: int = 10,
    population: int = 16,
    new_tokens: int = 32,
    seed: int = 0,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Attack:
    """Search for prompts that maximise a goal.

    Args:
        engine: in mode "exit", with `audit_tail`.
        tokenizer: of its model.
        texts: prompts to begin with, and the words that may be used; at least `population`.
        goal: "wrong" (tokens that differ from full depth) or "deep" (layers that tokens need).
        rounds: generations of offspring.
        population: prompts kept, and offspring of each generation.
        new_tokens: of each answer.
        seed: of the search.
        tick: told how far it is.
    """
    if goal not in GOALS:
        raise ConfigError(f"goal is {goal!r}; it must be one of {', '.join(GOALS)}.")
    draw = random.Random(seed)
    words = [word for text in texts for word in text.split()]

    def tried(some: Sequence[str]) -> list[Attempt]:
        _answer(engine, tokenizer, some, new_tokens)
        return [Attempt(text, GOALS[goal](engine, row)) for row, text in enumerate(some)]

    alive = start = _best(tried(texts[:population]), population)
    for turn in range(rounds):
        tick(turn, rounds)
        parents = alive[: max(2, population // 2)]
        children = [_offspring(draw, parents, words) for _ in range(population)]
        alive = _best([*alive, *tried(children)], population)
    tick(rounds, rounds)
    return Attack(goal, start, alive, population * (rounds + 1))


def defend(
    engine: TIDE,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    new_tokens: int = 32,
    most: int = 400,
) -> dict[str, Any]:
    """Serve the prompts of an attack over and over: does the watch notice, does the breaker help?

    Args:
        engine: with a risk; its guard is replaced by a fresh one with the breaker.
        most: sequences after which to give up.
    """
    assert engine.guard is not None
    engine.guard = Guard(Watch(engine.guard.watch.risk, engine.guard.watch.delta), "full_depth")
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        while not engine.guard.tripped and len(losses) < most:
            _answer(engine, tokenizer, texts, new_tokens)
            losses += [loss for loss in engine.last_stats.losses if loss is not None]
    watch = engine.guard.watch
    found: dict[str, Any] = {
        "promised": watch.risk,
        "measured": watch.estimate,
        "watch_fired_after": watch.sequences if watch.fired else None,
    }
    if engine.guard.tripped:
        encoded = encode_prompts(tokenizer, texts, MAX_PROMPT)
        found["after_the_breaker"] = beside_bare(engine, tokenizer, encoded, new_tokens)
    return found


def beside_bare(
    engine: TIDE, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, int]:
    """How many prompts, one by one, get the bare model's answer, and how many tokens left early."""
    same = early = 0
    for prompt in encoded:
        ids, options = _ask(engine, tokenizer, [prompt], new_tokens)
        same += torch.equal(engine.generate(ids, **options), engine.model.generate(ids, **options))
        early += engine.last_stats.exited_tokens
    return {"sequences": len(encoded), "identical": same, "early_tokens": early}


def _answer(engine: TIDE, tokenizer: Any, texts: Sequence[str], new_tokens: int) -> None:
    """Let the engine answer; what it did is in its `last_stats`."""
    encoded = encode_prompts(tokenizer, texts, MAX_PROMPT)
    ids, options = _ask(engine, tokenizer, encoded, new_tokens)
    engine.generate(ids, **options)


def _ask(
    engine: TIDE, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A batch for `generate`, and its options."""
    ids, mask = pad_left(tokenizer, encoded, engine.model.device)
    return ids, {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}


def _offspring(draw: random.Random, parents: Sequence[Attempt], words: Sequence[str]) -> str:
    """Halves of two prompts, with some words replaced, repeated or left out."""
    one, other = (draw.choice(parents).text.split() for _ in range(2))
    child = one[: draw.randint(1, len(one))] + other[draw.randint(0, len(other)) :]
    for _ in range(draw.randint(1, 4)):
        at, span = draw.randrange(len(child)), draw.randint(1, 4)
        change = draw.choice(("replace", "repeat", "omit"))
        if change == "replace":
            child[at : at + span] = draw.choices(words, k=span)
        elif change == "repeat":
            child[at:at] = child[at : at + span] * draw.randint(1, 3)
        elif len(child) > span:
            del child[at : at + span]
    return " ".join(child[:200])


def _best(attempts: Sequence[Attempt], most: int) -> list[Attempt]:
    different = {attempt.text: attempt for attempt in attempts}
    return sorted(different.values(), key=lambda attempt: -attempt.score)[:most]


def _depth(engine: TIDE, row: int) -> float:
    depths = engine.last_stats.depths[row]
    return sum(depths) / len(depths) / engine.runner.n_layers


def _mean(attempts: Sequence[Attempt]) -> float:
    return sum(attempt.score for attempt in attempts) / len(attempts)
