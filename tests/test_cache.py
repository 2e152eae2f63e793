"""The cache grows in blocks, rolls back, and drops sequences that have ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from scenarios import error, full_depth, pack
from tide.errors import RangeError, UnsupportedCacheError
from tide.models.cache import WaterlineCache
from tide.models.segments import SegmentRunner
from tide.models.tokens import TokenBatch
from tiny import VOCABULARY, tiny_model

HEADS, DIM = 2, 4


def random_ids(sequences: int, tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (sequences, tokens), generator=generator)


def prompts(*lengths: int) -> list[Tensor]:
    return [random_ids(1, length, seed=length)[0] for length in lengths]


def write(cache: WaterlineCache, tokens: int) -> None:
    """Pass tokens of every sequence through all layers; their KV counts up from 1."""
    batch = TokenBatch(torch.zeros(cache.sequences, tokens, dtype=torch.long))
    chunk = cache.open(batch, (0, len(cache.layers)))
    kv = (1.0 + chunk.places.slots)[:, None, :, None].expand(-1, HEADS, -1, DIM)
    for layer in cache.layers:
        layer.update(kv, -kv)
    cache.close(done=True)


def slots(cache: WaterlineCache) -> int:
    return cache.layers[0].keys.shape[2]


def kv_bytes(cache: Any) -> int:
    """Bytes that the keys and values of a cache keep allocated, used or not."""
    storages = [t.untyped_storage() for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("step", [1, 7, 100])
def test_buffers_grow_in_blocks(step: int) -> None:
    cache = WaterlineCache(n_layers=1, sequences=1)
    grown = [0]
    held = 0
    while held < 5000:
        write(cache, step)
        held += step
        if slots(cache) != grown[-1]:
            grown.append(slots(cache))
        assert held <= slots(cache) <= held + max(64, held // 16)
        assert held < 1000 or slots(cache) <= 1.1 * held
    assert cache.lengths(0) == (held,)
    assert len(grown) < 60  # and not for every token
    keys, values = cache.read(0, 0)
    assert torch.equal(keys[0, :, 0], torch.arange(1.0, held + 1))
    assert torch.equal(values, -keys)


@pytest.mark.parametrize("prompt", [1, 900, 1000])
def test_buffers_do_not_grow_beyond_the_capacity(prompt: int) -> None:
    cache = WaterlineCache(n_layers=1, sequences=1, capacity=1003)
    write(cache, prompt)
    for held in range(prompt + 1, 1004):
        write(cache, 1)
        assert held <= slots(cache) <= 1004
    assert slots(cache) == 1004  # and a spare one, for padding
    write(cache, 2)  # a capacity that was wrong costs memory, and not a copy for every token
    beyond = cache.layers[0].keys.data_ptr()
    for _ in range(40):
        write(cache, 1)
        assert cache.layers[0].keys.data_ptr() == beyond
    assert torch.equal(cache.read(0, 0)[0][0, :, 0], torch.arange(1.0, 1046))


def test_a_short_prompt_does_not_take_a_large_capacity_at_once() -> None:
    cache = WaterlineCache(n_layers=1, sequences=1, capacity=100_000)
    write(cache, 10)
    assert slots(cache) == 10 + 64


@pytest.mark.parametrize("capacity", [None, 1005])
@torch.no_grad()
def test_kv_memory_of_a_long_sequence_is_that_of_a_dynamic_cache(capacity: int | None) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    runner = SegmentRunner(model)
    ids = random_ids(1, 1005)
    theirs, ours = DynamicCache(), runner.new_cache(1, capacity)
    for lo, hi in ((0, 1000), *((t, t + 1) for t in range(1000, 1005))):
        model(ids[:, lo:hi], past_key_values=theirs)
        runner.run(TokenBatch(ids[:, lo:hi]), 0, 6, cache=ours)
        assert kv_bytes(ours) <= 1.1 * kv_bytes(theirs)
    assert capacity is None or kv_bytes(ours) == kv_bytes(theirs) * 1006 // 1005  # a spare slot


def test_sequences_that_advance_together_write_blocks_whatever_theirprompts() -> None:
    runner = SegmentRunner(tiny_model("llama"))
    cache = runner.new_cache(2)
    runner.run(pack(prompts(6, 4), "left"), 0, 6, cache=cache)
    assert cache.lengths(5) == (6, 4)
    step = TokenBatch(random_ids(2, 1))
    assert cache.open(step, (0, 6)).block == slice(6, 7)
    cache.close(done=False)
    cache.rollback([5, 4])
    assert cache.open(step, (0, 6)).block is None
    cache.close(done=False)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_prompts_that_come_in_chunks_are_aligned(
    family: str, padding_side: str, chunk: int
) -> None:
    model = tiny_model(family)
    runner = SegmentRunner(model)
    sequences = prompts(9, 4, 7)
    whole = pack(sequences, padding_side)
    cache = runner.new_cache(3)
    cache.align([9, 4, 7])
    states = []
    for first in range(0, 9, chunk):
        here = slice(first, first + chunk)
        tokens = TokenBatch(whole.ids[:, here], whole.valid[:, here])
        states.append(runner.run(tokens, 0, 6, cache=cache))
    hidden = torch.cat(states, 1)
    assert cache.lengths(5) == (9, 4, 7)
    for s in range(3):
        expected = full_depth(model, runner, sequences[s])
        assert error(hidden[s][whole.valid[s]], expected) <= 1e-5
    new = random_ids(3, 1)
    assert cache.open(TokenBatch(new), (0, 6)).block == slice(9, 10)  # in step from here on
    cache.close(done=False)
    hidden = runner.run(TokenBatch(new), 0, 6, cache=cache)
    for s in range(3):
        expected = full_depth(model, runner, torch.cat([sequences[s], new[s]]))[-1:]
        assert error(hidden[s], expected) <= 1e-5


class CopiedElements(TorchDispatchMode):
    """Counts the elements that operators copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.count += out.numel()
        return out


