"""The attack: a search for prompts that cause wrong exits, or that prevent exits.

The attacker sees the depth of tokens and how often the audit disagrees, and can only send text.
Prompts are recombined from their fragments, and those that come closer to the goal have offspring.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tide.calibration.answers import pad_left
from tide.calibration.data import encode_prompts
from tide.drift import CircuitBreaker, DriftMonitor, DriftWarning
from tide.engine import TIDE
from tide.errors import ConfigError

MAX_PROMPT = 512  # tokens

# What the search maximises, for one sequence of the last call.
GOALS: dict[str, Callable[[TIDE, int], float]] = {
    "wrong": lambda engine, sequence: engine.last_stats.losses[sequence] or 0.0,
    "deep": lambda engine, sequence: _depth(engine, sequence),
}


@dataclass(frozen=True)
class Search:
    """The size of a search.

    Attributes:
        generations: of offspring.
        population: prompts kept, and offspring of each generation.
        new_tokens: of each answer.
        seed: of all random choices.
    """

    generations: int = 10
    population: int = 16
    new_tokens: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Attempt:
    """A prompt and how close it came to the goal, from 0 to 1."""

    text: str
    score: float


@dataclass(frozen=True)
class Attack:
    """The result of a search: attempts at its start and at its end, best first."""

    goal: str
    start: list[Attempt]
    end: list[Attempt]
    tried: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with the three best prompts."""
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
    search: Search,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Attack:
    """Search for prompts that maximise a goal.

    Args:
        engine: in mode "exit", with `audit_tail`.
        tokenizer: of its model.
        texts: prompts to start from, whose fragments are recombined; at least the population.
        goal: "wrong" (tokens that differ from full depth) or "deep" (layers that tokens need).
        search: its size.
        tick: called with the number of generations done and in total.
    """
    if goal not in GOALS:
        raise ConfigError(f"goal is {goal!r}; it must be one of {', '.join(GOALS)}.")
    draw = random.Random(search.seed)
    fragments = [fragment for text in texts for fragment in text.split()]

    def tried(some: Sequence[str]) -> list[Attempt]:
        _generate(engine, tokenizer, some, search.new_tokens)
        return [Attempt(text, GOALS[goal](engine, i)) for i, text in enumerate(some)]

    alive = start = _best(tried(texts[: search.population]), search.population)
    for generation in range(search.generations):
        tick(generation, search.generations)
        parents = alive[: max(2, search.population // 2)]
        children = [_offspring(draw, parents, fragments) for _ in range(search.population)]
        alive = _best([*alive, *tried(children)], search.population)
    tick(search.generations, search.generations)
    return Attack(goal, start, alive, search.population * (search.generations + 1))


def defend(
    engine: TIDE,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    new_tokens: int = 32,
    most: int = 400,
) -> dict[str, Any]:
    """Serve the prompts of an attack repeatedly: is drift detected, and what does fallback restore?

    Args:
        engine: with a risk; it gets a fresh circuit breaker with on_drift "full_depth".
        most: sequences after which to stop.
    """
    assert engine.circuit_breaker is not None
    monitor = engine.circuit_breaker.monitor
    monitor = DriftMonitor(monitor.risk, monitor.delta)
    engine.circuit_breaker = CircuitBreaker(monitor, "full_depth")
    served = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        while not engine.circuit_breaker.tripped and served < most:
            _generate(engine, tokenizer, texts, new_tokens)
            served += sum(loss is not None for loss in engine.last_stats.losses)
    found: dict[str, Any] = {
        "certified_bound": monitor.risk,
        "measured": monitor.estimate,
        "drift_detected_after": monitor.sequences if monitor.fired else None,
    }
    if engine.circuit_breaker.tripped:
        encoded = encode_prompts(tokenizer, texts, MAX_PROMPT)
        found["after_fallback"] = match_baseline(engine, tokenizer, encoded, new_tokens)
    return found


def match_baseline(
    engine: TIDE, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, int]:
    """How many outputs equal those of HF generate, prompt by prompt, and how many tokens exited."""
    same = exited = 0
    for prompt in encoded:
        ids, options = _batch(engine, tokenizer, [prompt], new_tokens)
        same += torch.equal(engine.generate(ids, **options), engine.model.generate(ids, **options))
        exited += engine.last_stats.exited_tokens
    return {"sequences": len(encoded), "exact_match": same, "exited_tokens": exited}


def _generate(engine: TIDE, tokenizer: Any, texts: Sequence[str], new_tokens: int) -> None:
    """Run the engine for its `last_stats`; the answers are not needed."""
    encoded = encode_prompts(tokenizer, texts, MAX_PROMPT)
    ids, options = _batch(engine, tokenizer, encoded, new_tokens)
    engine.generate(ids, **options)


def _batch(
    engine: TIDE, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A batch for `generate`, and its options."""
    ids, mask = pad_left(tokenizer, encoded, engine.model.device)
    return ids, {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}


def _offspring(draw: random.Random, parents: Sequence[Attempt], fragments: Sequence[str]) -> str:
    """Parts of two prompts, with some fragments replaced, repeated or omitted."""
    one, other = (draw.choice(parents).text.split() for _ in range(2))
    child = one[: draw.randint(1, len(one))] + other[draw.randint(0, len(other)) :]
    for _ in range(draw.randint(1, 4)):
        at, span = draw.randrange(len(child)), draw.randint(1, 4)
        change = draw.choice(("replace", "repeat", "omit"))
        if change == "replace":
            child[at : at + span] = draw.choices(fragments, k=span)
        elif change == "repeat":
            child[at:at] = child[at : at + span] * draw.randint(1, 3)
        elif len(child) > span:
            del child[at : at + span]
    return " ".join(child[:200])


def _best(attempts: Sequence[Attempt], most: int) -> list[Attempt]:
    different = {attempt.text: attempt for attempt in attempts}
    return sorted(different.values(), key=lambda attempt: -attempt.score)[:most]


def _depth(engine: TIDE, sequence: int) -> float:
    depths = engine.last_stats.depths[sequence]
    return sum(depths) / len(depths) / engine.runner.n_layers


def _mean(attempts: Sequence[Attempt]) -> float:
    return sum(attempt.score for attempt in attempts) / len(attempts)
