"""What an engine holds and shares: threads, KV memory, and nothing that a call keeps alive."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from test_engine import Recorder
from test_generate import GREEDY, engine, prompts
from test_threads import CALLS, at_once
from tide.decode.batch import BatchState
from tide.decode.loop import DecodeLoop
from tide.decode.session import DecodeSession
from tide.models.attach import attach
from tide.models.cache import WaterlineCache
from tiny import tiny_model


@pytest.fixture(params=["segments", "shims"])
def _runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get this runner."""
    monkeypatch.setattr("tide.engine.attach", partial(attach, runner=request.param))


@pytest.mark.usefixtures("_runner")
@pytest.mark.parametrize("engines", [1, 2])
def test_two_threads_share_one_engine_or_one_model(engines: int) -> None:
    model = tiny_model("llama")
    made = [engine(model, "lossless", "random") for _ in range(engines)]
    batches = [prompts(sequences) for sequences in (1, 4)]
    expected = [model.generate(**batch, **GREEDY) for batch in batches]

    def work(k: int) -> bool:
        tide = made[k % engines]
        return all(
            torch.equal(tide.generate(**batches[k], **GREEDY), expected[k]) for _ in range(6)
        )

    assert at_once(lambda: work(0), lambda: work(1)) == [True, True]


@pytest.mark.usefixtures("_runner")
@pytest.mark.parametrize("mode", ["lossless", "exit"])
def test_the_model_may_be_called_while_the_engine_generates(mode: str) -> None:
    model = tiny_model("llama")
    tide, ids = engine(model, mode, "random"), prompts(1)["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
    output = tide.generate(**prompts(2), **GREEDY)
    done = False

    @torch.no_grad()
    def call_the_model() -> int:
        nonlocal done
        try:
            return sum(not torch.equal(model(ids).logits, expected) for _ in range(CALLS))
        finally:
            done = True

    def generate() -> tuple[int, int]:
        ran = wrong = 0
        while not done or not ran:
            ran += 1
            wrong += not torch.equal(tide.generate(**prompts(2), **GREEDY), output)
        return ran, wrong

    wrong_calls, (ran, wrong) = at_once(call_the_model, generate)
    assert (wrong_calls, wrong) == (0, 0)
    assert ran > 1  # they did run beside each other


@pytest.mark.parametrize("mode", ["off", "lossless", "exit"])
def test_nothing_of_a_call_waits_for_the_garbage_collector(mode: str) -> None:
    """A cache in a reference cycle would live on until a collection, gigabytes later."""
    tide = engine(tiny_model("llama"), mode)
    gc.collect()
    gc.disable()
    try:
        tide.generate(**prompts(2), **GREEDY)
        made = (DecodeSession, DecodeLoop, BatchState, WaterlineCache)
        alive = [o for o in gc.get_objects() if isinstance(o, made)]
    finally:
        gc.enable()
    assert not alive


@pytest.mark.parametrize("nodes", [0, 64])
@pytest.mark.parametrize("new_tokens", [20, 600])
def test_kv_takes_little_more_memory_than_the_cache_of_transformers(
    new_tokens: int, nodes: int
) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    ids = torch.randint(3, 97, (1, 1000), generator=torch.Generator().manual_seed(0))
    tide = engine(model, "lossless", "random", max_tree=nodes)
    caches, ratios = [], []
    new_cache = tide.runner.new_cache

    def record(*args: Any) -> WaterlineCache:
        caches.append(new_cache(*args))
        return caches[-1]

    class Measure(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if caches:
                length = 1000 + len(self.pieces) - 2  # the newest token has not run yet
                per_token = 2 * model.config.num_key_value_heads * 8 * 4
                # A tree that is being verified has slots too.
                dynamic = (length + nodes) * per_token * model.config.num_hidden_layers
                held = sum(
                    buffer.untyped_storage().nbytes()
                    for layer in caches[-1].layers
                    for buffer in (layer.keys, layer.values)
                )
                ratios.append(held / dynamic)

    tide.runner.new_cache = record  # type: ignore[method-assign]
    options = {**GREEDY, "eos_token_id": None, "max_new_tokens": new_tokens}
    tide.generate(ids, **options, streamer=Measure())
    assert len(ratios) == new_tokens
    assert nodes or min(ratios) >= 1
    assert max(ratios) <= 1.1


def test_memory_stays_flat_over_a_thousand_calls() -> None:
    tide = engine(tiny_model("llama"), "lossless", "random")
    process = psutil.Process()

    def calls(count: int) -> int:
        for k in range(count):
            tide.generate(**prompts(1 + k % 4), **{**GREEDY, "max_new_tokens": 2 + k % 5})
        gc.collect()
        return process.memory_info().rss

    calls(150)
    warm = calls(50)
    assert calls(800) - warm < 20e6
