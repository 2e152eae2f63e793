"""The proposer for vLLM, on a simulated engine with its own clock: no vLLM needed."""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tide.vllm import proposer as module
from tide.vllm.proposer import TableProposer
from tide.vllm.settings import Settings
from tide.vllm.stepcost import StepCost
from tide.vllm.switch import DraftSwitch

MAX_LENGTH = 400
OUTLIERS = (0.8, 0.9, 1, 1, 1, 1.1, 3)  # factors on the cost of a step
SPREAD = (0.7, 0.8, 0.9, 1, 1, 1.1, 1.2, 1.3)  # a standard deviation of 20 %
WIDE = (0.4, 0.7, 0.8, 0.9, 1, 1, 1.1, 1.2, 1.3, 1.6)  # and of 30 %
UNDRAFTED: Any = SimpleNamespace(propose=lambda s, n, t: [[] for _ in s])


class Engine:
    """Serves given texts, `batch` at once.

    A step costs `base + price * tokens` on its clock, and `more` if it has drafts.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, base: float, price: float, more: float = 0.0,
        noise: Sequence[float] = OUTLIERS,
    ) -> None:  # fmt: skip
        self.base, self.price, self.more, self.now = base, price, more, 0.0
        self.steps = self.tokens = self.drafted = self.switched = 0
        self.noise, self.draw = noise, random.Random(0)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    @property
    def curve(self) -> dict[int, float]:
        """What a start-up would measure."""
        return {n: self.base + self.price * n for n in (1, 2, 4, 8, 16, 32, 64)}

    def serve(self, proposer: TableProposer, texts: list[list[int]], batch: int) -> None:
        """Serve texts: each is a prompt of four tokens and the answer of the model."""
        waiting = [list(text) for text in texts]
        running: list[list[int]] = []
        done: list[int] = []  # known tokens of each
        drafts: list[list[int]] = []
        on: dict[int, bool] = {}
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.pop(0))
                done.append(4)
                drafts.append([])
            sampled = []
            for n, text in enumerate(running):
                accepted = 0
                while accepted < len(drafts[n]) and text[done[n] + accepted] == drafts[n][accepted]:
                    accepted += 1
                end = min(done[n] + accepted + 1, len(text))
                sampled.append(text[done[n] : end])
                done[n] = end
            drafted = sum(map(len, drafts))
            self.steps += 1
            self.tokens += sum(map(len, sampled))
            self.drafted += drafted
            cost = self.base + self.price * (len(running) + drafted) + self.more * bool(drafted)
            self.now += cost * self.draw.choice(self.noise)
            known = np.zeros((len(running), MAX_LENGTH), np.int32)
            for n, text in enumerate(running):
                known[n, : len(text)] = text
            drafts = proposer.propose(sampled, np.array(done), known)
            assert max(map(len, drafts)) <= 8
            for size, switch in getattr(proposer, "_switches", {}).items():
                self.switched += on.get(size, True) != switch.on
                on[size] = switch.on
            ended = [n for n, text in enumerate(running) if done[n] + 9 >= len(text)]
            for n in reversed(ended):
                del running[n], done[n], drafts[n]


class Recorder:
    """Stands in for the metrics, which need vLLM."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()
        self.drafted = self.accepted = 0

    def step(self, decision: str, drafted: int, accepted: int) -> None:
        """Count a step."""
        self.decisions[decision] += 1
        self.drafted += drafted
        self.accepted += accepted


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a proposer without an artifact, for a model whose steps were measured or not."""
    metrics: Any = SimpleNamespace(DraftMetrics=Recorder)
    monkeypatch.setitem(sys.modules, "tide.vllm.metrics", metrics)
    directly: Any = SimpleNamespace(sample_undrafted_directly=lambda: None)
    monkeypatch.setitem(sys.modules, "tide.vllm.undrafted", directly)

    def made(
        cross_request: bool = False, costs: Mapping[int, float] | None = None
    ) -> TableProposer:
        settings = Settings(mode="lossless", cross_request_drafts=cross_request)
        monkeypatch.setattr(Settings, "read", lambda _: settings)
        speculative = SimpleNamespace(num_speculative_tokens=8)
        target = SimpleNamespace(max_model_len=MAX_LENGTH)
        found = TableProposer(SimpleNamespace(speculative_config=speculative, model_config=target))
        # Where drafts might not fit, vLLM would draft zeros for every request.
        assert speculative.draft_model_config.max_model_len == MAX_LENGTH + 16
        assert target.max_model_len == MAX_LENGTH
        # As in vLLM, costs are measured after the model was loaded.
        model = SimpleNamespace(step_costs=None)
        found.load_model(model)
        model.step_costs = costs
        return found

    return made


def noise(seed: int, length: int = 120) -> list[int]:
    """Tokens that do not repeat, within a seed or across seeds."""
    return [1000 * seed + i for i in range(length)]


def random_texts(count: int, length: int = 120, vocabulary: int = 12) -> list[list[int]]:
    """Texts in which every token has occurred before, and drafts are seldom accepted."""
    draw = random.Random(1)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def copied_texts(count: int, share: float, length: int = 240) -> list[list[int]]:
    """Texts that repeat themselves; this share of their tokens follows as it did before."""
    draw = random.Random(2)
    texts = []
    for _ in range(count):
        text = list(range(20))
        while len(text) < length:
            follows = (text[-1] + 1) % 20
            text.append(follows if draw.random() < share else draw.randrange(20))
        texts.append(text)
    return texts


def test_a_text_that_repeats_itself_is_served_faster(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(monkeypatch, base=0.026, price=0.0004)
    engine.serve(make(), [noise(i, 20) * 8 for i in range(6)], 1)
    assert engine.tokens / engine.steps > 3


@pytest.mark.parametrize("measured", [False, True])
def test_rejected_drafts_cost_next_to_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    took = []
    for served in (True, False):
        engine = Engine(monkeypatch, base=0.03, price=0.004)  # drafts are expensive here
        proposer = make(True, engine.curve if measured else None) if served else UNDRAFTED
        engine.serve(proposer, random_texts(64), 8)
        took.append(engine.now / engine.tokens)
    assert took[0] < 1.04 * took[1]


def test_where_drafts_do_not_pay_at_most_one_percent_is_lost(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in (1, 8, 32):
        took = []
        for served in (True, False):
            engine = Engine(monkeypatch, base=0.001, price=0.01, noise=(1,))
            proposer = make(False, engine.curve) if served else UNDRAFTED
            engine.serve(proposer, random_texts(batch * 8, 300), batch)
            took.append(engine.now / engine.tokens)
            assert engine.steps > 2000
            assert (engine.drafted > 0) == served  # it is tried now and then
        assert took[0] < 1.01 * took[1]


def test_drafting_stops_where_its_fixed_cost_exceeds_the_gain(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[*noise(i, 12), *noise(i, 4), *noise(100 + i, 8)] * 5 for i in range(64)]
    took = []
    for served in (True, False):
        engine = Engine(monkeypatch, base=0.03, price=0.0, more=0.3)
        proposer = make(False, engine.curve) if served else UNDRAFTED
        engine.serve(proposer, texts, 8)
        took.append(engine.now / engine.tokens)
    assert took[0] < 1.4 * took[1]  # drafts would pay without the fixed cost


def test_noise_does_not_make_drafts_look_cheap(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too high a cost of steps without drafts would keep drafting on, and so never be corrected."""
    took = []
    for served in (True, False):
        engine = Engine(monkeypatch, base=0.05, price=0.03, noise=WIDE)
        proposer = make(False, engine.curve) if served else UNDRAFTED
        engine.serve(proposer, copied_texts(800, 0.9, 60), 32)
        took.append(engine.now / engine.tokens)
    assert took[0] < 1.02 * took[1]


