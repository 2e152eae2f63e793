"""The foundation on real weights: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tide
from scenarios import SCENARIOS, error, full_depth
from tide.models.depth import DepthRunner
from tide.models.fingerprint import fingerprint

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("smollm2")]

TEXT = "Once upon a time, in a small town by the sea, there lived a clockmaker who"


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(smollm2_path: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    words = tokenizer(TEXT, return_tensors="pt").input_ids[:, :12]
    return torch.cat([words, words.flip(1)])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equals_full_forward(model: Any, ids: torch.Tensor, scenario: str) -> None:
    runner = DepthRunner(model)
    with runner:
        outcome = SCENARIOS[scenario](runner, ids)
    for row, got in outcome:
        assert error(got, full_depth(model, runner, row)[-len(got) :]) <= 1e-5


@torch.no_grad()
def test_decodes_what_the_model_decodes(model: Any, ids: torch.Tensor) -> None:
    prompt = ids[:1]
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False)[0]
    with tide.attach(model) as runner:
        cache, new, tokens = runner.new_cache(1), prompt, list(prompt[0])
        for _ in range(16):
            hidden = runner.run(new, 0, runner.n_layers, cache=cache)
            new = runner.logits(hidden[:, -1:]).argmax(-1)
            tokens.append(new[0, 0])
    assert torch.stack(tokens).tolist() == expected.tolist()
    assert runner.counts.calls == [16] * 30
    assert runner.counts.tokens == [prompt.shape[1] + 15] * 30


def test_fingerprint_does_not_depend_on_the_dtype(model: Any, smollm2_path: Path) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16)
    here, there = tide.attach(model, check=False), tide.attach(rounded)
    assert fingerprint(model, here.parts) == fingerprint(rounded, there.parts)
