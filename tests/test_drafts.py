"""Draft sources, n-gram predictions, and the gates that use them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide.calibration.table import build_table
from tide.decode.sources import ContextNGrams, CrossRequestNGrams, Draft, TableDrafts
from tide.exits.candidates import CandidateReadout, Prefilter
from tide.exits.confidence import ConfidenceModel, gather_features
from tide.exits.gate import ExitGate, note
from tide.exits.heads import ExitHead, Readout
from tide.exits.ngrams import NGramIndex, NGramPrediction, NGramPredictor
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.stats import ExitStats


def by_search(tokens: list[int], limit: int) -> Draft | None:
    """What followed the latest earlier occurrence of the last 3, 2, 1 tokens, by searching."""
    for n in (3, 2, 1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return Draft(f"context {n}", tokens[start + n : start + n + limit])
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4))
def test_context_n_grams_find_the_latest_of_the_longest_matches(
    tokens: list[int], limit: int
) -> None:
    source = ContextNGrams()
    for end in range(1, len(tokens) + 1):  # as decoding feeds it
        assert source.propose(tokens[:end], limit) == by_search(tokens[:end], limit)


def test_what_one_sequence_generated_is_drafted_for_another() -> None:
    shared, first = CrossRequestNGrams(), [9, 9, 1, 2, 3]
    shared.learn(first, 2)
    first += [4, 5]
    shared.learn(first, 5)
    assert shared.propose([7, 1, 2, 3], 3) == Draft("cross-request 2 few", [4, 5])
    assert shared.propose([9, 1, 2, 3], 3) == Draft("cross-request 3 few", [4, 5])  # four match
    assert shared.propose([7, 2, 3, 4], 3) == Draft("cross-request 2 few", [5])
    assert shared.propose([7, 7, 2], 1) == Draft("cross-request 1 few", [3])
    assert shared.propose([3, 4, 5], 3) is None  # nothing was generated after that yet
    assert shared.propose([7], 3) is None


def test_the_longest_match_is_copied_then_what_most_occurrences_have() -> None:
    shared = CrossRequestNGrams()
    for text in ([8, 1, 2, 3, 4], [9, 1, 2, 3, 5], [8, 1, 2, 3, 4], [6, 1, 2, 3, 7]):
        shared.learn(text, 3)
    assert shared.propose([9, 1, 2, 3], 1) == Draft("cross-request 3 few", [5])
    assert shared.propose([0, 1, 2, 3], 1) == Draft("cross-request 2 most", [4])
    for _ in range(8):  # older occurrences are forgotten
        shared.learn([9, 1, 2, 3, 5], 3)
    assert shared.propose([8, 1, 2, 3], 1) == Draft("cross-request 2 most", [5])


def test_a_prompt_is_not_drafted_for_others() -> None:
    shared = CrossRequestNGrams()
    shared.learn([1, 2, 3, 4, 5, 6], 5)  # five tokens are the prompt's
    assert shared.propose([1, 2, 3], 3) is None
    assert shared.propose([3, 4, 5], 3) == Draft("cross-request 2 few", [6])


def test_what_was_generated_long_ago_is_forgotten() -> None:
    shared = CrossRequestNGrams(most=60)
    for start in range(0, 400, 10):
        shared.learn(list(range(start, start + 10)), 0)
        assert len(shared._new) + len(shared._old) <= 60 + 2 * 24
    assert shared.propose([390, 391, 392], 1) == Draft("cross-request 2 few", [393])
    assert shared.propose([0, 1, 2], 1) is None


def continuation(table: ContinuationTable, tokens: list[int], limit: int) -> list[int]:
    """The table's draft without its chances."""
    return [token for token, _ in table.propose(tokens, limit)]


def test_the_table_drafts_the_most_frequent_continuation() -> None:
    answers = [[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 5], [9, 2, 3, 5], [9, 2, 3, 5]]
    table = ContinuationTable(build_table(answers, 100))
    assert continuation(table, [1, 2, 3], 1) == [4]  # by its last three
    assert continuation(table, [7, 2, 3], 1) == [5]  # by its last two
    assert continuation(table, [7, 7, 2], 2) == [3, 5]  # by its last one, then by the last two
    assert continuation(table, [7, 7, 7], 3) == []


def test_the_table_ends_its_draft_where_acceptance_is_unlikely() -> None:
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


