"""Inputs that hurt: each works as `generate` does, raises what it raises, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from test_generate import GREEDY, engine
from tide.engine import TIDE
from tide.errors import NumericsError, SelfCheckError, UnsupportedGenerationError
from tiny import VOCABULARY, tiny_model

IDS = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
LONG = IDS.repeat(1, 15)  # 135 tokens; tiny models have 128 positions
NOTHING = torch.zeros_like(IDS)
EOS = torch.tensor([[5, 2, 2, 6, 2, 2]])
TWO = torch.cat([IDS, IDS.flip(1)])
SHORT = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}

llama, gpt2 = (partial(tiny_model, family) for family in ("llama", "gpt2"))
tied, untied = (partial(llama, tie_word_embeddings=tie) for tie in (True, False))


def small_head() -> Any:
    """Has embeddings of tokens that its head does not have."""
    model = untied()
    head = torch.nn.Linear(32, 80, bias=False)
    head.weight.data = model.lm_head.weight.data[:80].clone()
    model.lm_head = head
    return model


def broken(name: str, value: float = torch.nan) -> Any:
    """Has one weight that is no number."""
    model = untied()
    dict(model.named_parameters())[name].data.view(-1)[5] = value
    return model


NAN_HEAD = partial(broken, "lm_head.weight")
NAN_LAYER = partial(broken, "model.layers.3.mlp.up_proj.weight")

# Works as `generate` does.
WORKS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "no prompt": (llama, {}),
    "one token": (llama, {"inputs": IDS[:, :1]}),
    "one token, learned positions": (gpt2, {"inputs": IDS[:, :1]}),
    "one token beside nine": (
        llama,
        {"inputs": TWO, "attention_mask": torch.tensor([[1] * 9, [0] * 8 + [1]])},
    ),
    "prompt at the limit": (gpt2, {"inputs": LONG[:, :128], "max_new_tokens": 1}),
    "up to the limit": (gpt2, {"inputs": LONG[:, :120], "max_new_tokens": 9, "eos_token_id": None}),
    "beyond the limit, which is none": (llama, {"inputs": LONG}),
    "repeated EOS": (llama, {"inputs": EOS}),
    "repeated EOS that pads": (llama, {"inputs": EOS, "pad_token_id": 2}),
    "EOS in front, which pads": (llama, {"inputs": EOS.flip(1), "pad_token_id": 2}),
    "every token ends": (llama, {"inputs": TWO, "eos_token_id": list(range(VOCABULARY))}),
    "EOS out of range": (llama, {"inputs": TWO, "eos_token_id": [500]}),
    "padding out of range": (llama, {"inputs": TWO, "pad_token_id": 500, "eos_token_id": None}),
    "negative padding": (llama, {"inputs": TWO, "pad_token_id": -1, "eos_token_id": None}),
    "vocabulary larger than the head": (small_head, {"inputs": IDS}),
    "prompt beyond the head": (small_head, {"inputs": IDS % 10 + 85}),
    "tied head": (tied, {"inputs": IDS}),
    "untied head": (untied, {"inputs": IDS}),
    "NaN in the head": (NAN_HEAD, {"inputs": TWO}),
    "NaN in a layer": (NAN_LAYER, {"inputs": TWO}),
    "ids in 32 bits": (llama, {"inputs": IDS.int()}),
    "a mask of bools": (llama, {"inputs": IDS, "attention_mask": torch.ones_like(IDS).bool()}),
    "a mask of floats": (llama, {"inputs": IDS, "attention_mask": torch.ones(1, 9)}),
}

# `generate` raises this, and so do we.
FAILS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception]]] = {
    "id after the last": (llama, {"inputs": torch.tensor([[5, VOCABULARY, 6]])}, IndexError),
    "negative id": (llama, {"inputs": torch.tensor([[5, -1, 6]])}, IndexError),
    "huge id": (llama, {"inputs": torch.tensor([[5, 2**40, 6]])}, IndexError),
    "beyond the limit": (gpt2, {"inputs": LONG[:, :127], "max_new_tokens": 5}, IndexError),
    "no room": (llama, {"inputs": IDS, "max_length": 9, "max_new_tokens": None}, ValueError),
    "no new token": (llama, {"inputs": IDS, "max_new_tokens": 0}, ValueError),
    "a mask for each pair": (
        llama,
        {"inputs": IDS, "attention_mask": torch.ones(1, 1, 9, 9)},
        ValueError,
    ),
}

# Refused, in words.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"inputs": IDS[:, :0]}, "Sequence 0 has no token that is not padding"),
    "all padding": ({"inputs": NOTHING, "attention_mask": NOTHING}, "Sequence 0 has no token"),
    "all padding in a batch": (
        {"inputs": TWO, "attention_mask": torch.cat([NOTHING + 1, NOTHING])},
        "Sequence 1 has no token",
    ),
    "padding by its id": ({"inputs": torch.cat([IDS, NOTHING])}, "Sequence 1 has no token"),
    "no sequence": ({"inputs": IDS[:0]}, r"shape \[0, 9\].*at least one sequence"),
    "three dimensions": ({"inputs": IDS[None]}, r"shape \[1, 1, 9\].*\[sequences, tokens\]"),
    "ids that are floats": ({"inputs": IDS.float()}, "torch.float32.*whole numbers"),
    "a hole": (
        {"inputs": IDS, "attention_mask": torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1]])},
        "not padded on the left",
    ),
    "a mask that is too short": (
        {"inputs": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])},
        r"attention_mask has shape \[1, 7\].*\[1, 9\]",
    ),
}


@cache  # the first call of an engine measures what passes cost
def model_and_engines(make: Callable[[], Any]) -> tuple[Any, dict[str, TIDE]]:
    model = make()
    return model, engines(model)


def engines(model: Any) -> dict[str, TIDE]:
    return {
        "off": engine(model, "off"),
        "chains": engine(model, "lossless", "random", fixed_drafts=True, max_tree=0),
        "trees": engine(model, "lossless", "random", fixed_drafts=True),
    }


@pytest.mark.parametrize("name", WORKS)
def test_works_as_generate(name: str) -> None:
    make, given = WORKS[name]
    (model, made), given = model_and_engines(make), {**SHORT, **given}
    expected: Tensor = model.generate(**given)
    for of, tide in made.items():
        found = tide.generate(**given)
        assert torch.equal(found, expected) and found.dtype == expected.dtype, of


@pytest.mark.parametrize("name", FAILS)
def test_raises_what_generate_raises(name: str) -> None:
    make, given, error = FAILS[name]
    (model, made), given = model_and_engines(make), {**SHORT, **given}
    with pytest.raises(error):
        model.generate(**given)
    expected = model.generate(IDS, **SHORT)
    for tide in made.values():
        with pytest.raises(error):
            tide.generate(**given)
        assert torch.equal(tide.generate(IDS, **SHORT), expected)  # and is usable afterwards


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    given, message = REFUSED[name]
    model, made = model_and_engines(llama)
    expected = model.generate(IDS, **SHORT)
    for tide in made.values():
        with pytest.raises(UnsupportedGenerationError, match=message):
            tide.generate(**{**SHORT, **given})
        assert torch.equal(tide.generate(IDS, **SHORT), expected)


@pytest.mark.parametrize("make", [NAN_HEAD, NAN_LAYER], ids=["head", "layer"])
def test_weights_that_are_no_numbers_fail_the_self_check(make: Callable[[], Any]) -> None:
    with pytest.raises(SelfCheckError, match="nan"):
        TIDE(make())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_is_drawn_from_what_are_no_probabilities(value: float) -> None:
    """Overflow may come after the self-check."""
    model = untied()
    made = engines(model) | {"exit": engine(model, "exit", "never")}
    model.lm_head.weight.data[5] = value
    options = {**SHORT, "do_sample": True, "inputs": TWO}
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**options)
    for tide in made.values():
        with pytest.raises(NumericsError, match=r"after token 8 of sequence 0.*overflow"):
            tide.generate(**options)


def test_ids_of_another_vocabulary_do_not_reach_what_engines_remember() -> None:
    """What one call drafted from must not break the next, whose ids are all in range."""
    model = llama()
    tide = engine(model, "lossless", fixed_drafts=True)
    for wrong in (VOCABULARY, -1):
        with pytest.raises(IndexError):
            tide.generate(torch.tensor([[*IDS[0, :4], wrong, *IDS[0, :4]]]), **GREEDY)
        assert torch.equal(tide.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
