"""Threads may use one model at once: directly, through one runner or through two."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from soak import OPTIONS, draw_calls, soak_threads
from torch import Tensor

from test_generate import engine
from tide.models.attach import RUNNERS
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch
from tiny import VOCABULARY, tiny_model

CALLS = 200

every_runner = pytest.mark.parametrize("runner", RUNNERS)


def random_ids(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, 9), generator=generator)


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """What each returns, in threads that take turns in the middle of passes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(work)) as pool:
            running = [pool.submit(call) for call in work]
            return [future.result() for future in running]  # raises what a thread raised
    finally:
        sys.setswitchinterval(interval)


def passes(runner: DepthRunner, ids: Tensor) -> Tensor:
    """Logits of a prompt in two ranges, with tokens whose KV alone is filled in after it."""
    with runner.lock:
        cache = runner.new_cache(len(ids))
        tokens = TokenBatch(ids)
        hidden = runner.run(tokens, 0, 2, cache=cache)
        last = runner.run(tokens, 2, runner.n_layers, cache=cache, hidden=hidden)
        hidden = runner.run(tokens, 0, 2, cache=cache)
        runner.fill_kv(tokens, 2, runner.n_layers, cache=cache, hidden=hidden)
        return runner.logits(last)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
@every_runner
def test_a_call_of_the_model_beside_passes_of_a_runner(runner: str, family: str) -> None:
    model = tiny_model(family)
    made = RUNNERS[runner](model)
    ids, other = random_ids(0), random_ids(1)
    with torch.no_grad():
        expected, expected_passes = model(ids).logits, passes(made, other)
    done = False

    @torch.no_grad()
    def call_the_model() -> int:
        nonlocal done
        try:
            return sum(not torch.equal(model(ids).logits, expected) for _ in range(CALLS))
        finally:
            done = True

    def run_passes() -> tuple[int, int]:
        ran = wrong = 0
        while not done or not ran:
            ran += 1
            wrong += not torch.equal(passes(made, other), expected_passes)
        return ran, wrong

    wrong_calls, (ran, wrong_passes) = at_once(call_the_model, run_passes)
    assert (wrong_calls, wrong_passes) == (0, 0)
    assert ran > 10  # they did run beside each other


@pytest.mark.parametrize("second", RUNNERS)
@pytest.mark.parametrize("first", RUNNERS)
def test_two_runners_of_one_model_at_once(first: str, second: str) -> None:
    model = tiny_model("gemma3_text")
    runners = [RUNNERS[name](model) for name in (first, second)]
    inputs = [random_ids(0), random_ids(1)]
    expected = [passes(*pair) for pair in zip(runners, inputs, strict=True)]

    def work(k: int) -> int:
        got = (passes(runners[k], inputs[k]) for _ in range(60))
        return sum(not torch.equal(logits, expected[k]) for logits in got)

    assert at_once(lambda: work(0), lambda: work(1)) == [0, 0]


@every_runner
def test_two_threads_share_one_runner(runner: str) -> None:
    made = RUNNERS[runner](tiny_model("llama"))
    inputs = [random_ids(0), random_ids(1)]
    expected = [passes(made, ids) for ids in inputs]

    def work(k: int) -> int:
        got = (passes(made, inputs[k]) for _ in range(60))
        return sum(not torch.equal(logits, expected[k]) for logits in got)

    assert at_once(lambda: work(0), lambda: work(1)) == [0, 0]
    assert made.counts.calls[0] == 2 * (2 + 120)


@pytest.mark.parametrize("mode", ["lossless", "exit"])
def test_eight_threads_generate(mode: str) -> None:
    """The short form of bench/soak.py."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, 12))] for _ in range(9)]
    options = [o for o in OPTIONS if "bad_words_ids" not in o]  # not in this vocabulary
    calls = draw_calls(rng, prompts, 12, 10, 0, options)
    found = soak_threads(engine(tiny_model("llama"), mode, fixed_drafts=True), calls, 64)
    assert found["outcomes"] == {"same": 64}
    assert found["solo_runs_that_differ_from_generate"] == 0 or mode == "exit"


@every_runner
def test_attach_beside_calls_of_the_model(runner: str) -> None:
    """The self-check adds hooks to layers; it counts only what its own thread runs."""
    from tide import attach

    model = tiny_model("llama")
    ids = random_ids(0)
    with torch.no_grad():
        expected = model(ids).logits

    @torch.no_grad()
    def call_the_model() -> int:
        return sum(not torch.equal(model(ids).logits, expected) for _ in range(CALLS))

    def make_runners() -> set[str]:
        return {attach(model, runner=runner).name for _ in range(5)}

    assert at_once(call_the_model, make_runners) == [0, {runner}]


def test_a_thread_interrupted_inside_the_list_of_layers_still_finds_them() -> None:
    """Each of these happens if threads switch between the lookup of a method and its body."""
    made = RUNNERS["shims"](tiny_model("llama"))
    layers, found = made.parts.layers, []
    expected = list(layers)

    def interrupted(*_: Any) -> None:
        found.append(type(layers))
        found.append(list(torch.nn.ModuleList.__getitem__(layers, slice(0, 3))))

    expected[0].register_forward_pre_hook(interrupted)
    made.run(TokenBatch(random_ids(0)), 0, 1, cache=made.new_cache(2))
    during, begun_before = found
    assert begun_before == expected[:3]
    assert during is not type(layers)
    assert list(during.__iter__(layers)) == expected
    assert list(during.__getitem__(layers, slice(1, 3))) == expected[1:3]
    assert during.__getitem__(layers, 1) is expected[1]
