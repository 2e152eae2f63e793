"""Combinations of generation options, drawn by hypothesis: all give what `generate` gives.

TIDE_TEST_SWEEP=1 pytest tests/test_options.py    # 250 of them
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from test_engine import Recorder
from test_generate import engine, prompts
from tide.decode.session import FullDepthWarning
from tide.engine import TIDE
from tiny import VOCABULARY, tiny_model, tiny_tokenizer

EXAMPLES = 250 if os.environ.get("TIDE_TEST_SWEEP") else 25

token = st.integers(3, VOCABULARY - 1)
some_tokens = st.lists(token, min_size=1, max_size=4, unique=True)

# Options of all kinds of decoding; each is given or not.
ANY: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.7, 1.6),
    "no_repeat_ngram_size": st.integers(1, 4),
    "min_new_tokens": st.integers(0, 20),
    "min_length": st.integers(0, 20),
    "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=3),
    "suppress_tokens": some_tokens,
    "begin_suppress_tokens": some_tokens,
    "forced_bos_token_id": token,
    "forced_eos_token_id": token,
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 8), st.floats(0.8, 1.5)),
    "sequence_bias": st.lists(
        st.tuples(
            st.lists(token, min_size=1, max_size=3), st.floats(-5, 5).filter(bool)
        ).map(list), min_size=1, max_size=3, unique_by=lambda pair: tuple(pair[0]),
    ),
    "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(),
    "eos_token_id": st.one_of(some_tokens, token),
    "stop_strings": st.lists(
        st.text([chr(33 + i) for i in range(94)], min_size=1, max_size=2), min_size=1, max_size=3
    ),
    "use_cache": st.booleans(),
    "return_dict_in_generate": st.booleans(),
}  # fmt: skip
# Options of sampling alone.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.3, 2.5),
    "top_k": st.integers(0, VOCABULARY + 5),
    "top_p": st.floats(0.1, 1.0),
    "min_p": st.floats(0.0, 0.5),
    "typical_p": st.floats(0.2, 1.0, exclude_max=True),
    "epsilon_cutoff": st.floats(1e-4, 0.1),
    "eta_cutoff": st.floats(1e-4, 0.1),
    "top_h": st.floats(0.1, 1.0),
    "num_return_sequences": st.integers(1, 3),
}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `generate`: up to six options beside those that are always there."""
    sample = draw(st.booleans())
    kinds = ANY | SAMPLING if sample else ANY
    names = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=6, unique=True))
    given: dict[str, Any] = {name: draw(kinds[name], label=name) for name in names}
    new = draw(st.integers(1, 24))
    longest = {"max_new_tokens": new} if draw(st.booleans()) else {"max_length": 9 + new}
    return {**prompts(draw(st.integers(1, 3))), "pad_token_id": 0, "do_sample": sample, **longest,
            **given}  # fmt: skip


@cache  # they remember drafts from call to call, as in use
def model_and_engines() -> tuple[Any, dict[str, TIDE]]:
    model = tiny_model("llama")
    return model, {
        "off": engine(model, "off"),
        "chains": engine(model, "lossless", "always", fixed_drafts=True, max_tree=0, max_pending=4),
        "trees": engine(model, "lossless", "random", fixed_drafts=True),
        "as it pays": engine(model, "lossless", "random"),
    }


def outcome(generate: Any, call: dict[str, Any]) -> Any:
    """Tokens, what a streamer is shown, and where torch's generator is left; or the error."""
    streamer = Recorder() if len(call["input_ids"]) == 1 else None
    if call.get("num_return_sequences", 1) > 1:
        streamer = None
    if "stop_strings" in call:
        call = {**call, "tokenizer": tiny_tokenizer()}
    torch.manual_seed(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FullDepthWarning)
            found = generate(**call, streamer=streamer)
    except (ValueError, RuntimeError) as error:
        return type(error).__mro__[-3].__name__  # as the builtin error that it is
    if call.get("return_dict_in_generate"):
        found = found.sequences
    shown = streamer and (streamer.pieces, streamer.ended)
    return found.tolist(), shown, float(torch.rand(1))


@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(call=calls())
def test_any_options_give_what_generate_gives(call: dict[str, Any]) -> None:
    model, made = model_and_engines()
    expected = outcome(model.generate, call)
    for name, tide in made.items():
        assert outcome(tide.generate, call) == expected, name


@pytest.mark.parametrize("name", sorted(ANY | SAMPLING))
def test_every_option_is_one_of_generate(name: str) -> None:
    """Hypothesis would not notice an option that is ignored."""
    assert hasattr(model_and_engines()[0].generation_config, name)
