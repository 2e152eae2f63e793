"""The drafter: drafts that pay get longer, others stop, and it is decided once a step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from test_generate import engine
from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.decode.batch import BatchState
from tide.decode.drafter import RETRY, Acceptance, Drafter, OnlineComparison
from tide.decode.growth import NodeRates, TreeSource
from tide.decode.pass_costs import PassCosts
from tide.decode.sequence import SequenceState
from tide.decode.sources import Draft, draft_sources
from tide.decode.tree import DraftTree
from tide.engine import TIDE
from tide.exits.table import ContinuationTable
from tide.models.cache import WaterlineCache
from tiny import VOCABULARY, tiny_model

FLAT = dict.fromkeys(range(1, 12), 1.0)


class Source:
    """Drafts zeros."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft("context", [0] * limit)


def batch_of(sequences: int, room: int, prompt: int = 1) -> BatchState:
    """A batch that no model has run."""
    contexts = torch.zeros(sequences, room, dtype=torch.long)
    made = [
        SequenceState(i, contexts[i], 0, [0] * prompt, prompt=prompt, committed=prompt)
        for i in range(sequences)
    ]
    return BatchState(made, [(0, 1)], WaterlineCache(1, sequences), max_pending=100)


def drive(
    drafter: Drafter, cost: dict[int, float], right: float, steps: int, sequences: int = 1
) -> list[int]:
    """Feed a drafter steps of a known cost and drafts of a known quality; the chunks less one."""
    draw = random.Random(0).random
    batch, chosen = batch_of(sequences, 12 * steps), []
    sources = {i: [Source()] for i in range(sequences)}
    for _ in range(steps):
        drafter.propose(batch, sources)
        drafted = [sequence.open_drafts for sequence in batch.sequences]
        chosen.append(max(drafted))
        drafter.costs.add(batch, 1 + max(drafted), cost[1 + max(drafted)])
        for i, k in enumerate(drafted):
            while k and draw() < right:
                batch.commit(i, 0)
                k -= 1
            batch.commit(i, 1)
        for ended in batch.end_drafts():
            drafter.accepted.record(*ended)
    return chosen


def test_of_several_drafts_the_most_promising_is_taken() -> None:
    table = ContinuationTable(build_table([[1, 2, 3, 4, 5]] * 9, 10))
    sources, tokens = draft_sources(table), [8, 3, 9, 3]
    accepted = Acceptance()
    types = [source.propose(tokens, 2).draft_type for source in sources]  # type: ignore[union-attr]
    assert types == ["context 1", "table 80%"]
    for _ in range(20):
        accepted.record("context 1", 2, 0)
        accepted.record("table 80%", 2, 2)
    assert accepted.best(sources, tokens, 2) == Draft("table 80%", [4, 5])
    for _ in range(400):
        accepted.record("context 1", 2, 2)
        accepted.record("table 80%", 2, 0)
    assert accepted.best(sources, tokens, 2) == Draft("context 1", [9, 3])
    assert accepted.best([], tokens, 2) is None


def test_a_type_that_was_passed_over_gets_another_turn() -> None:
    table = ContinuationTable(build_table([[1, 2, 3, 4, 5]] * 9, 10))
    sources, tokens, accepted = draft_sources(table), [8, 3, 9, 3], Acceptance(fade=0.99)
    for _ in range(20):
        accepted.record("context 1", 2, 0)
    turns = []
    for step in range(500):
        found = accepted.best(sources, tokens, 2)
        assert found is not None
        turns.append(found.draft_type)
        good = int(found.draft_type != "context 1" and step % 3 == 0)
        accepted.record(found.draft_type, 2, good)
    assert 3 <= turns.count("context 1") <= 100


def test_good_drafts_on_cheap_passes_are_long() -> None:
    assert median(drive(Drafter(10), FLAT, 0.95, 200)[100:]) >= 5


def test_drafts_that_do_not_pay_stop_and_are_tried_again() -> None:
    rising = {tokens: 1 + 0.05 * (tokens - 1) for tokens in range(1, 12)}
    drafter = Drafter(10)
    useless = drive(drafter, rising, 0.0, 300)[100:]
    assert useless.count(0) > 0.9 * len(useless)
    assert any(useless)
    better = drive(drafter, rising, 0.95, 1500)[-200:]
    assert median(better) >= 3  # found out by the tries


