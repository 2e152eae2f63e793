"""Long contexts: no logits of whole texts, and no mask of a whole text by a whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_context import VOCABULARY, Largest, long_model, methods, prompt

from tide.decode import prefill

LENGTH = 600
MOST = 65  # tokens of a sequence in one pass: a draft tree, or a draft and those that wait
READ = 256  # tokens of prompts whose predictions are recycled
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model(1024)


@pytest.mark.parametrize("mode", ["off", "lossless", "exit"])
def test_tensors_do_not_grow_with_the_square_of_the_context(mode: str, model: Any) -> None:
    run = methods(model)[mode]
    with Largest(model, LENGTH) as largest:
        run(prompt(LENGTH), **OPTIONS)
    assert 0 < largest.logits <= (READ if mode == "lossless" else MOST)
    assert largest.mask <= MOST * (LENGTH + MOST)


@pytest.mark.parametrize("mode", ["lossless", "exit"])
def test_padded_prompts_run_in_chunks_of_a_bounded_mask(
    mode: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_MASK", 1 << 15)
    # Chains, whose passes are short, so that the largest mask is that of a chunk.
    run, ids = methods(model, max_tree=0)[mode], prompt(LENGTH).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, : LENGTH // 3] = 0
    with Largest(model, LENGTH) as largest:
        found = run(ids, attention_mask=mask, **OPTIONS)
    assert largest.logits <= MOST and 0 < largest.mask <= 1 << 15
    if mode == "lossless":
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **OPTIONS))


def test_large_tensors_are_seen(model: Any) -> None:
    with Largest(model, LENGTH) as largest, torch.no_grad():
        model(prompt(LENGTH))
        torch.ones(LENGTH, LENGTH).tril()
    assert largest.logits == LENGTH and largest.mask == LENGTH**2
    assert model.config.vocab_size == VOCABULARY
