"""The proposer for vLLM, on a simulated engine with its own clock: no vLLM needed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tide.vllm import proposer as module
from tide.vllm.proposer import TableProposer, _DraftToken
from tide.vllm.settings import Settings
from tide.vllm.stepcost import StepCost

MAX_LENGTH = 400


class Engine:
    """Serves given texts, `batch` at once.

    A step costs `base + price * tokens` on its clock, and `more` if it has drafts.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, base: float, price: float, more: float = 0.0
    ) -> None:
        self.base, self.price, self.more, self.now = base, price, more, 0.0
        self.steps = self.tokens = self.drafted = 0
        self.noise = random.Random(0)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def serve(self, proposer: TableProposer, texts: list[list[int]], batch: int) -> None:
        """Serve texts: each is a prompt of four tokens and the answer of the model."""
        waiting = [list(text) for text in texts]
        running: list[list[int]] = []
        done: list[int] = []  # known tokens of each
        drafts: list[list[int]] = []
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
            self.now += cost * self.noise.choice((0.8, 0.9, 1, 1, 1, 1.1, 3))
            known = np.zeros((len(running), MAX_LENGTH), np.int32)
            for n, text in enumerate(running):
                known[n, : len(text)] = text
            drafts = proposer.propose(sampled, np.array(done), known)
            assert max(map(len, drafts)) <= 8
            ended = [n for n, text in enumerate(running) if done[n] + 9 >= len(text)]
            for n in reversed(ended):
                del running[n], done[n], drafts[n]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a proposer without a table, with cross-request drafts or without."""
    monkeypatch.setattr(module.Artifact, "from_pretrained", lambda _: SimpleNamespace(table=None))
    monkeypatch.setattr(module, "require_model", lambda *_: None)

    def made(cross_request: bool) -> TableProposer:
        settings = Settings(
            artifact=str(tmp_path), mode="lossless", cross_request_drafts=cross_request
        )
        monkeypatch.setattr(Settings, "read", lambda _: settings)
        return TableProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=8),
                model_config=SimpleNamespace(max_model_len=MAX_LENGTH),
            )
        )

    return made


def noise(seed: int, length: int = 120) -> list[int]:
    """Tokens that do not repeat, within a seed or across seeds."""
    return [1000 * seed + i for i in range(length)]


def test_a_text_that_repeats_itself_is_served_faster(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(monkeypatch, base=0.026, price=0.0004)
    engine.serve(make(False), [noise(i, 20) * 8 for i in range(6)], 1)
    assert engine.tokens / engine.steps > 3


def test_rejected_drafts_cost_next_to_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    texts = [[generator.randrange(12) for _ in range(120)] for _ in range(64)]
    took = []
    for proposer in (make(True), SimpleNamespace(propose=lambda s, n, t: [[] for _ in s])):
        engine = Engine(monkeypatch, base=0.03, price=0.004)  # drafts are expensive here
        engine.serve(proposer, texts, 8)
        took.append(engine.now / engine.tokens)
    assert took[0] < 1.04 * took[1]


def test_drafting_stops_where_its_fixed_cost_exceeds_the_gain(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[*noise(i, 12), *noise(i, 4), *noise(100 + i, 8)] * 5 for i in range(64)]
    took = []
    for proposer in (make(False), SimpleNamespace(propose=lambda s, n, t: [[] for _ in s])):
        engine = Engine(monkeypatch, base=0.03, price=0.0, more=0.3)
        engine.serve(proposer, texts, 8)
        took.append(engine.now / engine.tokens)
    assert took[0] < 1.4 * took[1]  # drafts would pay without the fixed cost


def test_the_choice_not_in_use_is_tried_now_and_then(make: Any) -> None:
    def steps_with_drafts(seconds: float) -> list[int]:
        proposer = make(False)
        proposer._cost.add(1, 1, 0.03)
        proposer._cost.add(1, 9, seconds)
        found = []
        for proposer._steps in range(256):
            if proposer._lengths(1, [_DraftToken(0.9, 0, 1), _DraftToken(0.8, 0, 2)]):
                found.append(proposer._steps)
        return found

    assert steps_with_drafts(1.0) == [32, 96, 160, 224]  # too expensive
    assert set(range(256)) - set(steps_with_drafts(0.03)) == {0, 64, 128, 192}


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
    kept = [answer for answer, _ in proposer._cross_request._new.values()]
    assert kept == [[147, 148, 149, 1]]


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


PRICES = {1: 0.0004, 8: 0.0005, 32: 0.0009}  # seconds of a token, by requests


def test_the_price_of_a_token_is_found_despite_noise() -> None:
    draw, cost = random.Random(0), StepCost()
    for _ in range(3000):
        requests = draw.choice(list(PRICES))
        tokens = requests + 1 + draw.randrange(8 * requests)
        seconds = 0.025 + PRICES[requests] * tokens
        cost.add(requests, tokens, seconds * draw.choice((0.8, 0.9, 1, 1, 1, 1.1, 5)))
    for requests, price in PRICES.items():
        base, found = cost.line(requests) or (0.0, 0.0)
        if requests > 1:  # in steps of one request, noise hides the price
            assert 0.6 < found / price < 1.6
        middle = 4.5 * requests
        assert 0.8 < (base + found * middle) / (0.025 + price * middle) < 1.5


def test_a_token_has_a_price_before_anything_is_known() -> None:
    cost = StepCost()
    assert cost.line(8) is None
    cost.add(8, 9, 0.04)
    base, price = cost.line(8) or (0.0, 0.0)
    assert price == pytest.approx(0.015 * base)
    assert base + 9 * price == pytest.approx(0.04)
    cost.add(256, 257, 0.1)
    assert (cost.line(256) or (0.0, 0.0))[0] > 0


def test_a_step_without_drafts_is_no_point_of_the_line() -> None:
    cost = StepCost()
    for tokens in range(9, 40):
        cost.add(8, tokens, 0.03 + 0.0005 * tokens)
    line = cost.line(8)
    for _ in range(20):
        cost.add(8, 8, 0.02)
    assert cost.line(8) == line
    assert cost.undrafted(8) == pytest.approx(0.02)
    assert cost.undrafted(9) is None


def test_an_unseen_batch_size_is_priced_like_others() -> None:
    draw, cost = random.Random(0), StepCost()
    for _ in range(500):
        tokens = 9 + draw.randrange(64)
        cost.add(8, tokens, 0.025 + 0.001 * tokens)
    before = cost.line(9)
    cost.add(9, 10, 0.025 + 0.001 * 10)
    after = cost.line(9)
    assert before and after
    assert 0.0005 < after[1] < 0.002  # not the assumed 0.0004