def test_passes_that_cost_by_the_token_are_kept_short() -> None:
    steep = {tokens: float(tokens) for tokens in range(1, 12)}
    lengths = drive(Drafter(10), steep, 0.5, 300)[100:]
    assert lengths.count(0) > 0.9 * len(lengths)


def test_an_online_comparison_finds_the_faster_way_and_keeps_trying_the_other() -> None:
    comparison = OnlineComparison(retry=10)
    rates = {True: 5.0, False: 8.0}

    def cycles(count: int) -> list[bool]:
        used = []
        for _ in range(count):
            used.append(comparison.choose())
            comparison.record(used[-1], 10, 10 / rates[used[-1]])
        return used

    first = cycles(100)[20:]
    assert 0 < first.count(True) <= 8  # now and then, to see whether it has changed
    rates[True] = 20.0
    assert cycles(1000)[-100:].count(True) >= 90


@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_undrafted_steps_are_measured_again_in_a_batch_of_any_size(sequences: int) -> None:
    """Not only the first: their cost is what drafting is compared with."""
    lengths = drive(Drafter(10), FLAT, 0.95, 300, sequences)
    undrafted = [step for step, length in enumerate(lengths) if not length]
    assert undrafted[0] == 0
    # Now and then, and never more often than that: sequences do not count as steps.
    gaps = [later - earlier for earlier, later in pairwise(undrafted)]
    assert len(undrafted) >= 3
    assert min(gaps) > RETRY
    assert median(lengths) >= 5


def test_a_batch_drafts_while_one_draft_type_pays() -> None:
    """The length is one for all drafts of a step, since sequences share the pass."""
    drafter, batch = Drafter(10), batch_of(32, 600)
    drafter.costs.add(batch, 1, 1.0)
    drafter.costs.add(batch, 11, 1.0)
    drafter.accepted.record("context", 10, 10)
    drafter.propose(batch, {i: [Source()] for i in range(32)})
    assert len({sequence.open_drafts for sequence in batch.sequences}) == 1
    assert batch.sequences[0].open_drafts > 0


def test_costs_are_kept_by_batch_size_and_context_length() -> None:
    costs = PassCosts()
    one, many, long = batch_of(1, 10), batch_of(32, 10), batch_of(1, 4000, prompt=3000)
    costs.add(one, 1, 0.5)
    assert costs.of(many) == {}  # nothing is known of what a larger batch costs
    assert costs.of(long) == {1: 0.5}  # a longer context starts from the nearest one
    costs.add(many, 1, 2.0)
    costs.add(long, 1, 1.0)
    assert costs.of(one) == {1: 0.5}
    assert costs.of(batch_of(1, 10, prompt=5)) == {1: 0.5}  # the same bucket
    assert costs.of(many) == {1: 2.0}
    assert costs.of(batch_of(40, 10)) == {1: 2.0}
    assert costs.of(long) == {1: pytest.approx(0.55)}


def test_a_batch_that_shrinks_starts_from_what_the_larger_one_cost() -> None:
    costs, many, one = PassCosts(), batch_of(32, 10), batch_of(1, 10)
    costs.start(32, {1: 4.0, 8: 6.0})
    assert costs.of(one) == {1: 4.0, 8: 6.0}
    costs.add(one, 1, 1.0)
    assert costs.of(one) == {1: pytest.approx(1.0), 8: pytest.approx(1.5)}
    costs.add(one, 1, 1.5)  # from here on as usual
    grown = pytest.approx(1.5 * 1.05)  # how costs grow with length is kept
    assert costs.of(one) == {1: pytest.approx(1.05), 8: grown}
    costs.add(one, 8, grown.expected)
    costs.add(one, 1, 1.5)
    assert costs.of(one) == {1: pytest.approx(1.095), 8: grown}  # unless it was seen
    assert costs.of(many) == {1: 4.0, 8: 6.0}
    assert costs.known(32) and not costs.known(1)  # a call of one sequence is still measured
    costs.start(1, {1: 0.5, 8: 0.6})
    assert costs.known(1) and costs.of(one) == {1: 0.5, 8: 0.6}


