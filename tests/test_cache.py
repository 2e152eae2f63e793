"""The cache grows without copying per token, forgets, and lets rows go."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from scenarios import error, full_depth, pad
from tide.errors import RangeError, UnsupportedCacheError
from tide.models.depth import DepthRunner
from tiny import VOCABULARY, tiny_model


def test_grows_geometrically() -> None:
    runner = DepthRunner(tiny_model("llama", max_position_embeddings=1024))
    ids = torch.randint(0, VOCABULARY, (1, 700))
    capacities = []
    with runner:
        cache = runner.new_cache(1)
        for t in range(ids.shape[1]):
            runner.run(ids[:, t : t + 1], 0, 1, cache=cache)
            capacities.append(cache.layers[0].keys.shape[2])
    assert cache.lengths(0) == (700,)
    assert sorted(set(capacities)) == [64, 128, 256, 512, 1024]


def test_rows_that_advance_together_write_blocks_whatever_their_prompts() -> None:
    runner = DepthRunner(tiny_model("llama"))
    ids = torch.randint(0, VOCABULARY, (2, 6))
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, :2] = False
    with runner:
        cache = runner.new_cache(2)
        runner.run(ids, 0, 6, cache=cache, valid=valid)
        assert cache.lengths(5) == (6, 4)
        assert cache.open(0, 6, 1, device=ids.device).block == slice(6, 7)
        cache.close(done=False)
        cache.fall_back([5, 4])
        assert cache.open(0, 6, 1, device=ids.device).block is None


def test_finished_rows_leave_and_the_others_go_on() -> None:
    model = tiny_model("mistral")
    runner = DepthRunner(model)
    rows = [torch.randint(3, VOCABULARY, (n,)) for n in (9, 6, 11)]
    with runner:
        cache = runner.new_cache(3)
        tokens, valid = pad([row[:-2] for row in rows], "left")
        runner.run(tokens, 0, 6, cache=cache, valid=valid)
        cache.keep([2, 0])
        assert cache.rows == 2 and cache.lengths(3) == (9, 7)
        cache.keep([1])  # the longest prompt has gone: so do the slots that only it had
        assert cache.starts == (0,)
        cache.keep([0, 0])
        hidden = runner.run(torch.stack([rows[0][-2:], rows[0][-2:]]), 0, 6, cache=cache)
        for bad in ([], [2], [-1]):
            with pytest.raises(RangeError, match="need some of 0 to 1"):
                cache.keep(bad)
    for got in hidden:
        assert error(got, full_depth(model, runner, rows[0])[-2:]) <= 1e-5


def test_a_cache_may_be_used_inside_and_outside_of_inference_mode() -> None:
    runner = DepthRunner(tiny_model("llama"))
    ids = torch.randint(0, VOCABULARY, (1, 4))
    with runner:
        cache = runner.new_cache(1)
        with torch.inference_mode():
            runner.run(ids, 0, 6, cache=cache)
        runner.run(ids, 0, 6, cache=cache)
    assert cache.lengths(5) == (8,)


def test_a_row_that_falls_back_to_nothing_starts_again() -> None:
    model = tiny_model("llama")
    runner = DepthRunner(model)
    ids = torch.randint(3, VOCABULARY, (2, 8))
    with runner:
        cache = runner.new_cache(2)
        runner.run(ids, 0, 6, cache=cache)
        cache.fall_back([0, 3])
        tokens, valid = pad([ids[0].flip(0), ids[1, 3:]], "left")
        hidden = runner.run(tokens, 0, 6, cache=cache, valid=valid)
    assert error(hidden[0], full_depth(model, runner, ids[0].flip(0))) <= 1e-5
    assert error(hidden[1, 3:], full_depth(model, runner, ids[1])[3:]) <= 1e-5


def test_masked_rubbish_does_not_spread() -> None:
    """A slot that a row does not own may hold anything finite.

    Padding never reaches another token.
    """
    model = tiny_model("llama")
    runner = DepthRunner(model)
    ids = torch.randint(3, VOCABULARY, (2, 8))
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 1:] = False
    with runner:
        cache = runner.new_cache(2)
        out = runner.run(ids, 0, 6, cache=cache, valid=valid)
    assert error(out[0], full_depth(model, runner, ids[0])) <= 1e-5
    assert torch.isfinite(out).all()


def test_other_caches_are_refused() -> None:
    runner = DepthRunner(tiny_model("llama"))
    ids = torch.randint(0, VOCABULARY, (1, 4))
    with runner:
        for cache in (StaticCache(config=runner.config, max_cache_len=16), DynamicCache(), None):
            with pytest.raises(
                UnsupportedCacheError, match=f"Got a {type(cache).__name__}.*new_cache"
            ):
                runner.run(ids, 0, 6, cache=cache)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedCacheError, match=r"written by DepthRunner.run"):
            runner.model(ids, past_key_values=runner.new_cache(1))


def test_passes_without_tokens_are_refused() -> None:
    runner = DepthRunner(tiny_model("llama"))
    ids = torch.randint(0, VOCABULARY, (2, 4))
    none = torch.zeros(2, 4, dtype=torch.bool)
    one = none.clone()
    one[0] = True
    with runner:
        cache = runner.new_cache(2)
        with pytest.raises(RangeError, match="at least one token"):
            runner.run(ids, 0, 6, cache=cache, valid=none)
        with pytest.raises(RangeError, match="every row needs at least one"):
            runner.run(ids, 0, 6, cache=cache, valid=one)
        with pytest.raises(RangeError, match="one of at least 0 for each of 2 rows"):
            cache.fall_back([1])