def test_the_two_stage_gate_reads_the_head_only_for_tokens_that_pass_the_router() -> None:
    torch.manual_seed(0)
    router, readout = TokenRouter(8, 4), CountingReadout(8, 5)
    states, notes = torch.randn(20, 8), torch.tensor([note(NGramPrediction())] * 20)
    notes[3] = 0  # may not exit
    scores = router(states)
    threshold = float(scores.sort().values[10])
    wanted = Thresholds(router=threshold, top_probability=0.4)
    gate = ExitGate(ExitHead("identity", 8), readout, wanted, router)
    decision = gate.decide(states, notes)
    passed = [i for i in range(20) if scores[i] >= threshold and i != 3]
    assert readout.read == passed
    logits = readout(states)
    top = logits.softmax(-1).amax(-1)
    exits = [i for i in passed if top[i] >= 0.4]
    assert 0 < len(exits) < len(passed)
    assert decision.exits.nonzero().squeeze(1).tolist() == exits
    assert torch.equal(decision.tokens[exits], logits[exits].argmax(-1))
    assert torch.equal(decision.scores, scores)
    packed = gate(states.view(4, 5, 8), notes.view(4, 5, -1))
    assert packed.shape == (4, 5, 3)
    assert packed.view(20, 3)[:, 0].nonzero().squeeze(1).tolist() == exits


def test_a_confidence_model_decides_on_the_features_of_all_scorers() -> None:
    torch.manual_seed(0)
    router, model = TokenRouter(8, 4), ConfidenceModel(("head", "router", "table"))
    torch.nn.init.normal_(model.up.weight, std=3.0)
    vocabulary = torch.tensor([3, 5, 7, 8, 9])
    readout, states = CountingReadout(8, 12, vocabulary), torch.randn(20, 8)
    tokens, tops = readout.top(states, torch.ones(20, dtype=torch.bool))
    assert torch.equal(tokens, vocabulary[readout(states).argmax(-1)])
    predictions = [
        NGramPrediction(table=int(token) if i % 2 else 0, chance=0.4)
        for i, token in enumerate(tokens)
    ]
    notes = torch.tensor([note(predicted) for predicted in predictions])
    features = gather_features(model.features, tops, tokens, router.logit(states), notes[:, 1:])
    assert features.shape == (20, 5)
    agrees = [0.4 if i % 2 else 0.0 for i in range(20)]
    assert features[:, 3].tolist() == pytest.approx(agrees)
    assert features[:, 4].tolist() == pytest.approx([0.4 - chance for chance in agrees])
    chances = model(features).detach()
    threshold = float(chances.median())
    head, wanted = ExitHead("identity", 8), Thresholds(confidence=threshold)
    decision = ExitGate(head, readout, wanted, router, model).decide(states, notes)
    exits = decision.exits.nonzero().squeeze(1).tolist()
    assert 5 < len(exits) < 15
    assert exits == [i for i in range(20) if chances[i] >= threshold]
    assert decision.scores.tolist() == pytest.approx(chances.tolist())
    with pytest.raises(ValueError, match="confidence threshold but no confidence model"):
        ExitGate(head, readout, wanted, router)


def test_a_prefilter_rejects_tokens_by_their_candidates_before_the_head_is_read() -> None:
    torch.manual_seed(0)
    vocabulary = torch.tensor([2, 3, 5, 7, 8, 9])
    readout, states = CountingReadout(8, 12, vocabulary), torch.randn(20, 8)
    candidates = CandidateReadout(readout, torch.tensor([3, 8]))
    # Of context and table: both in the vocabulary, one of them, none, and one of them twice.
    predicted = [(5, 9), (7, 4), (-1, -1), (3, 9)] * 5
    notes = torch.tensor([note(NGramPrediction(c, 3, t, 0.5)) for c, t in predicted])
    features = candidates.features(readout.norm(states), notes[:, 1:])
    logits = readout.scatter_to_vocab(readout(states))
    for i, (context, table) in enumerate(predicted):
        few = torch.stack([logits[i, t] if t >= 0 else -torch.inf * torch.ones(()) for t in
                           (3, 8, context, table)])  # fmt: skip
        chances = (torch.cat([few.topk(2).values, few[2:]]) - few.logsumexp(0)).clamp_min(-20)
        expected = [*chances.tolist(), float(few.amax()), 3, 128]
        assert features[i].tolist() == pytest.approx(expected, abs=1e-5)
    model = ConfidenceModel(("candidates",))
    model.mean.copy_(features.mean(0))
    torch.nn.init.normal_(model.up.weight, std=3.0)
    prefilter = Prefilter(model, candidates)
    chances = prefilter(readout.norm(states), notes[:, 1:]).detach()
    wanted = Thresholds(prefilter=float(chances.median()), top_probability=0.4)
    gate = ExitGate(ExitHead("identity", 8), readout, wanted, prefilter=prefilter)
    readout.read = []
    decision = gate.decide(states, notes)
    passed = [i for i in range(20) if chances[i] >= wanted.prefilter]
    assert readout.read == passed and 5 < len(passed) < 15
    top = readout(states).softmax(-1).amax(-1)
    assert decision.exits.nonzero().squeeze(1).tolist() == [i for i in passed if top[i] >= 0.4]
    readout.read = []
    never = Thresholds(prefilter=1.1)
    none = ExitGate(ExitHead("identity", 8), readout, never, prefilter=prefilter)
    assert not none.decide(states, notes).exits.any() and not readout.read
    with pytest.raises(ValueError, match="prefilter threshold but no prefilter"):
        ExitGate(ExitHead("identity", 8), readout, wanted)