def test_the_time_of_looking_is_no_part_of_a_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(monkeypatch, base=0.03, price=0.0)
    proposer, draft = make(False, engine.curve), TableProposer._draft

    def slow(self: Any, *args: Any) -> Any:
        engine.now += 0.02
        return draft(self, *args)

    monkeypatch.setattr(TableProposer, "_draft", slow)
    engine.noise = (1,)
    engine.serve(proposer, [noise(0, 60)], 1)  # drafting is on throughout
    assert proposer._cost.undrafted(1) == pytest.approx(0.03)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("price", [0.001, 0.006, 0.012, 0.03])
def test_noise_does_not_switch_drafting_on_and_off(
    make: Any, monkeypatch: pytest.MonkeyPatch, price: float, share: float
) -> None:
    engine = Engine(monkeypatch, base=0.03, price=price, noise=SPREAD)
    engine.serve(make(False, engine.curve), copied_texts(64, share), 4)
    assert engine.steps > 1000
    assert engine.switched <= 2


def test_the_answer_to_one_request_speeds_up_the_next(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {}
    for cross_request in (False, True):
        engine = Engine(monkeypatch, base=0.026, price=0.0004)
        texts = [[10_000 + i] * 4 + noise(i % 3) for i in range(12)]
        engine.serve(make(cross_request), texts, 1)
        steps[cross_request] = engine.steps
    assert steps[True] < 0.6 * steps[False]


def propose(proposer: TableProposer, batch: list[tuple[list[int], int]]) -> list[list[int]]:
    """A step over texts, with the number of new tokens at the end of each."""
    known = np.zeros((len(batch), MAX_LENGTH), np.int32)
    for n, (text, _) in enumerate(batch):
        known[n, : len(text)] = text
    sampled = [text[len(text) - new :] for text, new in batch]
    return proposer.propose(sampled, np.array([len(text) for text, _ in batch]), known)


@pytest.mark.parametrize(("price", "length"), [(0.0, 8), (0.001, 8), (0.1, 2), (0.25, 1), (0.6, 0)])
def test_measured_costs_decide_from_the_first_step(make: Any, price: float, length: int) -> None:
    costs = {n: 0.03 * (1 + price * (n - 1)) for n in (1, 2, 4, 8, 16)}
    (draft,) = propose(make(False, costs), [([*range(30)] * 2, 1)])
    assert draft == list(range(length))


def test_without_measured_costs_the_first_step_is_for_comparison(make: Any) -> None:
    proposer = make()
    assert propose(proposer, [([1, 2, 3] * 20, 1)]) == [[]]
    assert propose(proposer, [([1, 2, 3] * 20 + [1], 1)]) != [[]]


class Unread:
    """Token ids that nobody may read."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("a text was read")


def test_no_text_is_read_while_drafting_is_off(make: Any) -> None:
    proposer = make(True, {1: 0.01, 64: 0.64})
    lengths = np.array([50, 60])
    for _ in range(80):  # until it is switched off
        lengths = lengths + 1
        known = np.ones((2, MAX_LENGTH), np.int32)
        proposer.propose([[1], [1]], lengths, known)
    assert not proposer._switches[2].on
    for _ in range(20):
        lengths = lengths + 1
        assert proposer.propose([[1], [1]], lengths, Unread()) == [[], []]


def test_steps_are_counted_by_decision(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, price, texts in (
        ("drafted", 0.0, [noise(i, 10) * 20 for i in range(6)]),
        ("no_draft_found", 0.0, [noise(i) for i in range(6)]),
        ("does_not_pay", 0.03, random_texts(6, 300)),
    ):
        engine = Engine(monkeypatch, base=0.03, price=price)
        proposer = make(False, engine.curve)
        engine.serve(proposer, texts, 1)
        found[name] = count = proposer._metrics
        assert count.decisions.most_common(1)[0][0] == name
        assert count.decisions.total() == engine.steps
        assert count.drafted >= engine.drafted  # the last drafts of a request are not verified
        assert count.accepted == engine.tokens - engine.steps
    assert found["does_not_pay"].decisions["probe"] > 0
    assert found["no_draft_found"].accepted == 0


def test_a_curve_that_is_too_flat_is_corrected_by_the_steps_observed() -> None:
    """Where draft tokens really cost five times what the start-up measured."""
    draw, base, slope = random.Random(0), 0.03, 1.2e-4
    cost = StepCost({n: base + slope * n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)})
    undrafted = base + 8 * slope
    for step in range(600):
        drafted = draw.choice((4, 8, 16, 24, 32, 40, 48)) if step % 20 else 0
        cost.add(8, 8 + drafted, (undrafted + 5 * slope * drafted) * draw.choice(SPREAD))
    for drafted in (4, 8, 16, 32):
        expected = 1 + 5 * slope * drafted / undrafted
        assert cost.ratio(8, 8 + drafted) == pytest.approx(expected, rel=0.08)


def test_switching_is_logged_with_its_reason(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer, now = make(False, {1: 0.01, 64: 0.64}), 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    with caplog.at_level(logging.INFO, "vllm.tide"):
        for length in range(50, 150):
            now += 0.01 * (1 + proposer._last.drafted)  # what the curve has it cost
            propose(proposer, [([1] * length, 1)])
    (line,) = caplog.messages
    assert "switched off for 1 to 1 requests" in line
    assert "the expected gain is 0.0 %" in line and "costs 2.00 steps" in line


def test_another_request_at_the_same_index_is_noticed(make: Any) -> None:
    proposer = make(True)
    propose(proposer, [([1, 2, 3, 4], 1), ([0, 5, 6, 7, 8], 1)])
    first, second = proposer._requests.values()
    propose(proposer, [([0, 5, 6, 7, 8, 9], 1)])  # the first has ended, the second has moved
    assert proposer._requests[0] is second
    assert second.tokens == [0, 5, 6, 7, 8, 9] and second.answer == [5, 6, 7, 8, 9]
    propose(proposer, [([0, 1, 2, 3, 4, 5, 6], 1)])  # another request of the expected length
    assert proposer._requests[0] is not second
    assert second.tokens == [0, 5, 6, 7, 8, 9] and first.tokens == [1, 2, 3, 4]


def test_requests_with_the_same_text_are_kept_apart(make: Any) -> None:
    proposer, text = make(True), [1, 2, 3, 4]
    for token in range(5, 15):
        text = [*text, token]
        propose(proposer, [(text, 1), (text, 1), (text, 1)])
        tracked = list(proposer._requests.values())
        assert [one.tokens for one in tracked] == [text] * 3
        assert len({id(one) for one in tracked}) == 3

    second = proposer._requests[1]
    propose(proposer, [([9, 9, 9], 1), ([*text, 15], 1), ([*text, 15], 1)])
    propose(proposer, [([*text, 15, 16], 1), ([*text, 15, 16], 1)])  # the last is now the first
    assert proposer._requests[1] is second


def test_prompts_are_not_kept(make: Any) -> None:
    proposer = make(True)
    propose(proposer, [([*range(100, 150), 1], 1)])
    kept = [place.text for places in proposer._cross_request._new.values() for place in places]
    assert kept == [[147, 148, 149, 1]] * 3


def test_a_request_that_reads_its_prompt_or_is_full_gets_no_draft(make: Any) -> None:
    proposer, text = make(False), [1, 2, 3] * 20
    for _ in range(3):
        text = [*text, *text[-3:]]
        drafts = propose(proposer, [(text, 3)])
    assert drafts != [[]]
    text = [*text, *text[-3:]]
    assert propose(proposer, [(text, 3), ([4, 5, 4, 5], 0)])[1] == []
    full = [1, 2, 3] * (MAX_LENGTH // 3)
    assert propose(proposer, [(full[: MAX_LENGTH - 1], 3)]) == [[]]


def test_another_text_after_an_unread_stretch_is_noticed(make: Any) -> None:
    proposer, text = make(True), [*range(20)]
    propose(proposer, [(text, 1)])
    first = proposer._requests[0]
    text = [*text, *range(20, 30)]
    propose(proposer, [(text, 1)])  # nine steps were not looked at
    assert proposer._requests[0] is first and first.tokens == text
    # What came meanwhile may be the prompt of a request that continues this one.
    assert first.answer == [26, 27, 28, 29]
    propose(proposer, [([*text[:25], *range(50, 80)], 1)])
    assert proposer._requests[0] is not first


def test_the_gain_must_be_clear_to_switch_on_and_gone_to_switch_off() -> None:
    switch = DraftSwitch()
    for _ in range(100):
        assert switch.begin() and switch.decide(1.02) == "drafted"
    for _ in range(200):
        switch.begin()
        switch.decide(0.9)
    assert not switch.on
    for gain, on in ((1.02, False), (1.2, True)):
        for _ in range(2000):
            if switch.begin():
                switch.decide(gain)
        assert switch.on == on


def test_where_no_draft_is_found_they_are_looked_for_ever_more_rarely() -> None:
    switch = DraftSwitch()
    for _ in range(200):
        switch.begin()
        switch.decide(0.9)
    assert not switch.on
    looked = 0
    for _ in range(2000):
        if switch.begin():
            looked += 1
            switch.found_none()
    assert 2 <= looked <= 8


def test_looking_for_drafts_that_are_hardly_ever_found_is_given_up() -> None:
    for every, looking, on in ((50, 0.005, False), (10, 0.005, True), (50, 0.0, True)):
        switch, looked = DraftSwitch(), 0
        for step in range(3000):
            if switch.begin():
                looked += 1
                if step % every:
                    switch.found_none(looking)
                else:
                    switch.decide(1.2, looking)
        assert (looked == 3000) == on and (on or looked < 1000)


def test_what_does_not_pay_is_tried_ever_more_rarely() -> None:
    switch, tried = DraftSwitch(), []
    for step in range(1, 2100):
        if switch.begin() and switch.decide(0.5) == "probe":
            tried.append(step)
    assert tried == [4, 12, 28, 60, 124, 252, 508, 1020, 1532, 2044]


CURVE = {1: 0.025, 2: 0.026, 8: 0.03, 64: 0.1}


def ratio(cost: StepCost, requests: int, tokens: int) -> float:
    """Of a drafted step to one without drafts."""
    return float(cost.ratio(requests, tokens))


def test_costs_begin_with_the_curve() -> None:
    cost = StepCost(CURVE)
    assert cost.undrafted(1) == 0.025 and cost.undrafted(8) == 0.03
    assert ratio(cost, 1, 8) == pytest.approx(0.03 / 0.025)
    assert ratio(cost, 8, 64) == pytest.approx(0.1 / 0.03)
    assert ratio(cost, 8, 128) == pytest.approx((0.1 + 64 * 0.07 / 56) / 0.03)  # as before 64
    assert not cost.needs_undrafted(1)
    assert StepCost().needs_undrafted(1) and StepCost({1: 0.025}).needs_undrafted(1)


def test_a_fixed_cost_of_steps_shrinks_the_share_of_a_token() -> None:
    cost = StepCost(CURVE)
    for _ in range(20):
        cost.add(8, 8, 0.05)
    assert cost.undrafted(8) == pytest.approx(0.05)
    assert cost.undrafted(2) == pytest.approx(0.05 - 0.03 + 0.026)  # an unseen number of requests
    assert ratio(cost, 8, 64) == pytest.approx((0.05 + 0.07) / 0.05)


def test_drafted_steps_correct_the_curve_despite_noise() -> None:
    for measured in (True, False):
        draw, cost = random.Random(0), StepCost(CURVE if measured else None)
        for _ in range(1000):
            drafts = draw.choice((0, draw.randrange(1, 57)))
            seconds = 0.03 + (0.01 + 0.002 * drafts) * bool(drafts)  # more than the curve has
            cost.add(8, 8 + drafts, seconds * draw.choice(SPREAD))
        for drafts in (8, 28, 56):
            true = (0.04 + 0.002 * drafts) / 0.03
            assert ratio(cost, 8, 8 + drafts) == pytest.approx(true, rel=0.12)


def test_an_outlier_hardly_moves_a_cost() -> None:
    for tokens in (8, 64):
        cost = StepCost(CURVE)
        for _ in range(30):
            cost.add(8, 8, 0.03)
            cost.add(8, 64, 0.1)
        cost.add(8, tokens, 60.0)
        assert cost.undrafted(8) == pytest.approx(0.03, rel=0.04)
        assert ratio(cost, 8, 64) == pytest.approx(0.1 / 0.03, rel=0.1)


@pytest.mark.parametrize(("gain", "expected"), [
    (1.5, [8, 25, 58, 123, 252, 381]), (1.05, list(range(8, 500, 17))),
])  # fmt: skip
def test_a_step_without_drafts_is_due_after_some_with(gain: float, expected: list[int]) -> None:
    cost, due = StepCost(CURVE), []
    for step in range(500):
        due += [step] if (undrafted := cost.needs_undrafted(4, gain)) else []
        cost.add(4, 4 if undrafted else 12, 0.03)
    assert due == expected


def test_a_step_without_drafts_is_due_for_each_number_of_requests() -> None:
    cost = StepCost(CURVE)
    for step in range(60):
        cost.add(4, 12 if step % 20 else 4, 0.03)
        cost.add(5, 15, 0.03)
    assert cost.needs_undrafted(5) and not cost.needs_undrafted(6)


def test_a_stall_among_few_steps_without_drafts_hardly_moves_their_cost() -> None:
    cost = StepCost({32: 0.063, 64: 0.103})
    for seconds in (0.101, 0.097, 0.099, 0.242, 0.103):
        cost.add(32, 32, seconds)
    assert cost.undrafted(32) == pytest.approx(0.1, rel=0.03)


def test_beside_prompts_drafts_are_priced_as_what_comes_on_top() -> None:
    cost = StepCost({1: 1.0, 64: 1.0, 128: 2.0, 192: 3.0})  # free while a step waits for weights
    assert ratio(cost, 8, 24) == pytest.approx(1.0)
    for _ in range(31):
        cost.add_prompts(100)
        cost.add_prompts(0)
    assert ratio(cost, 8, 24) == pytest.approx(1 + 0.5 * 16 / 64, abs=0.01)
    for _ in range(31):
        cost.add_prompts(0)
    assert ratio(cost, 8, 24) == pytest.approx(1.0)


@pytest.mark.parametrize(("prompt", "microbatches"), [(0, 1), (100, 1), (100, 2)])
def test_where_steps_read_prompts_drafts_must_gain_more(
    make: Any, prompt: int, microbatches: int
) -> None:
    """Two requests repeat themselves; of a third, a prompt is read."""
    found = make(costs={1: 1.0, 64: 1.0, 65: 2.0, 128: 128.0})  # steep beyond 64 tokens
    known, ends = np.tile(np.array([5, 6, 7, 8] * 100, np.int32), (3, 1)), np.array([40, 40, 40])
    drafts: list[list[int]] = [[], [], []]
    tokens = 0
    for _ in range(20):
        new = [1 + len(draft) for draft in drafts[:2]]  # every draft is right
        ends = ends + np.array([*new, 0])
        slots = np.zeros((sum(new) + prompt) // microbatches)
        parts = [{"layers.0": slots, "layers.1": slots} for _ in range(microbatches)]
        drafts = found.propose([[5] * new[0], [5] * new[1], []], ends, known,
                               parts if microbatches > 1 else parts[0])  # fmt: skip
        tokens += sum(map(len, drafts))
    assert tokens > 100 if prompt == 0 else tokens < 20


def test_an_unseen_batch_size_is_priced_like_others() -> None:
    draw, cost = random.Random(0), StepCost()
    for _ in range(500):
        drafts = draw.choice((0, draw.randrange(1, 64)))
        cost.add(8, 8 + drafts, 0.033 + 0.001 * drafts)
    assert 1.1 < ratio(cost, 16, 32) < 1.6  # in fact 1.39; assumed 1.2
