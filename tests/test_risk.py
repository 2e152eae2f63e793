"""A certified risk: which calls its certificate covers, and what an audit costs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor, SuppressTokensLogitsProcessor

import tide
from test_certify import certificate
from test_generate import GREEDY, NEW, artifact, engine, prompts
from tide.certification import own_processors
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ArtifactError, CertificateError
from tide.exits.artifact import Artifact
from tide.exits.thresholds import Thresholds
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.risk import UncertifiedWarning, describe_processors, warn_if_uncovered
from tiny import tiny_model

CONFIG = TIDEConfig(exit_threshold=None, min_layers=0)
COVERED = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def made(model: Any) -> Artifact:
    """Certified for greedy answers of at most NEW tokens."""
    made = artifact()
    made.fingerprint = fingerprint(model, locate(model))
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=0.04)
    made.certificates = [
        certificate(
            made, threshold_scale=1.0, thresholds=made.thresholds(1.0, 0), generation=COVERED
        )
    ]
    return made


def test_a_risk_is_not_served_on_another_model(model: Any, made: Artifact) -> None:
    other = tiny_model("llama", seed=1)
    with pytest.raises(ArtifactError, match="allow_mismatch=True"):
        TIDE(other, made, CONFIG, risk=0.02, check=False)
    for config in (CONFIG, None):
        with pytest.raises(CertificateError, match=r"one that is for another model.*tide certify"):
            TIDE(other, made, config, risk=0.02, allow_mismatch=True, check=False)
    # Without a risk the exits may be tried there, and with one on the model itself.
    TIDE(other, made, CONFIG, allow_mismatch=True, check=False)
    served = TIDE(model, made, CONFIG, risk=0.02, allow_mismatch=True, check=False)
    assert served.certificate == made.certificates[0]


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"do_sample": True}, ["do_sample=True, and certificates are for greedy decoding"]),
        ({"max_new_tokens": NEW + 1}, [f"up to {NEW + 1} new tokens, and it is for at most {NEW}"]),
        ({"max_new_tokens": 30, "do_sample": True}, ["do_sample=True", "up to 30 new tokens"]),
    ],
)
@pytest.mark.parametrize("way", ["engine", "decoder"])
def test_a_call_outside_of_the_certified_conditions_warns(
    model: Any, made: Artifact, way: str, options: dict[str, Any], reasons: list[str]
) -> None:
    served: dict[str, Any] = {"config": CONFIG, "risk": 0.02, "on_drift": lambda monitor: None}
    if way == "engine":
        generate = TIDE(model, made, check=False, **served).generate
    else:
        loop = tide.decoder(made, check=False, **served)

        def generate(**kwargs: Any) -> Any:
            return model.generate(**kwargs, custom_generate=loop)

    with pytest.warns(UncertifiedWarning, match="does not cover this call") as caught:
        generate(**prompts(2), **{**GREEDY, **options})
    (text,) = [str(w.message) for w in caught if w.category is UncertifiedWarning]
    for reason in reasons:
        assert reason in text
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedWarning)
        generate(**prompts(2), **GREEDY)
        generate(**prompts(2), **{**GREEDY, "max_new_tokens": 3})


def test_autocast_is_another_dtype(model: Any, made: Artifact) -> None:
    served = TIDE(model, made, CONFIG, risk=0.02, on_drift=lambda monitor: None, check=False)
    cast = "autocast to bfloat16, and it is for float32"
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UncertifiedWarning, match=cast):
        served.generate(**prompts(2), **GREEDY)


@pytest.mark.parametrize(
    ("strategy", "told"), [("deferred", "still counts it"), ("propagate", "cannot check it")]
)
def test_what_the_monitor_cannot_check_is_told(
    model: Any, made: Artifact, strategy: str, told: str
) -> None:
    made.certificates = [replace(made.certificates[0], kv_cache_strategy=strategy)]
    config = CONFIG.with_(kv_cache_strategy=strategy)
    served = TIDE(model, made, config, risk=0.02, on_drift=lambda monitor: None, check=False)
    with pytest.warns(UncertifiedWarning, match=told):
        served.generate(**prompts(2), **{**GREEDY, "do_sample": True})


def test_logits_processors_must_be_those_of_the_certificate(model: Any, made: Artifact) -> None:
    served = TIDE(model, made, CONFIG, risk=0.02, on_drift=lambda monitor: None, check=False)
    penalty = "RepetitionPenaltyLogitsProcessor(penalty=1.3)"
    with pytest.warns(UncertifiedWarning) as caught:
        served.generate(**prompts(2), **GREEDY, repetition_penalty=1.3)
    (text,) = [str(w.message) for w in caught if w.category is UncertifiedWarning]
    assert f"this call: {penalty}, and it is for no logits processors." in text
    covered = {**COVERED, "logits_processors": [penalty]}
    made.certificates = [replace(made.certificates[0], generation=covered)]
    served = TIDE(model, made, CONFIG, risk=0.02, on_drift=lambda monitor: None, check=False)
    for other in ({"repetition_penalty": 1.2}, {}):
        with pytest.warns(UncertifiedWarning, match="and it is for RepetitionPenaltyLogits"):
            served.generate(**prompts(2), **GREEDY, **other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedWarning)
        served.generate(**prompts(2), **GREEDY, repetition_penalty=1.3)
        # At full depth no token exits, so there is nothing to certify.
        served.circuit_breaker.tripped = True  # type: ignore[union-attr]
        served.generate(**prompts(2), **GREEDY)


def test_processors_that_follow_lengths_are_the_same_for_every_prompt() -> None:
    model = tiny_model("llama")
    assert own_processors(model, NEW) == []
    model.generation_config.update(repetition_penalty=1.3, min_new_tokens=4)
    own, seen = own_processors(model, NEW), []
    assert [text.partition("(")[0] for text in own] == [
        "RepetitionPenaltyLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
    ]

    def loop(model: Any, input_ids: Any, logits_processor: Any, **_: Any) -> Any:
        seen.append(describe_processors(logits_processor))
        return input_ids

    model.generate(**prompts(2), **GREEDY, custom_generate=loop)
    assert seen == [own]


def test_processors_that_differ_in_lists_are_told_apart() -> None:
    def described(*tokens: int, calls: int = 0) -> list[str]:
        made = SuppressTokensLogitsProcessor(list(tokens))
        bias = SequenceBiasLogitsProcessor({(token,): 1.0 for token in tokens})
        for _ in range(calls):
            bias(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 97))
        return describe_processors([made, bias])

    assert described(5) == described(5, calls=2) != described(6)
    assert described(*range(3, 60)) != described(5)


def test_a_certificate_for_sampling_covers_sampling(made: Artifact) -> None:
    sampled = certificate(made, generation={"do_sample": True, "max_new_tokens": 8})
    unlimited = certificate(made, generation={})

    def call(*, sample: bool, new: int, prompt: int = 4) -> Any:
        return SimpleNamespace(
            input_ids=torch.zeros(1, prompt), logits_processor=[], max_length=prompt + new,
            generation_config=SimpleNamespace(do_sample=sample),
        )  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("error", UncertifiedWarning)
        warn_if_uncovered(sampled, call(sample=True, new=8))
        warn_if_uncovered(unlimited, call(sample=False, new=10_000))
    with pytest.warns(UncertifiedWarning, match="at most 8"):
        warn_if_uncovered(sampled, call(sample=True, new=9))
    short = certificate(made, generation={"max_prompt": 16})
    with pytest.warns(UncertifiedWarning, match="17 tokens of a prompt, and it is for at most 16"):
        warn_if_uncovered(short, call(sample=False, new=1, prompt=17))


def test_an_audit_reads_few_positions_at_once() -> None:
    """Logits of a whole sequence would take gigabytes: 8.4 at 32,000 tokens of 128,000 each."""
    model = tiny_model("llama", max_position_embeddings=1024)
    tide = engine(model, "exit", "always", kv_cache_strategy="propagate")
    tide.audit_rate = 1.0
    options = {**GREEDY, "eos_token_id": None, "max_new_tokens": 300}
    read: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, states: read.append(states[0].numel() // 32))
    output = tide.generate(**prompts(1), **options)
    # Exit heads read the weights themselves.
    assert max(read) == 256 and sum(read) >= 299
    # The audit is the same as in one piece.
    with torch.no_grad():
        targets = model(output).logits[0, 8:-1].argmax(-1)
    assert tide.last_stats.target_tokens == [targets.tolist()]
    share = (targets != output[0, 9:]).double().mean()
    assert tide.last_stats.losses == [pytest.approx(float(share))]
    assert tide.last_stats.audited == tide.last_stats.exited_tokens > 0
    assert tide.last_stats.disagreement is not None
    assert tide.runner.counts.tokens[0] == 9 + 299  # an audit is not counted as decoding
