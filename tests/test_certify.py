"""A risk is served only with a certificate that covers it, and is watched while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tide
from test_calibrate import run, texts
from test_generate import GREEDY, WrongHead, artifact, prompts
from tide.calibration.data import split_documents
from tide.certify import certify, noise_floor
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import CertificateError, ConfigError, DataError
from tide.exits.artifact import Artifact
from tide.exits.certificate import Certificate
from tide.exits.policy import Gate, ScriptedPolicy
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.watch import DriftWarning, Guard, Watch
from tiny import tiny_model, tiny_tokenizer

ALWAYS = ScriptedPolicy(lambda place, checkpoint: True)


def certificate(made: Artifact, **changes: Any) -> Certificate:
    usual: dict[str, Any] = {
        "risk": 0.02, "delta": 0.05, "boldness": 0.5, "thresholds": made.thresholds(0.5, 0),
        "sequences": 300, "estimate": 0.01, "p_value": 0.01, "test": "betting", "loss": "tokens",
        "model": made.fingerprint.to_dict(), "exits": made.exits, "min_layers": 0,
        "dtype": "float32", "kv_cache_strategy": "deferred", "batch": 1, "generation": {},
        "data": "d", "tide": "0",
    }  # fmt: skip
    return Certificate(**{**usual, **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def made(model: Any) -> Artifact:
    out = artifact()
    for checkpoint in out.checkpoints:
        checkpoint.gate = Gate(top_probability=0.6)
    return out


def serve(model: Any, made: Artifact, **options: Any) -> TIDE:
    config = TIDEConfig(exit_threshold=None, min_layers=0)
    options = {"config": config, "allow_mismatch": True, "check": False, **options}
    return TIDE(model, made, **options)


def test_a_risk_needs_a_certificate_that_covers_it(model: Any, made: Artifact) -> None:
    with pytest.raises(CertificateError, match=r"No certificate covers risk 0.02.*`tide certify"):
        serve(model, made, risk=0.02)
    for changes, words in (
        ({"risk": 0.05}, "is for risk 0.05"),
        ({"delta": 0.1}, "is for delta 0.1"),
        ({"dtype": "bfloat16"}, "is for dtype bfloat16"),
        ({"kv_cache_strategy": "propagate"}, "is for kv_cache_strategy propagate"),
        ({"exits": "others"}, "is for other exits"),
        ({"min_layers": 3, "thresholds": made.thresholds(1.0, 3)}, "is for min_layers 3"),
    ):
        made.certificates = [certificate(made, **changes)]
        with pytest.raises(CertificateError, match=words):
            serve(model, made, risk=0.02)
    made.certificates = [certificate(made, risk=0.01), certificate(made, boldness=2.0)]
    engine = serve(model, made, risk=0.02)
    assert engine.certificate == made.certificates[1]
    assert serve(model, made, risk=0.015).boldness == 0.5
    gates = engine._exits.policy.gates  # type: ignore[attr-defined]
    assert [gate.top_probability for gate in gates] == [pytest.approx(0.2)] * 2
    with pytest.raises(ConfigError, match="chooses the thresholds"):
        serve(model, made, risk=0.02, config=TIDEConfig(exit_threshold=0.9))
    made.checkpoints[0].gate = Gate(top_probability=0.5)
    with pytest.raises(CertificateError, match="other exits"):
        serve(model, made, risk=0.02)


def test_certificates_are_kept_in_the_artifact(made: Artifact, tmp_path: Path) -> None:
    made.certificates = [certificate(made)]
    made.save(tmp_path / "router")
    assert Artifact.load(tmp_path / "router").certificates == made.certificates
    with pytest.raises(ValueError, match="unknown keys"):
        Certificate.from_dict({**certificate(made).to_dict(), "more": 1})


def test_bolder_gates_let_more_leave() -> None:
    gate = Gate(router=0.4, top_probability=0.9, blend=0.8)
    assert gate.at(1.0) == gate
    bolder = gate.at(2.0)
    assert (bolder.router, bolder.top_probability) == (0.4, pytest.approx(0.8))
    assert bolder.blend == pytest.approx(0.6)
    assert gate.at(0.0).blend == 1.0


@pytest.mark.parametrize("kv", ["deferred", "propagate", "zero_pad"])
def test_losses_are_what_full_depth_would_have_said(model: Any, made: Artifact, kv: str) -> None:
    config = TIDEConfig(min_layers=0, kv_cache_strategy=kv, audit_tail=kv == "deferred")
    script = ScriptedPolicy(lambda place, checkpoint: (place.position + checkpoint) % 3 == 0)
    engine = serve(model, made, config=config, policy=script, audit_rate=1.0)
    batch = prompts(4)
    out = engine.generate(**batch, **GREEDY, eos_token_id=None)
    wide = batch["input_ids"].shape[1]
    for row, loss in enumerate(engine.last_stats.losses):
        ids = out[row][batch["attention_mask"][row].argmax() :][None]
        with torch.no_grad():
            full = model(ids).logits[0, -(out.shape[1] - wide) - 1 : -1].argmax(-1)
        assert loss == pytest.approx(float((full != out[row, wide:]).float().mean()))
    assert any(engine.last_stats.losses)
    if kv != "deferred":
        engine.audit_rate = 0.0
        engine.generate(**batch, **GREEDY)
        assert engine.last_stats.losses == [None] * 4


def test_the_breaker_restores_full_depth(model: Any) -> None:
    engine = serve(model, artifact(WrongHead), policy=ALWAYS)
    engine.guard = Guard(Watch(0.02), "full_depth")
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)
    assert not torch.equal(engine.generate(**kwargs), expected)
    with pytest.warns(DriftWarning, match=r"2.00% were promised. Exits are off"):
        _until_tripped(engine, kwargs)
    assert torch.equal(engine.generate(**kwargs), expected)
    assert engine.last_stats.exited_tokens == 0
    engine.guard.reset()
    assert not torch.equal(engine.generate(**kwargs), expected)


def test_the_breaker_trips_in_the_middle_of_a_batch(model: Any) -> None:
    """When a row ends and the watch fires, the rest of its mates' text is full depth's own."""
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    start = kwargs["input_ids"].shape[1]
    wrong = serve(model, artifact(WrongHead), policy=ALWAYS).generate(**kwargs)
    # One row ends early: on a token that no row says before.
    first, at = next(
        (row, at) for at in range(3, 12) for row in range(4)
        if not (wrong[:, start : start + at] == wrong[row, start + at]).any()
        and (wrong[:, start + at] == wrong[row, start + at]).sum() == 1
    )  # fmt: skip
    ends = {"eos_token_id": int(wrong[first, start + at]), "pad_token_id": 0}
    config = TIDEConfig(exit_threshold=None, min_layers=0, audit_tail=True)
    engine = serve(model, artifact(WrongHead), policy=ALWAYS, config=config)
    engine.guard = Guard(Watch(0.02, delta=0.95), "full_depth")
    with pytest.warns(DriftWarning):
        out = engine.generate(**{**kwargs, **ends})
    assert engine.guard.watch.sequences == 1
    for row in {0, 1, 2, 3} - {first}:
        depths = engine.last_stats.depths[row]
        early = [i for i, depth in enumerate(depths) if depth < 6]
        tripped = start + early[-1] + 1
        assert early[-1] in (at, at + 1)  # a chunk may have settled one more
        assert torch.equal(out[row, :tripped], wrong[row, :tripped])
        mask = torch.cat([kwargs["attention_mask"][row], torch.ones(early[-1] + 1).long()])
        expected = model.generate(
            out[row, None, :tripped], attention_mask=mask[None], do_sample=False,
            max_new_tokens=start + len(depths) - tripped, **ends,
        )  # fmt: skip
        assert torch.equal(out[row, : start + len(depths)], expected[0])


def _until_tripped(engine: TIDE, kwargs: dict[str, Any]) -> None:
    assert engine.guard is not None
    while not engine.guard.tripped:
        engine.generate(**kwargs)


def test_what_to_do_on_drift_is_the_users_choice() -> None:
    seen: list[Watch] = []
    guard = Guard(Watch(0.02), seen.append)
    guard.add([0.5] * 50)
    assert len(seen) == 1 and seen[0].fired and not guard.tripped
    warned = Guard(Watch(0.02))
    with pytest.warns(DriftWarning, match="Exits stay on"):
        warned.add([0.5] * 50)
    assert not warned.tripped
    with pytest.raises(ConfigError, match="must be one of warn, full_depth"):
        Guard(Watch(0.02), "panic")


def test_certifies_end_to_end_on_prompts_not_used_before(model: Any, tmp_path: Path) -> None:
    made = run(model, tmp_path / "router", data=texts(60))
    for checkpoint in made.checkpoints:
        checkpoint.gate = Gate(router=0.0, blend=1.0)  # nobody leaves, so nothing is wrong
    made.save(tmp_path / "router")
    options = {"new_tokens": 8, "quiet": True, "boldness": (0.5, 1.0)}
    found = certify(
        model, tiny_tokenizer(), tmp_path / "router", texts(260), risk=(0.05, 0.2), **options
    )
    assert [c.risk for c in found] == [0.05, 0.2]
    assert all(c.boldness == 1.0 and c.estimate == 0.0 for c in found)
    assert found[0].sequences == 260 - 39 - 12  # calibration used 39 to fit, 12 for gates
    assert tide.TIDE(model, tmp_path / "router", risk=0.05).certificate == found[0]
    engine = tide.TIDE(model, tmp_path / "router", TIDEConfig(exit_threshold=None, min_layers=0),
                       risk=0.05)  # fmt: skip
    assert engine.certificate == found[0]
    with pytest.raises(DataError, match="were used in calibration"):
        documents = split_documents(texts(60))
        used = [*documents.fit, *documents.gate]
        certify(model, tiny_tokenizer(), tmp_path / "router", used, **options)


def test_exits_that_are_always_wrong_are_not_certified(model: Any) -> None:
    made = artifact(WrongHead)
    for checkpoint in made.checkpoints:
        checkpoint.gate = Gate(top_probability=0.0)
    config = TIDEConfig(min_layers=0, drafts=())
    options = {"new_tokens": 8, "quiet": True, "boldness": (1.0, 2.0), "config": config}
    made.fingerprint = _fingerprint(model)
    assert certify(model, tiny_tokenizer(), made, texts(40), risk=0.3, **options) == []
    assert made.certificates == []
    # A loss of the user's own, which these answers always meet.
    found = certify(
        model, tiny_tokenizer(), made, texts(200), risk=0.3, loss=lambda p, a: 0.0, **options
    )
    assert [c.loss for c in found] == ["task loss"]


def _fingerprint(model: Any) -> Any:
    return fingerprint(model, locate(model))


def test_a_risk_below_the_noise_of_the_dtype_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [tiny_tokenizer()("abc")["input_ids"]] * 2
    assert noise_floor(model, tiny_tokenizer(), prompt, 24) == 0.0
    rough = tiny_model("llama", dtype=torch.bfloat16)
    made = artifact()
    made.fingerprint = _fingerprint(rough)
    options = {"new_tokens": 4, "quiet": True, "config": TIDEConfig(min_layers=0)}
    monkeypatch.setattr("tide.certify.noise_floor", lambda *_: 0.015)
    with pytest.raises(ConfigError, match=r"differs from itself in 1.50% .*risk of 1.00%.*force"):
        certify(rough, tiny_tokenizer(), made, texts(8), risk=(0.01, 0.02), **options)
    certify(rough, tiny_tokenizer(), made, texts(8), risk=0.01, force=True, **options)
    certify(rough, tiny_tokenizer(), made, texts(8), risk=0.02, **options)


def test_what_cannot_be_certified_is_refused(model: Any, made: Artifact) -> None:
    for options, words in (
        ({"risk": 1.5}, "risk is 1.5"),
        ({"delta": 0}, "delta is 0"),
        ({"boldness": (1.0, 0.5)}, "must ascend"),
        ({"test": "gut"}, "must be one of betting, hoeffding-bentkus"),
    ):
        with pytest.raises(ConfigError, match=words):
            certify(model, tiny_tokenizer(), made, texts(), **options)
