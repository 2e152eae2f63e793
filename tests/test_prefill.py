"""Prompts: run at once, in chunks or with exits; and logits of given tokens with exits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import prefill as bench
import pytest
import torch
from torch import Tensor

from test_engine_exits import ALWAYS
from test_generate import GREEDY, artifact, engine, prompts
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits import heads
from tide.exits.confidence import ConfidenceModel
from tide.exits.thresholds import Thresholds
from tide.models import segments
from tide.models.tokens import TokenBatch
from tiny import tiny_model

# What makes the host wait for a device.
HOST_COPIES = ("tolist", "item", "cpu", "numpy", "nonzero", "__int__", "__bool__", "__float__")


@torch.no_grad()
def test_calling_the_engine_gives_logits_with_per_token_exit() -> None:
    model = tiny_model("llama")
    batch = prompts(3)
    off = engine(model, "off")
    assert torch.equal(off(**batch), model(**batch).logits)

    never = engine(model, "exit", "never")
    valid = batch["attention_mask"].bool()
    assert torch.allclose(never(**batch)[valid], model(**batch).logits[valid], atol=1e-5)

    some = engine(model, "exit", "random")
    logits = some(**batch)
    stats = some.last_stats
    assert 0 < stats.exited_tokens < stats.total_tokens == int(valid.sum())
    assert stats.tokens_run < 6 * stats.total_tokens  # computed less, not only read earlier
    assert logits.shape == (3, 9, 97)
    assert not torch.allclose(logits[valid], model(**batch).logits[valid], atol=1e-3)


@torch.no_grad()
def test_calling_the_engine_reads_exited_tokens_over_the_whole_vocabulary() -> None:
    model, batch, made = tiny_model("llama"), prompts(3), artifact()
    made.vocabulary = torch.arange(5, 20)
    config = TIDEConfig(min_layers=0)
    tide = TIDE(model, made, config, policy=ALWAYS, allow_mismatch=True, check=False)
    valid = batch["attention_mask"].bool()
    logits = tide(**batch)
    assert logits.isfinite().all()
    # All exit after the first two layers, the last token of a sequence too.
    assert tide.last_stats.exits_per_layer == {1: int(valid.sum())}
    assert tide.last_stats.depths == (2 * valid.int()).tolist()
    runner = tide.runner
    tokens = TokenBatch(batch["input_ids"], valid)
    states = runner.run(tokens, 0, 2, cache=runner.new_cache(3))
    states = tide.artifact.checkpoints[0].head.transform(states)
    assert torch.allclose(logits[valid], runner.logits(states)[valid], atol=1e-5)


@pytest.mark.parametrize("sequences", [1, 3])
def test_prefill_exit_saves_work_and_keeps_the_last_token_deep(sequences: int) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "max_new_tokens": 1, "eos_token_id": None}

    def run(policy: str, compaction_threshold: float) -> TIDE:
        config = {
            "prefill_exit": True,
            "kv_cache_strategy": "propagate",
            "compaction_threshold": compaction_threshold,
        }
        tide = engine(model, "exit", policy, **config)
        tide.generate(**prompts(sequences), **options)
        return tide

    tokens = int(prompts(sequences)["attention_mask"].sum())
    always = run("always", 0.25).runner.counts
    assert always.tokens == [tokens] * 2 + [sequences] * 4
    assert always.fills == [0, 0] + [tokens - sequences] * 4
    assert run("always", 1.0).runner.counts.tokens == [tokens] * 6  # never more than all
    never = run("never", 0.25)
    assert never.runner.counts.tokens == [tokens] * 6
    expected = model.generate(**prompts(sequences), **options)
    assert torch.equal(never.generate(**prompts(sequences), **options), expected)


def exits_in_prefill(model: Any, **config: Any) -> TIDE:
    """An engine whose prompt tokens all pass both gates' scorers, and exit at the second."""
    made = artifact()
    for checkpoint, least in zip(made.checkpoints, (1.0, 0.0), strict=True):
        checkpoint.confidence_model = ConfidenceModel()
        checkpoint.thresholds = Thresholds(confidence=least)
    config = {"exit_threshold": None, "kv_cache_strategy": "propagate", "min_layers": 0, **config}
    return TIDE(model, made, TIDEConfig(**config), allow_mismatch=True, check=False)


