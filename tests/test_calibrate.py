"""Calibration: from a frozen model to an artifact, in stages that can be resumed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tide.calibration import collect, costs
from tide.calibration.choose import _PRICES, choose, follow, one_scorer
from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.confidence import fit_confidence_model
from tide.calibration.costs import Costs
from tide.calibration.data import Prompt, _articles, load_prompts, load_texts, split_documents
from tide.calibration.pipeline import calibrate, checkpoint_layers
from tide.calibration.replays import record
from tide.calibration.scores import PARTS, Scores, auc, observe, tuning_documents
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ConfigError, DataError
from tide.exits.artifact import Artifact
from tide.exits.confidence import FEATURES, WITH_HEAD
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.models.attach import attach
from tide.models.costs import LoopCosts
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
    made = Artifact.load(tmp_path / "router")
    for checkpoint in made.checkpoints:
        checkpoint.thresholds = Thresholds()  # no prefilter: every token passes the threshold
    engine = TIDE(model, made, config=TIDEConfig(min_layers=0, exit_threshold=0.0))
    engine.generate(ids, **options)
    assert engine.last_stats.exited_tokens > 0
    TIDE(model, tmp_path / "router", config=TIDEConfig(min_layers=0, exit_threshold=None)).generate(
        ids, **options
    )


def test_heads_learn_the_full_model(tmp_path: Path) -> None:
    made = run(tiny_model("llama"), tmp_path / "router", epochs=40, data=texts(200))
    heads = made.record["heads"]
    pairs = zip(heads["agreement"], heads["identity"], strict=True)
    assert all(fitted > untrained + 0.05 for fitted, untrained in pairs), heads


def test_an_interrupted_calibration_resumes_with_the_same_result(
    tmp_path: Path, monkeypatch: Any
) -> None:
    model = tiny_model("llama")
    # Thresholds are chosen by measured costs, which no two runs share.
    monkeypatch.setattr(costs, "measure_costs", lambda *args: COSTS)
    monkeypatch.setattr(costs, "measure_loops", lambda *args: LOOPS)
    whole = run(model, tmp_path / "whole")
    units = collect.Collection._unit
    allowed = [1]

    def interrupt(self: Any, *args: Any) -> Any:
        if not allowed[0]:
            raise KeyboardInterrupt
        allowed[0] -= 1
        return units(self, *args)

    monkeypatch.setattr(collect.Collection, "_unit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
    assert len(list((tmp_path / "parts.work").glob("*.safetensors"))) == 1
    allowed[0] = 100
    again = run(model, tmp_path / "parts")
    assert allowed[0] == 100 - 1  # two units in all, one of them from before
    tensors = [next((tmp_path / name).glob("*.safetensors")) for name in ("parts", "whole")]
    assert tensors[0].read_bytes() == tensors[1].read_bytes()
    headers = [made._header() for made in (whole, again)]
    for header in headers:
        for timing in ("seconds", "peak_mb"):
            header["record"].pop(timing)
    assert headers[0] == headers[1]


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    first = run(model, tmp_path / "a", work=tmp_path / "work")
    monkeypatch.setattr(costs, "measure_costs", None)
    monkeypatch.setattr(costs, "measure_loops", None)
    assert (
        run(model, tmp_path / "b", work=tmp_path / "work").record["costs"] == first.record["costs"]
    )


def test_only_the_first_process_fits(tmp_path: Path, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    alone = run(model, tmp_path / "alone", work=tmp_path / "work")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run(model, tmp_path / "other", work=tmp_path / "shared") is None
    assert not (tmp_path / "other").exists()
    (tmp_path / "work/costs.json").replace(tmp_path / "shared/costs.json")
    monkeypatch.setenv("RANK", "0")
    first = run(model, tmp_path / "first", work=tmp_path / "shared")
    tensors = first._tensors()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in alone._tensors().items())


def collect_plan(**changes: Any) -> CollectPlan:
    usual: dict[str, Any] = {
        "layers": (1,), "on_policy": True, "new_tokens": 6, "max_tokens": 32, "top_k": 8,
        "unit": 16, "seed": 0, "documents": "d", "model": "m", "dtype": "t",
    }  # fmt: skip
    return CollectPlan(**{**usual, **changes})


def test_processes_share_the_units(tmp_path: Path, monkeypatch: Any) -> None:
    documents = split_documents(load_prompts(texts(80)))
    plan = collect_plan(layers=(1, 3), documents=documents.fingerprint)
    alone, shared = (Collection(tmp_path / name, plan, documents) for name in ("alone", "shared"))
    runner = attach(tiny_model("llama"))
    alone.collect(runner, tiny_tokenizer())
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):  # the first process waits for the others, so it comes last here
        monkeypatch.setenv("RANK", rank)
        shared.collect(runner, tiny_tokenizer())
    for split in ("fit", "tuning"):
        for one, other in zip(alone.units(split), shared.units(split), strict=True):
            assert torch.equal(one.states, other.states)
            assert torch.equal(one.tokens, other.tokens)


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    documents = split_documents(load_prompts(texts(12)))
    plan = collect_plan(documents=documents.fingerprint)
    Collection(tmp_path, plan, documents)
    Collection(tmp_path, plan, documents)
    with pytest.raises(DataError, match="other settings"):
        Collection(tmp_path, replace(plan, seed=1), documents)


def test_a_collection_stores_the_context_of_each_position(tmp_path: Path) -> None:
    model = tiny_model("llama")
    documents = split_documents(load_prompts(texts(12)))
    plan = collect_plan(layers=(2,), on_policy=False, documents=documents.fingerprint)
    collection = Collection(tmp_path, plan, documents)
    collection.collect(attach(model), tiny_tokenizer())
    (unit,) = collection.units("tuning")
    ids = tiny_tokenizer()(documents.tuning[0])["input_ids"]
    tokens, prompt = unit.texts()[0]
    assert tokens == ids and prompt == 1
    assert unit.texts()[1][0] == tiny_tokenizer()(documents.tuning[1])["input_ids"]
    assert next(collection.answers("tuning")) == ids[1:]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    target = unit.top_tokens[: len(ids) - 1, 0]
    assert target.tolist() == logits.argmax(-1).tolist()
    assert unit.states.shape[:2] == (2, sum(len(a) for a in collection.answers("tuning")))


def test_a_recording_has_greedy_answers_only(tmp_path: Path) -> None:
    documents = split_documents([Prompt(f"abc{k:02}") for k in range(60)], tuning=0.5)
    plan = collect_plan(layers=(1, 3), on_policy=True, unit=9, documents=documents.fingerprint)
    collection = Collection(tmp_path, plan, documents)
    collection.collect(
        attach(tiny_model("llama")),
        tiny_tokenizer(),
        answers=lambda prompts, _, temperature: [[7 if temperature else 5] * 4] * len(prompts),
    )
    answers = list(collection.answers("tuning"))
    assert [7] * 4 in answers and [5] * 4 in answers
    scores = [replace(synthetic(layer, 4 * len(answers)),
                      document=np.repeat(documents.tuning_document, 4))
              for layer in plan.layers]  # fmt: skip
    for part in set(PARTS):
        recording = record(collection, scores, 6, part)
        texts = zip(recording.tokens, recording.prompts, strict=True)
        assert {tuple(tokens[prompt:]) for tokens, prompt in texts} == {(5,) * 4}


def test_all_texts_of_a_document_serve_the_same_part(tmp_path: Path) -> None:
    """Also next to a text whose answer is empty, and across the border of two units."""
    rows = [Prompt(f"{task}ghi{k:02}", document=f"d{k}") for k in range(40) for task in "abc"]
    documents = split_documents(rows, tuning=0.5)
    documents = replace(documents, tuning=("x", *documents.tuning),
                        tuning_document=(100, *documents.tuning_document))  # fmt: skip
    plan = collect_plan(layers=(1, 3), on_policy=False, documents=documents.fingerprint)
    collection = Collection(tmp_path, plan, documents)
    runner = attach(tiny_model("llama"))
    collection.collect(runner, tiny_tokenizer())
    assert next(collection.answers("tuning")) == []
    found = tuning_documents(collection)
    answers = list(collection.answers("tuning"))
    expected = [d for d, a in zip(documents.tuning_document, answers, strict=True) for _ in a]
    assert len(found) > 1 and np.concatenate(found).tolist() == expected
    scores = [replace(synthetic(layer, len(expected)), document=np.array(expected))
              for layer in plan.layers]  # fmt: skip
    subjects = {}
    for part in sorted(set(PARTS)):
        recording = record(collection, scores, 6, part)
        assert recording.correct.shape[1] == sum(
            len(tokens) - prompt
            for tokens, prompt in zip(recording.tokens, recording.prompts, strict=True)
        )
        subjects[part] = {tiny_tokenizer().decode(tokens)[-2:] for tokens in recording.tokens}
    for one, other in combinations(subjects.values(), 2):
        assert one and other and one.isdisjoint(other)


def test_splits_share_no_document_and_follow_the_seed() -> None:
    documents = split_documents(load_prompts(texts(100)))
    parts = [set(documents.fit), set(documents.tuning), set(documents.certify)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 100
    assert split_documents(load_prompts(texts(100))) == documents
    assert split_documents(load_prompts(texts(100)), seed=1).fingerprint != documents.fingerprint


def test_prompts_of_one_document_stay_in_one_split(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{task} {k}", "document": f"d{k}"} for k in range(20) for task in "abc"]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"text": "d3", "document": None}])
    )
    found = load_prompts(path)
    assert found[0] == Prompt("a 0", document="d0")
    documents = split_documents(found)
    by = [{text.split()[-1] for text in s} for s in (documents.fit, documents.tuning)]
    reserved = {text.split()[-1] for text in documents.certify}
    assert len(documents.fit + documents.tuning + documents.certify) == 61
    assert sum(map(len, [*by, reserved])) == 21  # a text may have the name of a document
    unused = [p for p in found if set(documents.used).isdisjoint(p.keys)]
    assert {p.text for p in unused} == set(documents.certify)
    # Another text about a document that was used.
    assert not set(documents.used).isdisjoint(Prompt("new", document=f"d{min(by[0])}").keys)
    with pytest.raises(DataError, match="4 texts of 2 documents"):
        split_documents([Prompt(t, document=d) for t, d in ("ax", "bx", "cy", "dy")])


def test_texts_come_from_files_and_missing_ones_are_errors(tmp_path: Path) -> None:
    paragraphs, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    paragraphs.write_text("one\n\ntwo\none\n")
    lines.write_text('{"question": "q"}\n{"turns": ["t", "u"]}\n"s"\n')
    assert load_texts(paragraphs) == ["one", "two"]
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


def test_what_cannot_be_calibrated_is_refused_at_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for config, options, message in (
        (TIDEConfig(), {}, "allow no checkpoint before the last of 6 layers"),
        (CONFIG, {"label": "agrement"}, "must be one of agreement, cosine"),
        (CONFIG, {"risk": 2}, "risk is 2; it must be between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrate(model, tiny_tokenizer(), tmp_path / "router", config, data=texts(), **options)
    assert not list(tmp_path.iterdir())


def test_calibration_and_serving_compute_the_same_confidence(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The confidence along an answer is the same while decoding and in calibration."""
    # With measured costs, every run would choose checkpoints of its own.
    monkeypatch.setattr(costs, "measure_costs", lambda *args: COSTS)
    monkeypatch.setattr(costs, "measure_loops", lambda *args: LOOPS)
    model = tiny_model("llama")
    made = run(model, tmp_path / "router", work=tmp_path / "work", data=texts(60))
    checkpoints = made.checkpoints
    assert checkpoints
    for checkpoint in checkpoints:  # or the gate would show the prefilter's score
        checkpoint.thresholds = replace(checkpoint.thresholds, prefilter=None)
    # No confidence reaches 1, so every token is scored at every checkpoint.
    engine = TIDE(model, made, TIDEConfig(min_layers=0, drafts=(), exit_threshold=1.0))
    seen: list[list[float]] = [[] for _ in checkpoints]
    for gate, scores_of_gate in zip(engine._machinery.exits.gates, seen, strict=True):
        gate.register_forward_hook(
            lambda gate, inputs, packed, here=scores_of_gate: here.append(float(packed[0, 0, 2]))
        )
    plan = CollectPlan(**json.loads((tmp_path / "work/plan.json").read_text()))
    documents = split_documents(load_prompts(texts(60)))
    plan = replace(plan, layers=tuple(plan.layers))
    collection = Collection(tmp_path / "work", plan, documents)
    layers = list(plan.layers)
    readout = Readout(*(getattr(engine.runner.parts, p) for p in ("norm", "head")), model.config,
                      made.vocabulary)  # fmt: skip
    by_layer = {c.layer: c for c in checkpoints}
    scores = observe(
        collection, readout,
        [by_layer[x].head if x in by_layer else ExitHead("identity", 32) for x in layers],
        [by_layer[x].router if x in by_layer else TokenRouter(32, 8) for x in layers],
        ContinuationTable(made.table),
    )  # fmt: skip
    tokens, prompt = next(collection.units("tuning")).texts()[0]
    text = torch.tensor([tokens[:prompt]])
    output = engine.generate(text, max_new_tokens=len(tokens) - prompt, do_sample=False,
                             pad_token_id=0)  # fmt: skip
    assert output[0].tolist() == tokens  # unit 0 is greedy
    for k, checkpoint in enumerate(checkpoints):
        at = scores[layers.index(checkpoint.layer)]
        wanted = checkpoint.confidence_model(at.features).tolist()
        for position in range(prompt, len(tokens) - 1):  # the prefill commits the first
            # Collected states are kept in bf16.
            assert seen[k][position - prompt] == pytest.approx(
                wanted[position - prompt + 1], abs=0.03
            )


