"""Draft sources guess what they say they guess, and drafting that does not pay stops."""

from __future__ import annotations

import math
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide.calibration.table import build_table
from tide.decode.drafts import (
    Acceptance,
    ContextNGrams,
    DraftLength,
    Guess,
    ServedNGrams,
    TableDrafts,
    Trial,
    draft_sources,
)
from tide.exits.blend import Blend, gather_opinions
from tide.exits.hints import Hint, RowHints
from tide.exits.policy import Gate, GatePolicy, Place
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.stats import ExitStats


def by_search(tokens: list[int], limit: int) -> Guess | None:
    """What followed the latest earlier occurrence of the last 3, 2, 1 tokens, the plain way."""
    for n in (3, 2, 1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return Guess(f"context {n}", tokens[start + n : start + n + limit])
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4))
def test_context_n_grams_find_the_latest_of_the_longest_matches(
    tokens: list[int], limit: int
) -> None:
    source = ContextNGrams()
    for end in range(1, len(tokens) + 1):  # as decoding feeds it
        assert source.propose(tokens[:end], limit) == by_search(tokens[:end], limit)


def test_what_one_row_said_is_guessed_for_another() -> None:
    served, first = ServedNGrams(), [9, 9, 1, 2, 3]
    served.learn(first, 2)
    first += [4, 5]
    served.learn(first, 5)
    assert served.propose([7, 1, 2, 3], 3) == Guess("served", [4, 5])
    assert served.propose([7, 2, 3, 4], 3) == Guess("served", [5])
    assert served.propose([3, 4, 5], 3) is None  # nothing was said after that yet
    assert served.propose([9, 9], 3) is None


def test_a_prompt_is_not_guessed_for_others() -> None:
    served = ServedNGrams()
    served.learn([1, 2, 3, 4, 5, 6], 5)  # five tokens are the prompt's
    assert served.propose([1, 2, 3], 3) is None
    assert served.propose([3, 4, 5], 3) == Guess("served", [6])


def test_what_was_said_long_ago_is_forgotten() -> None:
    served = ServedNGrams(most=10)
    for start in range(0, 400, 10):
        served.learn(list(range(start, start + 10)), 0)
        assert len(served._new) + len(served._old) <= 10 + 7
    assert served.propose([390, 391, 392], 1) == Guess("served", [393])
    assert served.propose([0, 1, 2], 1) is None


def test_of_several_guesses_the_most_promising_is_taken() -> None:
    table = ContinuationTable(build_table([[1, 2, 3, 4, 5]] * 9, 10))
    sources, tokens = draft_sources(table), [8, 3, 9, 3]
    accepted = Acceptance()
    kinds = [source.propose(tokens, 2).kind for source in sources]  # type: ignore[union-attr]
    assert kinds == ["context 1", "table 80%"]
    for _ in range(20):
        accepted.outcome("context 1", 2, 0)
        accepted.outcome("table 80%", 2, 2)
    assert accepted.best(sources, tokens, 2) == Guess("table 80%", [4, 5])
    for _ in range(400):
        accepted.outcome("context 1", 2, 2)
        accepted.outcome("table 80%", 2, 0)
    assert accepted.best(sources, tokens, 2) == Guess("context 1", [9, 3])
    assert accepted.best([], tokens, 2) is None


def test_what_was_passed_over_gets_another_turn() -> None:
    table = ContinuationTable(build_table([[1, 2, 3, 4, 5]] * 9, 10))
    sources, tokens, accepted = draft_sources(table), [8, 3, 9, 3], Acceptance(fade=0.99)
    for _ in range(20):
        accepted.outcome("context 1", 2, 0)
    turns = []
    for step in range(500):
        found = accepted.best(sources, tokens, 2)
        assert found is not None
        turns.append(found.kind)
        accepted.outcome(found.kind, 2, int(found.kind != "context 1" and step % 3 == 0))
    assert 3 <= turns.count("context 1") <= 100


def said(table: ContinuationTable, tokens: list[int], limit: int) -> list[int]:
    """The table's guess without its chances."""
    return [token for token, _ in table.propose(tokens, limit)]


def test_the_table_says_the_most_frequent_continuation() -> None:
    answers = [[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 5], [9, 2, 3, 5], [9, 2, 3, 5]]
    table = ContinuationTable(build_table(answers, 100))
    assert said(table, [1, 2, 3], 1) == [4]  # by its last three
    assert said(table, [7, 2, 3], 1) == [5]  # by its last two
    assert said(table, [7, 7, 2], 2) == [3, 5]  # by its last one, then by the last two
    assert said(table, [7, 7, 7], 3) == []