def test_what_was_measured_is_not_taken_for_borrowed() -> None:
    costs, one = PassCosts(), batch_of(1, 10)
    costs.start(32, {1: 4.0, 8: 6.0})
    costs.of(one)  # borrowed, and the batch ended before a step was timed
    costs.start(1, {1: 0.5, 8: 0.6})
    costs.add(one, 1, 0.25)
    assert costs.of(one) == {1: pytest.approx(0.475), 8: pytest.approx(0.95 * 0.6)}


def test_no_tree_is_larger_than_what_was_measured() -> None:
    asked = []

    class Bush(TreeSource):
        def grow(self, tokens: Sequence[int], nodes: int, depth: int) -> DraftTree:
            asked.append(nodes)
            return DraftTree()

    drafter = Drafter(10, 64)
    drafter.costs.start(64, {1: 1.0, 2: 1.0, 8: 1.0})
    for sequences in (64, 63, 5):
        batch = batch_of(sequences, 10)
        drafter.propose(batch, dict.fromkeys(range(sequences), Bush(NodeRates(), None, None, None)))
        drafter.costs.add(batch, 1, 0.5)
    assert set(asked) == {7}


def test_a_slow_outlier_moves_an_estimate_little() -> None:
    costs, batch = PassCosts(), batch_of(1, 10)
    costs.add(batch, 1, 1.0)
    costs.add(batch, 1, 100.0)
    assert costs.of(batch)[1] == pytest.approx(1.1)


class Cycle:
    """Makes sequences that start with token 7 repeat five tokens; looks at nothing else."""

    tide_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 10 + input_ids.shape[1] % 5] = 0.0
        return torch.where(input_ids[:, :1] == 7, forced, scores)


def mixed(sequences: int) -> dict[str, torch.Tensor]:
    """Prompts of which only the first gets good drafts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, VOCABULARY, (sequences, 9), generator=generator)
    ids[0, 0] = 7
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def options(**changes: Any) -> dict[str, Any]:
    return {
        "max_new_tokens": 60,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "logits_processor": LogitsProcessorList([Cycle()]),
        **changes,
    }


def test_exit_drafts_are_compared_although_another_sequence_drafts(monkeypatch: Any) -> None:
    recorded: list[bool] = []
    record = OnlineComparison.record

    def spy(self: OnlineComparison, used: bool, tokens: int, seconds: float) -> None:
        recorded.append(used)
        record(self, used, tokens, seconds)

    monkeypatch.setattr(OnlineComparison, "record", spy)
    tide = engine(tiny_model("llama"), "lossless", "always", max_pending=12, max_tree=0)
    tide.generate(**mixed(4), **options())
    deep = tide.runner.counts.calls[-1] - 1  # less the prompts
    assert sum(tide.last_stats.accepted.get(f"context {n}", 0) for n in (1, 2, 3)) > 10
    assert len(recorded) == deep
    assert set(recorded) == {True, False}


def test_lengths_are_decided_once_a_step(monkeypatch: Any) -> None:
    calls: list[int] = []
    lengths = Drafter.lengths

    def spy(self: Drafter, batch: BatchState, drafts: Any) -> dict[int, int]:
        calls.append(len(drafts))
        return lengths(self, batch, drafts)

    monkeypatch.setattr(Drafter, "lengths", spy)
    tide = engine(tiny_model("llama"), "lossless", drafts=("context",))
    tide.generate(**mixed(8), **options(max_new_tokens=30))
    assert max(calls) > 4  # for many sequences at once
    assert len(calls) <= tide.last_stats.steps


def test_a_batch_of_32_measures_undrafted_steps(monkeypatch: Any) -> None:
    """By the loop itself: what it records are the tokens that a sequence really had in the pass."""
    measured: list[int] = []
    add = PassCosts.add

    def spy(self: PassCosts, batch: BatchState, tokens: int, seconds: float) -> None:
        measured.append(tokens)
        add(self, batch, tokens, 1.0)  # any length costs the same, so drafts always pay

    monkeypatch.setattr(PassCosts, "add", spy)
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=4096)
    tide = TIDE(model, None, TIDEConfig(mode="lossless", drafts=("context",)), check=False)
    batch = {name: given.expand(32, -1) for name, given in mixed(1).items()}
    tide.generate(**batch, **options(max_new_tokens=800))
    assert len(measured) == tide.last_stats.steps < 300
    assert measured[0] == 1
    assert 1 in measured[20:]  # the first steps have nothing to draft from
    assert median(measured) > 1
