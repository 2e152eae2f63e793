"""The texts that gates see in vLLM, by KV cache slot."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")

from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.vllm.history import History
from tide.vllm.metadata import Requests

BLOCK = 4
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


def requests(text: list[int], new: int, blocks: list[int]) -> Requests:
    """One request; the last `new` tokens of its text are in the pass."""
    positions = torch.arange(len(text) - new, len(text))
    slots = torch.tensor(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    return Requests(
        starts=torch.tensor([0, new]), lengths=torch.tensor([len(text)]),
        blocks=torch.tensor([blocks], dtype=torch.int32), slots=slots, block=BLOCK,
        tokens=new,
    )  # fmt: skip


def predicted(history: History, text: list[int], new: int, blocks: list[int]) -> NGramPrediction:
    """What a pass predicts, asked twice, as by two gates."""
    of = requests(text, new, blocks)
    history.write(of, torch.tensor(text[-new:]))
    found = history.predict(of, 0)
    assert history.predict(of, 0) == found
    return found


def from_the_start(text: list[int]) -> NGramPrediction:
    return NGramPredictor(None).at(text, len(text) - 1, len(text))


def test_predictions_are_those_of_the_whole_text() -> None:
    history, text = History(None), [5, 6, 7, 8, 5, 6, 7]
    assert predicted(history, text, 7, [3, 1, 2, 9]) == from_the_start(text)
    for token in (8, 5, 6, 7, 9, 5, 6):  # into blocks that follow
        text = [*text, token]
        assert predicted(history, text, 1, [3, 1, 2, 9]) == from_the_start(text)
    assert len(history._texts) == 1
    # Another request in the same blocks, as long as the first.
    other = [1, 2, 3, 1, 2, 9, 9, 1, 2, 3, 9, 9, 1, 2]
    assert predicted(history, other, len(other), [3, 1, 2, 9]) == from_the_start(other)
    assert len(history._texts) == 1


def test_only_some_requests_are_kept() -> None:
    history = History(None, max_requests=2)
    for block in range(5):
        predicted(history, [1, 2, 1], 3, [block])
    assert len(history._texts) == 2
