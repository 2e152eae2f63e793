"""A risk is served only with a certificate that covers it, and is monitored while serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tide
from test_calibrate import run, texts
from test_generate import GREEDY, WrongHead, artifact, prompts
from tide.calibration.bounds import betting
from tide.calibration.data import Prompt, encode_prompts, load_prompts, split_documents, text_key
from tide.calibration.fresh import sample
from tide.certification import Workload, certify, measure_losses, noise_floor
from tide.config import TIDEConfig
from tide.drift import CircuitBreaker, DriftMonitor, DriftWarning, InOrder
from tide.engine import TIDE
from tide.errors import ArtifactError, CertificateError, ConfigError, DataError
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.exits.certificate import TASK_LOSS, TOKEN_LOSS, Certificate
from tide.exits.policy import ScriptedPolicy
from tide.exits.thresholds import Thresholds
from tide.models.costs import measure_passes
from tide.models.fingerprint import Fingerprint, fingerprint
from tide.models.locate import locate
from tide.risk import CertificateQuery, find_certificate
from tiny import FAMILIES, tiny_model, tiny_tokenizer

ALWAYS = ScriptedPolicy(lambda at, checkpoint: True)


def certificate(made: Artifact, **changes: Any) -> Certificate:
    usual: dict[str, Any] = {
        "risk": 0.02, "delta": 0.05, "threshold_scale": 0.5, "thresholds": made.thresholds(0.5, 0),
        "sequences": 300, "estimate": 0.01, "p_value": 0.01, "test": "betting", "loss": TOKEN_LOSS,
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
    made = artifact()
    made.fingerprint = _fingerprint(model)
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=0.6)
    return made


def serve(model: Any, made: Artifact, **options: Any) -> TIDE:
    config = TIDEConfig(exit_threshold=None, min_layers=0)
    options = {"config": config, "allow_mismatch": True, "check": False, **options}
    return TIDE(model, made, **options)


def test_a_risk_needs_a_certificate_that_covers_it(model: Any, made: Artifact) -> None:
    with pytest.raises(CertificateError, match=r"No certificate covers risk 0.02.*`tide certify"):
        serve(model, made, risk=0.02)
    for changes, reason in (
        ({"risk": 0.05}, "is for risk 0.05"),
        ({"delta": 0.1}, "is for delta 0.1"),
        ({"dtype": "bfloat16"}, "is for dtype bfloat16"),
        ({"kv_cache_strategy": "propagate"}, "is for kv_cache_strategy propagate"),
        ({"exits": "others"}, "is for other exits"),
        ({"min_layers": 3, "thresholds": made.thresholds(1.0, 3)}, "is for min_layers 3"),
        ({"model": {"layers": "others"}}, "is for another model"),
        ({"loss": TASK_LOSS}, "is for another loss: task loss"),
    ):
        made.certificates = [certificate(made, **changes)]
        with pytest.raises(CertificateError, match=reason):
            serve(model, made, risk=0.02)
    made.certificates = [certificate(made, risk=0.01), certificate(made, threshold_scale=2.0)]
    engine = serve(model, made, risk=0.02)
    assert engine.certificate == made.certificates[1]
    assert serve(model, made, risk=0.015).threshold_scale == 0.5
    thresholds = [gate.thresholds for gate in engine._machinery.exits.gates]
    assert [t.top_probability for t in thresholds] == [pytest.approx(0.2)] * 2
    for given in ({"threshold_scale": 1.0}, {"policy": ALWAYS}):
        with pytest.raises(ConfigError, match=rf"that were certified; got {next(iter(given))}="):
            serve(model, made, risk=0.02, **given)
    with pytest.raises(ConfigError, match="chooses the thresholds"):
        serve(model, made, risk=0.02, config=TIDEConfig(exit_threshold=0.9))
    made.checkpoints[0].thresholds = Thresholds(top_probability=0.5)
    with pytest.raises(CertificateError, match="other exits"):
        serve(model, made, risk=0.02)


def test_the_certificate_that_covers_a_query_most_closely_is_found(made: Artifact) -> None:
    made.certificates = [
        certificate(made, threshold_scale=scale, risk=risk)
        for scale, risk in ((0.5, 0.02), (4.0, 0.01), (2.0, 0.02), (3.0, 0.05))
    ]
    query = CertificateQuery(0.02, 0.05, "float32", "deferred", model=made.fingerprint)
    assert find_certificate(made, query) == made.certificates[2]
    with pytest.raises(CertificateError, match="is for another model"):
        find_certificate(made, replace(query, model=Fingerprint("", "", "")))
    assert find_certificate(made, replace(query, model=None)) == made.certificates[2]


def test_the_exits_are_hashed_once_for_all_certificates(
    made: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.certificates = [certificate(made, risk=risk) for risk in (0.01, 0.02, 0.05)]
    hashed: list[Any] = []
    digest = files.digest
    monkeypatch.setattr(files, "digest", lambda *args: hashed.append(args) or digest(*args))
    query = CertificateQuery(0.05, 0.05, "float32", "deferred")
    assert find_certificate(made, query) == made.certificates[2]
    assert len(hashed) == 1


def test_certificates_are_kept_in_the_artifact(made: Artifact, tmp_path: Path) -> None:
    made.certificates = [certificate(made)]
    made.save(tmp_path / "router")
    assert Artifact.load(tmp_path / "router").certificates == made.certificates
    with pytest.raises(ValueError, match="unknown keys"):
        Certificate.from_dict({**certificate(made).to_dict(), "more": 1})


def test_a_larger_threshold_scale_lets_more_tokens_exit() -> None:
    thresholds = Thresholds(router=0.4, top_probability=0.9, confidence=0.8)
    assert thresholds.scaled(1.0) == thresholds
    aggressive = thresholds.scaled(2.0)
    assert (aggressive.router, aggressive.top_probability) == (0.4, pytest.approx(0.8))
    assert aggressive.confidence == pytest.approx(0.6)
    assert thresholds.scaled(0.0).confidence == 1.0


@pytest.mark.parametrize("kv", ["deferred", "propagate", "zero_pad"])
def test_losses_count_tokens_that_differ_from_full_depth(
    model: Any, made: Artifact, kv: str
) -> None:
    config = TIDEConfig(min_layers=0, kv_cache_strategy=kv, audit_tail=kv == "deferred")
    script = ScriptedPolicy(lambda at, checkpoint: (at.position + checkpoint) % 3 == 0)
    engine = serve(model, made, config=config, policy=script, audit_rate=1.0)
    batch = prompts(4)
    out = engine.generate(**batch, **GREEDY, eos_token_id=None)
    start = batch["input_ids"].shape[1]
    for i, loss in enumerate(engine.last_stats.losses):
        ids = out[i][batch["attention_mask"][i].argmax() :][None]
        with torch.no_grad():
            target = model(ids).logits[0, -(out.shape[1] - start) - 1 : -1].argmax(-1)
        assert loss == pytest.approx(float((target != out[i, start:]).float().mean()))
    assert any(engine.last_stats.losses)
    if kv != "deferred":
        engine.audit_rate = 0.0
        engine.generate(**batch, **GREEDY)
        assert engine.last_stats.losses == [None] * 4


def test_the_circuit_breaker_restores_full_depth(model: Any) -> None:
    engine = serve(model, artifact(WrongHead), policy=ALWAYS)
    engine.circuit_breaker = CircuitBreaker(DriftMonitor(0.02), "full_depth")
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)
    assert not torch.equal(engine.generate(**kwargs), expected)
    with pytest.warns(DriftWarning, match=r"the certified bound is 2.00%. Exits are off"):
        _until_tripped(engine, kwargs)
    assert torch.equal(engine.generate(**kwargs), expected)
    assert engine.last_stats.exited_tokens == 0
    engine.circuit_breaker.reset()
    assert not torch.equal(engine.generate(**kwargs), expected)


def test_the_circuit_breaker_trips_in_the_middle_of_a_batch(model: Any) -> None:
    """If the monitor fires when a sequence ends, the others continue at full depth."""
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None}
    start = kwargs["input_ids"].shape[1]
    wrong = serve(model, artifact(WrongHead), policy=ALWAYS).generate(**kwargs)
    # One sequence ends before the others: on a token that none of them generates before.
    first, at = next(
        (i, at) for at in range(3, 12) for i in range(4)
        if not (wrong[:, start : start + at] == wrong[i, start + at]).any()
        and (wrong[:, start + at] == wrong[i, start + at]).sum() == 1
    )  # fmt: skip
    ends = {"eos_token_id": int(wrong[first, start + at]), "pad_token_id": 0}
    config = TIDEConfig(exit_threshold=None, min_layers=0, audit_tail=True)
    engine = serve(model, artifact(WrongHead), policy=ALWAYS, config=config)
    engine.circuit_breaker = CircuitBreaker(DriftMonitor(0.02, delta=0.98), "full_depth")
    with pytest.warns(DriftWarning):
        out = engine.generate(**{**kwargs, **ends})
    assert engine.circuit_breaker.monitor.sequences == 1
    for i in {0, 1, 2, 3} - {first}:
        depths = engine.last_stats.depths[i]
        last = max(new for new, depth in enumerate(depths) if depth < 6)
        tripped = start + last + 1
        assert last in (at, at + 1)  # a pass may have committed one more
        assert torch.equal(out[i, :tripped], wrong[i, :tripped])
        mask = torch.cat([kwargs["attention_mask"][i], torch.ones(last + 1).long()])
        expected = model.generate(
            out[i, None, :tripped], attention_mask=mask[None], do_sample=False,
            max_new_tokens=start + len(depths) - tripped, **ends,
        )  # fmt: skip
        assert torch.equal(out[i, : start + len(depths)], expected[0])


def _until_tripped(engine: TIDE, kwargs: dict[str, Any]) -> None:
    assert engine.circuit_breaker is not None
    while not engine.circuit_breaker.tripped:
        engine.generate(**kwargs)


def test_the_user_chooses_the_reaction_to_drift() -> None:
    seen: list[DriftMonitor] = []
    custom = CircuitBreaker(DriftMonitor(0.02), seen.append)
    custom.add([0.5] * 50)
    assert len(seen) == 1 and seen[0].fired and not custom.tripped
    warned = CircuitBreaker(DriftMonitor(0.02))
    with pytest.warns(DriftWarning, match="Exits stay on"):
        warned.add([0.5] * 50)
    assert not warned.tripped
    with pytest.raises(ConfigError, match="must be one of warn, full_depth"):
        CircuitBreaker(DriftMonitor(0.02), "panic")


def test_certifies_end_to_end_on_prompts_not_used_before(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    timed: list[int] = []

    def measure(runner: Any, stages: Any, sequences: int, **options: Any) -> Any:
        timed.append(sequences)
        return measure_passes(runner, stages, sequences, **options)

    monkeypatch.setattr("tide.decode.machinery.measure_passes", measure)
    made = run(model, tmp_path / "router", data=texts(60))
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(router=0.0, confidence=1.0)  # no exits, so no errors
    made.save(tmp_path / "router")
    options = {"new_tokens": 8, "quiet": True, "threshold_scales": (0.5, 1.0)}
    found = certify(
        model, tiny_tokenizer(), tmp_path / "router", texts(260), risk=(0.05, 0.2), **options
    )
    assert timed and len(timed) == len(set(timed))  # once for a batch of each size
    assert [c.risk for c in found] == [0.05, 0.2]
    assert all(c.threshold_scale == 1.0 and c.estimate == 0.0 for c in found)
    assert found[0].sequences == 260 - 39 - 12  # calibration used 39 to fit, 12 for tuning
    assert found[0].generation == {
        "do_sample": False, "max_new_tokens": 8, "max_prompt": 512, "logits_processors": [],
    }  # fmt: skip
    assert tide.TIDE(model, tmp_path / "router", risk=0.05).certificate == found[0]
    engine = tide.TIDE(model, tmp_path / "router", TIDEConfig(exit_threshold=None, min_layers=0),
                       risk=0.05)  # fmt: skip
    assert engine.certificate == found[0]
    with pytest.raises(DataError, match="were used in calibration"):
        documents = split_documents(load_prompts(texts(60)))
        used = [*documents.fit, *documents.tuning]
        certify(model, tiny_tokenizer(), tmp_path / "router", used, **options)


def test_exits_that_are_always_wrong_are_not_certified(model: Any) -> None:
    made = artifact(WrongHead)
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=0.0)
    config = TIDEConfig(min_layers=0, drafts=())
    options = {"new_tokens": 8, "quiet": True, "threshold_scales": (1.0, 2.0), "config": config}
    made.fingerprint = _fingerprint(model)
    assert certify(model, tiny_tokenizer(), made, texts(40), risk=0.3, **options) == []
    assert made.certificates == []
    # A custom loss that is 0 for every answer. It is no claim about tokens, and replaces none.
    of_tokens = certificate(made, risk=0.3)
    made.certificates = [of_tokens]
    found = certify(
        model, tiny_tokenizer(), made, texts(200), risk=0.3, loss=lambda p, a: 0.0, **options
    )
    assert [c.loss for c in found] == [TASK_LOSS]
    assert made.certificates == [of_tokens, *found]
    made.certificates = found
    with pytest.raises(CertificateError, match="is for another loss: task loss"):
        serve(model, made, risk=0.3)


def test_the_order_of_the_prompts_says_nothing_of_their_losses() -> None:
    """Easy prompts first, as in a file sorted by task, must not bring a certificate."""
    made = artifact()
    sorted_texts = [f"{'easy' if k < 300 else 'hard'} {k}" for k in range(400)]
    drawn = [prompt.text for prompt in sample(sorted_texts, made, None)]
    assert drawn == [prompt.text for prompt in sample(sorted_texts, made, None)]
    assert sorted(drawn) == sorted(sorted_texts)
    losses = [0.2 * text.startswith("hard") for text in drawn]
    assert betting(np.array(sorted(losses)), 0.02) < 0.05 < betting(np.array(losses), 0.02)
    some = sample(sorted_texts, made, 100)
    assert 10 < sum(prompt.text.startswith("hard") for prompt in some) < 40


def test_a_document_counts_once(tmp_path: Path) -> None:
    lines = [{"prompt": f"{k} about {k // 4}", "document": f"d{k // 4}"} for k in range(40)]
    lines += [{"prompt": f"alone {k}"} for k in range(5)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = sample(tmp_path / "data.jsonl", artifact(), None)
    assert len(found) == 15 and len({prompt.text.split()[-1] for prompt in found}) >= 10


def test_a_loss_beyond_its_range_is_refused(model: Any) -> None:
    made = artifact()
    made.fingerprint = _fingerprint(model)
    with pytest.raises(ConfigError, match=r"loss gave -1\.0; it must be between 0 and 1"):
        certify(
            model, tiny_tokenizer(), made, texts(20), risk=0.3, loss=lambda p, a: -1.0,
            new_tokens=4, quiet=True, config=TIDEConfig(min_layers=0),
        )  # fmt: skip


def _fingerprint(model: Any) -> Any:
    return fingerprint(model, locate(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_noise_floor_reads_only_the_logits_it_needs(family: str) -> None:
    model = tiny_model(family)
    encoded = [tiny_tokenizer()(text)["input_ids"] for text in ("abc", "defgh")]
    kept: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: kept.append(output.shape[-2])
    )
    model.generation_config.repetition_penalty = 5.0  # changes tokens, and is no noise
    assert noise_floor(model, tiny_tokenizer(), encoded, 6) == 0.0
    hook.remove()
    assert max(kept) <= 7  # at most six new tokens, and the one after them


def test_a_risk_below_the_noise_of_the_dtype_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [tiny_tokenizer()("abc")["input_ids"]] * 2
    assert noise_floor(model, tiny_tokenizer(), prompt, 24) == 0.0
    rough = tiny_model("llama", dtype=torch.bfloat16)
    made = artifact()
    made.fingerprint = _fingerprint(rough)
    options = {"new_tokens": 4, "quiet": True, "config": TIDEConfig(min_layers=0)}
    monkeypatch.setattr("tide.certification.noise_floor", lambda *_: 0.015)
    with pytest.raises(ConfigError, match=r"differs from itself in 1.50% .*risk of 1.00%.*force"):
        certify(rough, tiny_tokenizer(), made, texts(400), risk=(0.01, 0.02), **options)
    monkeypatch.setattr("tide.certification.learn_then_test", lambda *_: None)
    certify(rough, tiny_tokenizer(), made, texts(400), risk=0.01, force=True, **options)
    certify(rough, tiny_tokenizer(), made, texts(400), risk=0.02, **options)


def test_what_cannot_be_certified_is_refused(model: Any, made: Artifact) -> None:
    for options, message in (
        ({"risk": 1.5}, "risk is 1.5; it must be between 0 and 1: 2 % is 0.02"),
        ({"delta": 0}, "delta is 0"),
        ({"threshold_scales": (1.0, 0.5)}, "must ascend"),
        ({"config": TIDEConfig(prefill_exit=True, kv_cache_strategy="propagate")}, "not certified"),
    ):
        with pytest.raises(ConfigError, match=message):
            certify(model, tiny_tokenizer(), made, texts(), **options)


def ready(model: Any) -> Artifact:
    """An artifact with exits that are always right, to be certified."""
    made = artifact()
    made.fingerprint = _fingerprint(model)
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=1.0)
    return made


FAST: dict[str, Any] = {
    "new_tokens": 4, "quiet": True, "threshold_scales": (1.0,), "config": TIDEConfig(min_layers=0),
}  # fmt: skip


def test_too_few_prompts_are_refused_before_any_work_and_cost_no_certificate(model: Any) -> None:
    made = ready(model)
    made.certificates = [before] = [certificate(made, risk=0.02)]
    with pytest.raises(
        DataError, match=r"Only 100 prompts .* risk 0.02 at delta 0.05 .* least 155"
    ):
        certify(model, tiny_tokenizer(), made, texts(100), risk=(0.02, 0.2), **FAST)
    assert made.certificates == [before]


def test_a_claim_that_has_failed_is_not_tested_on_the_same_prompts(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ready(model)
    made.save(tmp_path / "router")
    bad = np.full(40, 0.5)
    monkeypatch.setattr("tide.certification.measure_losses", lambda *_, **__: bad)
    given = model, tiny_tokenizer(), tmp_path / "router"
    assert certify(*given, texts(40), risk=0.3, **FAST) == []
    with pytest.raises(DataError, match="all were used in calibration or in a test that failed"):
        certify(*given, texts(40), risk=0.3, **FAST)
    bad = np.zeros(40)
    (other,) = certify(*given, texts(40), risk=0.2, **FAST)  # another claim
    (again,) = certify(*given, texts(80), risk=0.3, **FAST)
    assert (other.sequences, again.sequences) == (40, 40)
    assert Artifact.load(tmp_path / "router").certificates == [other, again]


def test_certificates_of_two_runs_are_kept_and_exits_are_not_restored(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, path = ready(model), tmp_path / "router"
    made.save(path)
    meanwhile: list[Certificate] = [certificate(made, risk=0.1, dtype="bfloat16")]

    def losses(*_: Any, **__: Any) -> np.ndarray:
        made.certificates = meanwhile
        made.save(path)
        return np.zeros(40)

    monkeypatch.setattr("tide.certification.measure_losses", losses)
    (found,) = certify(model, tiny_tokenizer(), path, texts(40), risk=0.3, **FAST)
    assert Artifact.load(path).certificates == [*meanwhile, found]
    made.checkpoints[0].thresholds = Thresholds(top_probability=0.5)
    with pytest.raises(ArtifactError, match="has other exits than when certification began"):
        certify(model, tiny_tokenizer(), path, texts(40), risk=0.3, **FAST)
    assert Artifact.load(path).certificates == meanwhile


def test_losses_are_in_the_order_of_the_prompts(model: Any) -> None:
    made = ready(model)
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds(top_probability=0.0)
    config = TIDEConfig(exit_threshold=None, min_layers=0, audit_tail=True, drafts=())
    engine = serve(model, made, config=config)
    tokenizer, some = tiny_tokenizer(), ["a " * (1 + 7 * k % 5) + "b" * k for k in range(7)]
    given = {"texts": some, "encoded": encode_prompts(tokenizer, some, 64), "new_tokens": 6}
    alone, together = (
        measure_losses(engine, tokenizer, Workload(**given, batch=batch)) for batch in (1, 3)
    )
    assert together.tolist() == alone.tolist() and len(set(alone)) > 1
    told = measure_losses(
        engine, tokenizer, Workload(**given, batch=3), loss=lambda prompt, _: len(prompt) / 100
    )
    assert told.tolist() == [len(text) / 100 for text in some]


def test_nothing_is_certified_where_no_token_exits(model: Any) -> None:
    changed = tiny_model("llama")
    changed.generation_config.encoder_repetition_penalty = 1.5
    made = ready(changed)
    with pytest.raises(ConfigError, match=r"no token exits.*EncoderRepetitionPenalty"):
        certify(changed, tiny_tokenizer(), made, texts(40), risk=0.3, **FAST)


def test_nothing_is_certified_in_another_dtype_than_the_weights(model: Any) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match="Autocast is on, and a certificate is for the dtype"),
    ):
        certify(model, tiny_tokenizer(), ready(model), texts(40), risk=0.3, **FAST)


def test_an_artifact_that_hides_its_prompts_is_not_certified(model: Any) -> None:
    made = ready(model)
    made.record = {}
    with pytest.raises(DataError, match="its record has no `used`"):
        certify(model, tiny_tokenizer(), made, texts(40), risk=0.3, **FAST)


def test_a_data_set_is_read_until_there_are_enough_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []

    def endless(name: str) -> Iterator[Prompt]:
        for k in count():
            read.append(k)
            yield Prompt(f"paragraph {k}", document=f"article {k // 10}")

    monkeypatch.setattr("tide.calibration.data._from_hub", endless)
    made = artifact()
    made.record["used"] = [text_key(f"article {k}") for k in range(5)]
    assert len(sample("a/data-set", made, 8)) == 8
    assert len(read) == 50 + 71


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"risk": 2}, "risk is 2; it must be between 0 and 1: 2 % is 0.02"),
        ({"risk": 0.02, "delta": 5}, "delta is 5"),
        ({"risk": 0.02, "audit_rate": 5}, "audit_rate is 5"),
    ],
)
def test_shares_that_are_none_are_refused(
    model: Any, made: Artifact, options: dict[str, Any], message: str
) -> None:
    made.certificates = [certificate(made, risk=0.02)]
    with pytest.raises(ConfigError, match=message):
        serve(model, made, **options)


def test_weights_that_change_lose_their_certificate(made: Artifact) -> None:
    changed = tiny_model("llama")
    made.fingerprint = _fingerprint(changed)
    made.certificates = [certificate(made, risk=0.02)]
    engine = serve(changed, made, risk=0.02)
    ids = torch.tensor([[1, 2, 3]])
    engine.generate(ids, max_new_tokens=2)
    weight = changed.model.layers[-1].mlp.up_proj.weight
    with torch.no_grad():
        weight.add_(0.0)
        engine.generate(ids, max_new_tokens=2)  # written to, and the same
        weight.add_(0.5)
        with pytest.raises(CertificateError, match="weights were changed"):
            engine.generate(ids, max_new_tokens=2)


def test_a_monitor_is_not_fooled_by_short_answers_that_end_first() -> None:
    """Short answers are wrong more often here, and the mean is the bound."""

    def alarms(batch: int, *, in_order: bool) -> float:
        fired = 0
        for seed in range(60):
            draw, monitor = np.random.default_rng(seed), DriftMonitor(0.05)
            for _ in range(1024 // batch):
                short = draw.random(batch) < 0.5
                wrong = np.where(short, draw.binomial(8, 0.09, batch) / 8,
                                 draw.binomial(128, 0.01, batch) / 128)  # fmt: skip
                losses = InOrder()
                for k in sorted(range(batch), key=lambda k: not short[k]):
                    known = losses.end(k, wrong[k]) if in_order else [wrong[k]]
                    for loss in known:
                        monitor.add(loss)
            assert monitor.sequences == 1024
            fired += monitor.fired
        return fired / 60

    assert alarms(128, in_order=True) <= 0.1 < 0.4 < alarms(128, in_order=False)