def test_a_sequence_that_moves_into_a_gap_is_all_that_is_copied() -> None:
    cache = WaterlineCache(n_layers=3, sequences=5)
    write(cache, 10)
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    cache.layers[1].keys[4] = 70.0
    line = HEADS * slots(cache) * DIM
    with CopiedElements() as copied:
        cache.keep([0, 4, 2, 3])  # the second has ended; the last moves into its place
    assert copied.count == 3 * 2 * line  # keys and values of three layers
    after = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    assert after == before
    assert cache.sequences == 4
    assert (cache.read(1, 1)[0] == 70).all()
    assert (cache.read(1, 2)[0] != 70).all()
    with CopiedElements() as copied:
        cache.keep([0, 1, 2])  # the last has ended
    assert copied.count == 0
    write(cache, 1)
    with CopiedElements() as copied:
        cache.keep([2, 0, 1])  # another order: all are copied
    assert copied.count >= 3 * 3 * 2 * line
    assert (cache.read(1, 2)[0][:, :10] == 70).all()


def test_sequences_that_have_ended_go_and_the_others_continue() -> None:
    model = tiny_model("mistral")
    runner = SegmentRunner(model)
    sequences = prompts(9, 6, 11)
    cache = runner.new_cache(3)
    runner.run(pack([ids[:-2] for ids in sequences], "left"), 0, 6, cache=cache)
    cache.keep([2, 0])
    assert cache.sequences == 2 and cache.lengths(3) == (9, 7)
    cache.keep([1])  # the longest prompt has gone: so do the slots that only it had
    assert cache.starts == (0,)
    cache.keep([0, 0])
    last = sequences[0][-2:]
    hidden = runner.run(TokenBatch(torch.stack([last, last])), 0, 6, cache=cache)
    for bad in ([], [2], [-1]):
        with pytest.raises(RangeError, match="need some of 0 to 1"):
            cache.keep(bad)
    for got in hidden:
        assert error(got, full_depth(model, runner, sequences[0])[-2:]) <= 1e-5


