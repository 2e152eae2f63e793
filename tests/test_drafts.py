"""Draft sources guess what they say they guess, and drafting that does not pay stops."""

from __future__ import annotations

from statistics import median

import torch
from hypothesis import given
from hypothesis import strategies as st

from tide.calibration.table import build_table
from tide.decode.drafts import ContextNGrams, ContinuationTable, DraftLength, Trial
from tide.exits.policy import Gate, GatePolicy, Place
from tide.exits.routers import TokenRouter
from tide.stats import ExitStats


def by_search(tokens: list[int], n: int, limit: int) -> list[int]:
    """What followed the latest earlier occurrence of the last n tokens, the plain way."""
    for start in range(len(tokens) - n - 1, -1, -1):
        if tokens[start : start + n] == tokens[len(tokens) - n :]:
            return tokens[start + n : start + n + limit]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_context_n_grams_find_the_latest_match(tokens: list[int], n: int, limit: int) -> None:
    source = ContextNGrams(n)
    for end in range(1, len(tokens) + 1):  # as decoding feeds it
        assert source.propose(tokens[:end], limit) == by_search(tokens[:end], n, limit)


def test_the_table_says_the_most_frequent_continuation() -> None:
    answers = [[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 5], [9, 2, 3, 5], [9, 2, 3, 5]]
    table = ContinuationTable(build_table(answers, 100))
    assert table.propose([1, 2, 3], 1) == [4]  # by its last three
    assert table.propose([7, 2, 3], 1) == [5]  # by its last two
    assert table.propose([7, 7, 2], 2) == [3, 5]  # by its last one, then by the last two
    assert table.propose([7, 7, 7], 3) == []


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=6))
def test_the_table_agrees_with_counting(answers: list[list[int]]) -> None:
    tensors = build_table(answers, 6)
    for n in (1, 2, 3):
        counted: dict[int, dict[int, int]] = {}
        for answer in answers:
            for at in range(len(answer) - n):
                key = 0
                for token in answer[at : at + n]:
                    key = key * 6 + token
                following = counted.setdefault(key, {})
                following[answer[at + n]] = following.get(answer[at + n], 0) + 1
        keys, nexts = tensors[f"keys_{n}"].tolist(), tensors[f"next_{n}"].tolist()
        assert keys == sorted(counted)
        for key, following in zip(keys, nexts, strict=True):
            assert counted[key][following] == max(counted[key].values())


def drive(lengths: DraftLength, cost: dict[int, float], right: float, passes: int) -> list[int]:
    """Feed a controller passes of a known cost and guesses of a known quality."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(passes):
        k = lengths.choose("context")
        chosen.append(k)
        lengths.cost(1 + k, cost[1 + k])
        accepted = 0
        while accepted < k and torch.rand((), generator=generator) < right:
            accepted += 1
        if k:
            lengths.outcome("context", k, accepted)
    return chosen


def test_good_guesses_on_cheap_passes_are_long() -> None:
    flat = dict.fromkeys(range(1, 12), 1.0)
    assert median(drive(DraftLength(10), flat, 0.95, 200)[100:]) >= 5


def test_guesses_that_do_not_pay_stop_and_are_tried_again() -> None:
    flat = {q: 1 + 0.05 * (q - 1) for q in range(1, 12)}
    lengths = DraftLength(10)
    useless = drive(lengths, flat, 0.0, 300)[100:]
    assert useless.count(0) > 0.9 * len(useless)
    assert any(useless)
    better = drive(lengths, flat, 0.95, 1500)[-200:]
    assert median(better) >= 3  # found out by the tries


def test_passes_that_cost_by_the_token_are_kept_short() -> None:
    steep = {q: float(q) for q in range(1, 12)}
    lengths = drive(DraftLength(10), steep, 0.5, 300)[100:]
    assert lengths.count(0) > 0.9 * len(lengths)


def test_a_trial_finds_the_better_side_and_keeps_looking() -> None:
    trial = Trial(retry=10)
    rates = {True: 5.0, False: 8.0}

    def rounds(count: int) -> list[bool]:
        used = []
        for _ in range(count):
            used.append(trial.choose())
            trial.outcome(used[-1], 10, 10 / rates[used[-1]])
        return used

    first = rounds(100)[20:]
    assert 0 < first.count(True) <= 8  # now and then, to see whether it has changed
    rates[True] = 20.0
    assert rounds(1000)[-100:].count(True) >= 90


def test_the_two_stage_gate_asks_the_head_only_where_the_router_lets_pass() -> None:
    torch.manual_seed(0)
    router = TokenRouter(8, 4)
    hidden = torch.randn(20, 8)
    places = [Place(0, i) for i in range(20)]
    scores = router(hidden).tolist()
    threshold = sorted(scores)[10]
    read: list[int] = []
    logits = torch.randn(20, 5) * 3

    def head(chosen: list[int]) -> torch.Tensor:
        read.extend(chosen)
        return logits[chosen]

    policy = GatePolicy([router], [Gate(router=threshold, top_probability=0.8)])
    decision = policy.decide(0, hidden, places, head)
    passed = [i for i in range(20) if scores[i] >= threshold]
    assert read == passed
    top = logits.softmax(-1).amax(-1)
    assert decision.leaves == [i for i in passed if top[i] >= 0.8]
    assert decision.logits is not None
    assert torch.equal(decision.logits, logits[decision.leaves])
    assert decision.scores == scores


def test_summary_is_the_published_text() -> None:
    stats = ExitStats(32, {7: 23, 11: 31, 15: 18}, remaining_tokens=28)
    assert stats.summary().splitlines()[:5] == [
        "Total tokens: 100, Exited: 72 (72.0%)",
        "  Layer 7: 23 exits (23.0%)",
        "  Layer 11: 31 exits (31.0%)",
        "  Layer 15: 18 exits (18.0%)",
        "  Ran all layers: 28",
    ]
    assert stats.exit_rate == 0.72
    assert ExitStats(32).summary().startswith("Total tokens: 0, Exited: 0 (0.0%)")
