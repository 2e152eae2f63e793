"""Calibration: from a frozen model to an artifact, in stages that can be interrupted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tide.calibration import collect
from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.costs import Costs
from tide.calibration.data import load_texts, split_documents
from tide.calibration.gates import Scores, auc, best_gate
from tide.calibration.pipeline import calibrate, checkpoint_layers
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import DataError
from tide.exits.artifact import Artifact
from tiny import FAMILIES, tiny_model, tiny_tokenizer

CONFIG = TIDEConfig(min_layers=2, checkpoint_interval=2, router_bottleneck_dim=8)


def texts(count: int = 40) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefgh", k=12)) for _ in range(count)]


def run(model: Any, path: Path, **kwargs: Any) -> Artifact:
    options = {"data": texts(), "new_tokens": 12, "vocabulary": 64, "quiet": True, **kwargs}
    return calibrate(model, tiny_tokenizer(), path, CONFIG, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrates_every_family_end_to_end(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    run(model, tmp_path / "router", data=texts(20), new_tokens=6, epochs=1)
    assert not (tmp_path / "router.work").exists()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.requires_grad and p.grad is None
    ids = torch.randint(3, 97, (2, 6))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    engine = TIDE(model, tmp_path / "router")
    assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))
    early = TIDE(model, tmp_path / "router", config=TIDEConfig(min_layers=0))
    early.generate(ids, **options)


def test_heads_learn_the_full_model(tmp_path: Path) -> None:
    made = run(tiny_model("llama"), tmp_path / "router", epochs=40, data=texts(200))
    said = made.record["agreement"]
    assert all(a > b + 0.05 for a, b in zip(said["head"], said["identity"], strict=True)), said


def test_interrupted_it_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    whole = run(model, tmp_path / "whole")
    units = collect.Collection._unit
    left = [1]

    def interrupt(self: Any, *args: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return units(self, *args)

    monkeypatch.setattr(collect.Collection, "_unit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
    assert len(list((tmp_path / "parts.work").glob("*.safetensors"))) == 1
    left[0] = 100
    again = run(model, tmp_path / "parts")
    assert left[0] == 100 - 2  # three units in all, of which one was there
    first, second = whole._tensors(), again._tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_processes_share_the_units(tmp_path: Path) -> None:
    from tide.models.attach import attach

    documents = split_documents(texts(80))
    plan = CollectPlan((1, 3), True, 6, 32, 0.7, 8, 16, 0, documents.fingerprint, "m")
    alone, shared = Collection(tmp_path / "alone", plan), Collection(tmp_path / "shared", plan)
    runner = attach(tiny_model("llama"))
    with runner:
        alone.collect(runner, tiny_tokenizer(), documents)
        for rank in (1, 0):
            shared.collect(runner, tiny_tokenizer(), documents, rank=rank, world=2)
    for split in ("fit", "gate"):
        for one, other in zip(alone.units(split), shared.units(split), strict=True):
            assert torch.equal(one.states, other.states)
            assert torch.equal(one.context, other.context)


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    plan = CollectPlan((1,), True, 6, 32, 0.7, 8, 16, 0, "d", "m")
    Collection(tmp_path, plan)
    Collection(tmp_path, plan)
    with pytest.raises(DataError, match="other settings"):
        Collection(tmp_path, CollectPlan((1,), True, 6, 32, 0.7, 8, 16, 1, "d", "m"))


def test_a_collection_remembers_what_led_to_each_position(tmp_path: Path) -> None:
    from tide.models.attach import attach

    model = tiny_model("llama")
    documents = split_documents(texts(12))
    plan = CollectPlan((2,), False, 0, 32, 0.7, 5, 16, 0, documents.fingerprint, "m")
    collection = Collection(tmp_path, plan)
    runner = attach(model)
    with runner:
        collection.collect(runner, tiny_tokenizer(), documents)
    (unit,) = collection.units("gate")
    row = tiny_tokenizer()(documents.gate[0])["input_ids"]
    here = unit.document == 0
    assert unit.context[here].tolist()[:3] == [[-1, -1, row[0]], [-1, *row[:2]], row[:3]]
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1]
    assert unit.top_tokens[here, 0].tolist() == logits.argmax(-1).tolist()
    assert unit.states.shape[:2] == (2, len(unit.context))


def test_splits_share_no_document_and_follow_the_seed() -> None:
    documents = split_documents(texts(100))
    parts = [set(documents.fit), set(documents.gate), set(documents.certify)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 100
    assert split_documents(texts(100)) == documents
    assert split_documents(texts(100), seed=1).fingerprint != documents.fingerprint


def test_texts_come_from_files_and_never_from_nowhere(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\n\ntwo\none\n")
    lines.write_text('{"question": "q"}\n{"turns": ["t", "u"]}\n"s"\n')
    assert load_texts(plain) == ["one", "two"]
    assert load_texts(lines) == ["q", "t", "s"]
    assert load_texts(lines, limit=2) == ["q", "t"]
    assert load_texts(["x", "x", "y"]) == ["x", "y"]
    lines.write_text('{"answer": 1}\n')
    with pytest.raises(DataError, match="line 1 has none of the keys text, prompt"):
        load_texts(lines)
    lines.write_text("{\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        load_texts(lines)
    with pytest.raises(DataError, match="There is no text"):
        load_texts([" "])
    with pytest.raises(DataError, match=r"There is no file 'nowhere.txt'.*local"):
        load_texts("nowhere.txt")


def test_checkpoints_mean_what_was_published() -> None:
    assert checkpoint_layers(TIDEConfig(), 32) == (7, 11, 15, 19, 23, 27)
    assert checkpoint_layers(TIDEConfig(checkpoint_interval=3, min_layers=0), 10) == (2, 5, 8)
    assert checkpoint_layers(TIDEConfig(checkpoint_interval=4, min_layers=0), 8) == (3,)


def test_the_best_gate_keeps_its_risk_and_pays() -> None:
    draw = torch.Generator().manual_seed(0)
    n = 4000
    top = torch.rand(n, generator=draw)
    right = torch.rand(n, generator=draw) < top**0.3
    router = (top + 0.3 * torch.randn(n, generator=draw)).clamp(0, 1)
    scores = Scores(15, router.numpy(), top.numpy(), right.numpy())
    costs = Costs(layer=1.0, head=2.0, exit_head=0.5, router=0.05)
    choices = [best_gate(scores, risk, costs, 30) for risk in (0.01, 0.02, 0.05)]
    for choice, risk in zip(choices, (0.01, 0.02, 0.05), strict=True):
        assert 0 < choice.wrong <= risk
    assert choices[0].speedup < choices[1].speedup < choices[2].speedup
    assert choices[0].speedup > 1
    json.dumps([choice.to_dict() for choice in choices])
    useless = Scores(15, router.numpy(), top.numpy(), (top < 0).numpy())
    assert best_gate(useless, 0.02, costs, 30).leave <= 0.02
    assert auc(scores.top_probability, scores.right) > 0.6