@pytest.mark.parametrize("kept", [[0, 1], [0, 2], [2, 1], [2, 0], [1], [2], [0, 1, 2], [1, 2, 0]])
def test_sequences_that_are_kept_continue_from_their_own_kv(kept: list[int]) -> None:
    model = tiny_model("gemma3_text")
    runner = SegmentRunner(model)
    sequences = prompts(9, 6, 11)
    cache = runner.new_cache(3)
    runner.run(pack([ids[:-2] for ids in sequences], "left"), 0, 6, cache=cache)
    cache.keep(kept)
    assert cache.lengths(5) == tuple(len(sequences[s]) - 2 for s in kept)
    hidden = runner.run(
        TokenBatch(torch.stack([sequences[s][-2:] for s in kept])), 0, 6, cache=cache
    )
    for s, got in zip(kept, hidden, strict=True):
        assert error(got, full_depth(model, runner, sequences[s])[-2:]) <= 1e-5


@pytest.mark.parametrize("kept", [[0, 2], [2, 0]])
def test_a_cache_may_be_used_inside_and_outside_of_inference_mode(kept: list[int]) -> None:
    runner = SegmentRunner(tiny_model("llama"))
    cache = runner.new_cache(3)
    with torch.inference_mode():
        runner.run(TokenBatch(random_ids(3, 4)), 0, 6, cache=cache)
    runner.run(TokenBatch(random_ids(3, 4)), 0, 6, cache=cache)
    with torch.inference_mode():
        cache.keep(kept)
    runner.run(TokenBatch(random_ids(2, 1)), 0, 6, cache=cache)
    assert cache.lengths(5) == (9, 9)


def test_a_sequence_that_is_rolled_back_to_nothing_starts_again() -> None:
    model = tiny_model("llama")
    runner = SegmentRunner(model)
    ids = random_ids(2, 8)
    cache = runner.new_cache(2)
    runner.run(TokenBatch(ids), 0, 6, cache=cache)
    cache.rollback([0, 3])
    hidden = runner.run(pack([ids[0].flip(0), ids[1, 3:]], "left"), 0, 6, cache=cache)
    assert error(hidden[0], full_depth(model, runner, ids[0].flip(0))) <= 1e-5
    assert error(hidden[1, 3:], full_depth(model, runner, ids[1])[3:]) <= 1e-5


def test_zeros_are_appended_as_tokens() -> None:
    cache = WaterlineCache(n_layers=2, sequences=2)
    write(cache, 3)
    cache.append_zeros(1, 2, [2, 0])
    assert cache.lengths(0) == (3, 3) and cache.lengths(1) == (5, 3)
    keys, values = cache.read(1, 0)
    assert keys[0, :, 0].tolist() == [1.0, 2.0, 3.0, 0.0, 0.0]
    assert values[0, :, 0].tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0]


def test_masked_rubbish_does_not_spread() -> None:
    """A slot that a sequence does not own may hold anything finite.

    Padding never reaches another token.
    """
    model = tiny_model("llama")
    runner = SegmentRunner(model)
    ids = random_ids(2, 8)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 1:] = False
    cache = runner.new_cache(2)
    out = runner.run(TokenBatch(ids, valid), 0, 6, cache=cache)
    assert error(out[0], full_depth(model, runner, ids[0])) <= 1e-5
    assert torch.isfinite(out).all()


def test_other_caches_are_refused() -> None:
    runner = SegmentRunner(tiny_model("llama"))
    ids = random_ids(1, 4)
    for cache in (StaticCache(config=runner.config, max_cache_len=16), DynamicCache(), None):
        with pytest.raises(UnsupportedCacheError, match=f"Got a {type(cache).__name__}.*new_cache"):
            runner.run(TokenBatch(ids), 0, 6, cache=cache)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCacheError, match=r"written by DepthRunner.run"):
        runner.model(ids, past_key_values=runner.new_cache(1))


def test_passes_without_tokens_are_refused() -> None:
    runner = SegmentRunner(tiny_model("llama"))
    ids = random_ids(2, 4)
    none = torch.zeros(2, 4, dtype=torch.bool)
    one = none.clone()
    one[0] = True
    cache = runner.new_cache(2)
    with pytest.raises(RangeError, match="at least one token"):
        runner.run(TokenBatch(ids, none), 0, 6, cache=cache)
    with pytest.raises(RangeError, match="every sequence needs at least one"):
        runner.run(TokenBatch(ids, one), 0, 6, cache=cache)
    with pytest.raises(RangeError, match="one of at least 0 for each of 2 sequences"):
        cache.rollback([1])
    with pytest.raises(RangeError, match="one of at least 0 for each of 2 sequences"):
        cache.rollback([1, -1])