class CountingReadout(Readout):
    """A readout over random weights that notes whose logits were computed."""

    def __init__(
        self, hidden: int, vocabulary_size: int, vocabulary: torch.Tensor | None = None
    ) -> None:
        config = SimpleNamespace(vocab_size=vocabulary_size)
        super().__init__(
            torch.nn.Identity(), torch.nn.Linear(hidden, vocabulary_size), config, vocabulary
        )
        self.read: list[int] = []

    def top_of_normed(self, states: torch.Tensor, wanted: torch.Tensor, **options: Any) -> Any:
        self.read = wanted.nonzero().squeeze(1).tolist()
        tokens, tops = super().top_of_normed(states, wanted, **options)
        assert not tops[~wanted].any()
        return tokens, tops


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 30),
    st.booleans(),
)
def test_n_gram_predictions_depend_only_on_the_tokens_before_them(
    tokens: list[int], drafts: list[int], committed: int, shares: bool
) -> None:
    """However many tokens are committed, and whatever drafts came and went.

    A sequence has one index, which its draft source shares.
    """
    table = ContinuationTable(build_table([[0, 1, 2, 3, 0, 1, 3]], 4))
    committed = min(committed, len(tokens))
    index = NGramIndex()
    predictor, source = NGramPredictor(table, index), ContextNGrams(index)
    for end in range(1, committed):
        if shares:
            assert source.propose(tokens[:end], 2) == by_search(tokens[:end], 2)
        drafted = tokens[:end] + drafts
        for position in range(end - 1, len(drafted)):
            predictor.at(drafted, position, end)
    for position in range(committed - 1, len(tokens)):
        found = predictor.at(tokens, position, committed)
        before = tokens[: position + 1]
        wanted = by_search(before, 1)
        if wanted is None:
            assert (found.matched, found.context) == (0, -1)
        else:
            assert (f"context {found.matched}", [found.context]) == wanted
        assert [found.table] == (continuation(table, before, 1) or [-1])


def test_a_table_keeps_within_its_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(0, 20, (50, 40), generator=generator).tolist() + [[1, 2, 3, 4] * 9] * 9
    whole, small = build_table(answers, 20), build_table(answers, 20, budget=13 * 200)
    sizes = [sum(len(t[f"keys_{n}"]) for n in (1, 2, 3)) for t in (whole, small)]
    assert sizes[0] > 200 == sizes[1]
    table = ContinuationTable(small)
    # What was seen most stays; what a shorter n-gram predicts as well need not.
    assert continuation(table, [1, 2, 3], 4) == [4, 1, 2, 3]
    assert len(small["keys_1"]) == 20
    token, chance = table.next([1]) or (None, 0.0)
    assert token == 2 and 0.4 < chance < 1
    assert build_table(answers, 20, budget=0)["keys_3"].numel() == 0


def test_the_type_of_a_table_draft_is_how_sure_the_table_is() -> None:
    source = TableDrafts(ContinuationTable(build_table([[1, 2]] * 9 + [[3, 4], [3, 5]], 10)))
    assert source.propose([1], 3) == Draft("table 80%", [2])
    assert source.propose([3], 3) == Draft("table 20%", [5])
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