def test_checkpoints_mean_what_was_published() -> None:
    assert checkpoint_layers(TIDEConfig(), 32) == (7, 11, 15, 19, 23, 27)
    assert checkpoint_layers(TIDEConfig(checkpoint_interval=3, min_layers=0), 10) == (2, 5, 8)
    assert checkpoint_layers(TIDEConfig(checkpoint_interval=4, min_layers=0), 8) == (3,)


COSTS = Costs(layer=1.0, start=1.5, head=2.0, exit_head=0.5, router=0.05, prefilter=0.1)
LOOPS = [
    LoopCosts(size, {1: 7.5, 16: 20.0}, {1: 1.0, 16: 2.0}, {1: 0.5, 16: 0.5}, {1: 0.5, 16: 1.0})
    for size in (1, 4)
]


def synthetic(layer: int, n: int = 6000, seed: int = 0, skill: float = 0.3) -> Scores:
    """A checkpoint with a weak top probability and an n-gram feature that predicts more."""
    draw = torch.Generator().manual_seed(seed)
    ease = torch.rand(n, generator=draw)
    correct = torch.rand(n, generator=draw) < ease**skill
    top = torch.sigmoid(6 * (ease - 0.5) + torch.randn(n, generator=draw))
    router = torch.sigmoid(6 * (ease - 0.5) + 3 * torch.randn(n, generator=draw))
    agrees = torch.where(torch.rand(n, generator=draw) < 0.9, correct, ~correct).float() * 2 - 1
    features = torch.zeros(n, sum(FEATURES[name] for name in WITH_HEAD))
    features[:, 0], features[:, 3] = torch.logit(top), agrees
    return Scores(
        layer=layer,
        router=router.numpy(),
        prefilter=router.numpy(),
        top_probability=top.numpy(),
        confidence=top.numpy(),
        correct=correct.numpy(),
        features=features,
        candidate_features=features[:, :1].expand(-1, FEATURES["candidates"]),
        document=(torch.arange(n) // 20).numpy(),
    )


def test_every_document_of_the_tuning_split_is_used_once() -> None:
    for documents in (3, 4, 7, 50):
        scores = synthetic(3, n=20 * documents)
        parts = [set(scores.part(name).document.tolist()) for name in sorted(set(PARTS))]
        assert sorted(d for part in parts for d in part) == list(range(documents))
        assert all(parts)
    with pytest.raises(DataError, match="has 2 documents"):
        synthetic(3, n=40).part("fit")


def test_too_few_documents_are_refused_at_once(tmp_path: Path) -> None:
    """However many texts there are about them."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{task}ghi{k}", "document": f"d{k}"} for k in range(5) for task in "abcdef"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has 1 documents; it needs 3"):
        run(tiny_model("llama"), tmp_path / "router", data=path)
    assert not (tmp_path / "router.work").exists()


def test_thresholds_keep_their_risk_where_they_were_chosen() -> None:
    scores = synthetic(15)
    for scorer in ("router", "top_probability"):
        found = [one_scorer(scores, scorer, risk, COSTS, 30) for risk in (0.01, 0.02, 0.05)]
        assert all(c.error_rate <= risk for c, risk in zip(found, (0.01, 0.02, 0.05), strict=True))
        assert found[0].exit_rate < found[1].exit_rate < found[2].exit_rate
    one = one_scorer(scores, "top_probability", 0.02, COSTS, 30)
    two = one_scorer(scores, "top_probability", 0.02, COSTS, 30, first_stage="router")
    assert two.speedup >= one.speedup > 1
    never = replace(scores, router=scores.top_probability, correct=scores.correct & False)
    assert one_scorer(never, "router", 0.02, COSTS, 30).exit_rate <= 0.021


def test_a_confidence_model_uses_the_other_features() -> None:
    scores = synthetic(15)
    fit_confidence_model(scores)
    held_out = scores.part("report")
    assert held_out.auc("confidence") > held_out.auc("top_probability") + 0.1
    assert auc(held_out.confidence, held_out.correct) == held_out.auc("confidence")


def test_exits_are_chosen_jointly_by_their_costs() -> None:
    scores = [synthetic(layer, seed=layer, skill=1 - layer / 40) for layer in (7, 15, 23)]
    for at in scores:
        fit_confidence_model(at)
    found = choose(scores, 0.02, COSTS, 30)
    assert [len(choice.layers) for choice in found] == [1, 2, 3]
    for choice in found:
        assert choice.error_rate <= 0.02
        some = [at for at in scores if at.layer in choice.layers]
        assert follow(some, choice.thresholds, COSTS, 30) == choice
        json.dumps(choice.to_dict())
    # Where a head costs more than the layers it saves, no token exits.
    expensive = replace(COSTS, exit_head=40.0)
    assert all(choice.exit_rate == 0 for choice in choose(scores, 0.02, expensive, 30))
    # At checkpoints that are never correct, no more tokens exit than the risk allows.
    for at in scores:
        at.correct[:] = False
    assert all(choice.exit_rate <= 0.021 for choice in choose(scores, 0.02, COSTS, 30))


@pytest.mark.parametrize("risk", [0.005, 0.02, 0.1])
def test_bisection_finds_the_lowest_price_that_keeps_the_risk(risk: float) -> None:
    scores = [synthetic(layer, n=2000, seed=layer, skill=1 - layer / 40) for layer in (7, 15)]
    saves = [(30 - at.layer - 1 + COSTS.head) / 33.5 for at in scores]
    free = replace(COSTS, router=0.0, exit_head=0.0)  # so that no prefilter pays
    (_, choice) = choose(scores, risk, free, 30)
    at_prices = [
        follow(scores, [Thresholds(confidence=1 - save / price) for save in saves], free, 30)
        for price in _PRICES
    ]
    lowest = next(found for found in at_prices if found.error_rate <= risk)
    assert choice.error_rate <= risk and choice.speedup >= lowest.speedup


def test_exits_are_counted_token_by_token() -> None:
    scores = [synthetic(layer, n=200, seed=layer) for layer in (7, 15)]
    thresholds = [Thresholds(router=0.4, confidence=0.7), Thresholds(confidence=0.5)]
    seconds = wrong = saved = exited = 0.0
    for t in range(200):
        seconds += 1.5 + 30 + 2
        for at, limit in zip(scores, thresholds, strict=True):
            seconds += COSTS.router
            if limit.router is None or at.router[t] >= limit.router:
                seconds += COSTS.exit_head
                if at.confidence[t] >= limit.confidence:
                    seconds -= 30 - at.layer - 1 + COSTS.head
                    saved, exited = saved + 29 - at.layer, exited + 1
                    wrong += not at.correct[t]
                    break
            seconds += COSTS.start
    found = follow(scores, thresholds, COSTS, 30)
    assert found.speedup == pytest.approx(200 * 33.5 / seconds)
    assert (found.exit_rate, found.error_rate) == pytest.approx((exited / 200, wrong / 200))
    assert found.depth_saved == pytest.approx(saved / (200 * 30))


MEMORY = """
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.data import Documents
from tide.progress import peak_memory_mb
from tide.models.attach import attach
from tide.models.costs import LoopCosts
from tiny import tiny_model, tiny_tokenizer

count = int(sys.argv[1])
texts = tuple(f"{number:05}" + "abcdefghij" * 6 for number in range(count))
documents = Documents(fit=texts, tuning=(), certify=(), tuning_document=(), used=())
runner = attach(tiny_model("llama", hidden_size=512, num_attention_heads=4))
plan = CollectPlan(
    layers=(1, 3), on_policy=False, new_tokens=0, max_tokens=64, top_k=8, seed=0,
    documents=documents.fingerprint, model="m", dtype="t",
)
with TemporaryDirectory() as folder:
    collection = Collection(Path(folder), plan, documents)
    collection.collect(runner, tiny_tokenizer(), splits=("fit",))
    seen = sum(unit.states.shape[1] for unit in collection.units("fit"))
    assert seen == 63 * count, seen
print(peak_memory_mb())
"""


def test_peak_memory_does_not_grow_with_the_documents() -> None:
    # Held in memory, the states of 600 documents more would take 155 MB.
    peaks = []
    for count in (200, 800):
        out = subprocess.run(
            [sys.executable, "-c", MEMORY, str(count)],
            check=True, capture_output=True, text=True, cwd=Path(__file__).parent,
        )  # fmt: skip
        peaks.append(int(out.stdout))
    assert peaks[1] <= 1.1 * peaks[0], peaks


def test_paragraphs_of_an_article_are_one_document() -> None:
    lines = [" = Sea = \n", "Waves.", " = = Tides = = \n", "The moon.", " = Bread = \n", "Flour."]
    found = [(prompt.text, prompt.document) for prompt in _articles(lines)]
    assert found == [("Waves.", "Sea"), ("The moon.", "Sea"), ("Flour.", "Bread")]