def random_ids(tokens: int) -> Tensor:
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def test_prefill_with_exits_copies_to_the_host_once_a_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama", max_position_embeddings=1024)
    tide = exits_in_prefill(model, prefill_exit=True)
    copies: Counter[str] = Counter()

    def counted(name: str) -> Any:
        method = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            copies[name] += 1
            return method(*args, **kwargs)

        return call

    def count(tokens: int) -> int:
        ids = random_ids(tokens)
        copies.clear()
        tide.generate(ids, attention_mask=torch.ones_like(ids), **{**GREEDY, "max_new_tokens": 1})
        assert tide.runner.counts.tokens == [tokens] * 4 + [1] * 2
        return copies.total()

    count(20)  # the first call also measures what passes cost
    for name in HOST_COPIES:
        monkeypatch.setattr(Tensor, name, counted(name))
    few = count(20)
    assert few == count(200) > 0
    # Every 256 tokens are evaluated together.
    assert count(1000) - few <= 3 * few


@pytest.mark.parametrize("prefill", [True, False])
def test_prefill_with_exits_reads_few_tokens_at_once(
    prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", max_position_embeddings=1024)
    tide = exits_in_prefill(model, prefill_exit=prefill)
    read: list[int] = []
    top_token = heads.top_token

    def counted(states: Tensor, *args: Any) -> Any:
        read.append(len(states))
        return top_token(states, *args)

    monkeypatch.setattr(heads, "top_token", counted)
    model.lm_head.register_forward_pre_hook(lambda _, states: read.append(states[0].numel() // 32))
    ids = random_ids(600)
    if prefill:
        tide.generate(ids, **{**GREEDY, "max_new_tokens": 1})
    else:
        tide(ids)
    assert max(read) == 256
    assert sum(read) >= 600


@pytest.mark.parametrize("limit", [1, 4 * 9 * 2])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_padded_prompts_with_a_large_mask_run_in_chunks(
    family: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    tide, options = engine(model, "lossless"), {**prompts(4), **GREEDY, "eos_token_id": None}
    expected = model.generate(**options)
    assert torch.equal(tide.generate(**options), expected)
    masks, attention_mask = [], segments.attention_mask

    def recorded(*args: Any) -> Any:
        made = attention_mask(*args)
        masks.extend(made.values() if isinstance(made, dict) else [made])
        return made

    monkeypatch.setattr(segments, "attention_mask", recorded)
    monkeypatch.setattr("tide.decode.prefill._MASK", limit)
    assert torch.equal(tide.generate(**{**options, "max_new_tokens": 1}), expected[:, :10])
    assert tide.runner.counts.calls == [9 if limit == 1 else 5] * 6
    assert max(mask.numel() for mask in masks) <= max(limit, 4 * 9)
    assert torch.equal(tide.generate(**options), expected)
    # Prompts without padding need no mask, and run at once.
    tide.generate(**{**prompts(1), **GREEDY, "max_new_tokens": 1})
    assert tide.runner.counts.calls == [1] * 6


def test_the_study_of_prompts_with_exits_finds_no_difference_where_none_exits() -> None:
    model = tiny_model("llama", max_position_embeddings=256)
    tide = exits_in_prefill(model, prefill_exit=True)
    tide.artifact.config = tide.artifact.config.with_(min_layers=0)
    open_gates = bench.with_exits(tide.runner, tide.artifact, 1.0)
    ways = {bench.FULL: bench.at_full_depth(tide.runner), "all": open_gates}
    full, all_exit = bench.compare(tide.runner, ways, [random_ids(40), random_ids(40).flip(1)], 8)
    assert (full["depth"], full["disagreement"], full["prompts_that_differ"]) == (1, 0, 0)
    # Thirty-nine of forty tokens exit after four of six layers.
    assert all_exit["depth"] == pytest.approx((39 * 4 + 6) / 240, abs=1e-4)
    assert all_exit["disagreement"] > 0