def test_the_table_ends_where_it_is_hardly_likely_to_be_right() -> None:
    spread = [[1, after] for after in range(2, 9)] + [[after, 1] for after in range(2, 9)]
    table = ContinuationTable(build_table(spread, 10))
    chances = [chance for _, chance in table.propose([1], 9)]
    assert len(chances) == 2  # an eighth, a half; another eighth would make less than 2 % of all
    assert math.prod(chances) >= 0.02


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
            lengths.accepted.outcome("context", k, accepted)
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
    decision = policy.decide(0, hidden, places, head, lambda chosen: [])
    passed = [i for i in range(20) if scores[i] >= threshold]
    assert read == passed
    top = logits.softmax(-1).amax(-1)
    assert decision.leaves == [i for i in passed if top[i] >= 0.8]
    assert decision.logits is not None
    assert torch.equal(decision.logits, logits[decision.leaves])
    assert decision.scores == scores


def test_a_blend_decides_on_what_all_judges_say() -> None:
    torch.manual_seed(0)
    router, blend = TokenRouter(8, 4), Blend(("head", "router", "table"))
    torch.nn.init.normal_(blend.up.weight, std=3.0)
    hidden, logits = torch.randn(20, 8), torch.randn(20, 5) * 3
    vocabulary = torch.tensor([3, 5, 7, 8, 9])
    said = vocabulary[logits.argmax(-1)].tolist()
    hints = [Hint(table=token if i % 2 else 0, chance=0.5) for i, token in enumerate(said)]
    opinions = gather_opinions(blend.features, logits, said, router.logit(hidden), hints)
    assert opinions.shape == (20, 5)
    assert opinions[:, 3].tolist() == [0.5 if i % 2 else 0.0 for i in range(20)]  # agrees
    assert opinions[:, 4].tolist() == [0.0 if i % 2 else 0.5 for i in range(20)]  # does not
    chances = blend(opinions).detach()
    threshold = float(chances.median())
    policy = GatePolicy([router], [Gate(blend=threshold)], [blend], lambda i: vocabulary[i])
    decision = policy.decide(
        0, hidden, [Place(0, i) for i in range(20)],
        lambda chosen: logits[chosen], lambda chosen: [hints[i] for i in chosen],
    )  # fmt: skip
    assert 5 < len(decision.leaves) < 15
    assert decision.leaves == [i for i in range(20) if chances[i] >= threshold]
    assert decision.scores == pytest.approx(chances.tolist())
    with pytest.raises(ValueError, match="blend threshold but no blend"):
        GatePolicy([router], [Gate(blend=0.5)])


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_hints_depend_on_the_tokens_before_them_only(
    tokens: list[int], guesses: list[int], settled: int
) -> None:
    """However many of the tokens are settled, and whatever guesses came and went."""
    table = ContinuationTable(build_table([[0, 1, 2, 3, 0, 1, 3]], 4))
    settled = min(settled, len(tokens))
    hints = RowHints(table)
    for end in range(1, settled):
        with_guesses = tokens[:end] + guesses
        for position in range(end - 1, len(with_guesses)):
            hints.at(with_guesses, position, end)
    for position in range(settled - 1, len(tokens)):
        found = hints.at(tokens, position, settled)
        before = tokens[: position + 1]
        wanted = by_search(before, 1)
        if wanted is None:
            assert (found.matched, found.context) == (0, -1)
        else:
            assert (f"context {found.matched}", [found.context]) == wanted
        assert [found.table] == (said(table, before, 1) or [-1])


def test_a_table_keeps_within_its_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(0, 20, (50, 40), generator=generator).tolist() + [[1, 2, 3, 4] * 9] * 9
    whole, small = build_table(answers, 20), build_table(answers, 20, budget=13 * 200)
    sizes = [sum(len(t[f"keys_{n}"]) for n in (1, 2, 3)) for t in (whole, small)]
    assert sizes[0] > 200 == sizes[1]
    table = ContinuationTable(small)
    # What was seen most stays, and what a shorter n-gram says as well need not.
    assert said(table, [1, 2, 3], 4) == [4, 1, 2, 3]
    assert len(small["keys_1"]) == 20
    token, chance = table.next([1]) or (None, 0.0)
    assert token == 2 and 0.4 < chance < 1
    assert build_table(answers, 20, budget=0)["keys_3"].numel() == 0


def test_a_guess_of_the_table_says_how_sure_it_is() -> None:
    source = TableDrafts(ContinuationTable(build_table([[1, 2]] * 9 + [[3, 4], [3, 5]], 10)))
    assert source.propose([1], 3) == Guess("table 80%", [2])
    assert source.propose([3], 3) == Guess("table 20%", [5])
    assert source.propose([7], 3) is None


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
