"""Calibration: from a frozen model to an artifact, in stages that can be interrupted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tide.calibration import collect, pipeline
from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.costs import Costs
from tide.calibration.data import load_texts, split_documents
from tide.calibration.gates import PARTS, Scores, auc, choose, fit_blend, follow, observe, one_judge
from tide.calibration.pipeline import calibrate, checkpoint_layers
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ConfigError, DataError
from tide.exits.artifact import Artifact
from tide.exits.blend import OPINIONS
from tide.exits.heads import ExitHead, Readout
from tide.exits.policy import Gate, GatePolicy
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
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
        checkpoint.gate = Gate()  # no veto by the router: all that pass the threshold leave
    early = TIDE(model, made, config=TIDEConfig(min_layers=0, exit_threshold=0.0))
    early.generate(ids, **options)
    assert early.last_stats.exited_tokens > 0
    TIDE(model, tmp_path / "router", config=TIDEConfig(min_layers=0, exit_threshold=None)).generate(
        ids, **options
    )


def test_heads_learn_the_full_model(tmp_path: Path) -> None:
    made = run(tiny_model("llama"), tmp_path / "router", epochs=40, data=texts(200))
    said = made.record["heads"]
    assert all(a > b + 0.05 for a, b in zip(said["agreement"], said["identity"], strict=True)), said


def test_interrupted_it_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    # Gates are chosen by measured costs, which no two runs share.
    costs = Costs(layer=1.0, start=1.5, head=2.0, exit_head=0.5, router=0.05)
    monkeypatch.setattr(pipeline, "measure_costs", lambda *args: costs)
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
    assert left[0] == 100 - 1  # two units in all, of which one was there
    assert (tmp_path / "parts/tide.safetensors").read_bytes() == (
        tmp_path / "whole/tide.safetensors"
    ).read_bytes()
    headers = [made._header() for made in (whole, again)]
    for header in headers:
        for timing in ("seconds", "peak_mb"):
            header["record"].pop(timing)
    assert headers[0] == headers[1]


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    first = run(model, tmp_path / "a", work=tmp_path / "work")
    monkeypatch.setattr(pipeline, "measure_costs", None)
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


def test_processes_share_the_units(tmp_path: Path, monkeypatch: Any) -> None:
    from tide.models.attach import attach

    documents = split_documents(texts(80))
    plan = CollectPlan((1, 3), True, 6, 32, 0.7, 8, 16, 0, documents.fingerprint, "m", "d")
    alone, shared = Collection(tmp_path / "alone", plan), Collection(tmp_path / "shared", plan)
    runner = attach(tiny_model("llama"))
    with runner:
        alone.collect(runner, tiny_tokenizer(), documents)
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank in ("1", "0"):  # the first process waits for the others, so it comes last here
            monkeypatch.setenv("RANK", rank)
            shared.collect(runner, tiny_tokenizer(), documents)
    for split in ("fit", "gate"):
        for one, other in zip(alone.units(split), shared.units(split), strict=True):
            assert torch.equal(one.states, other.states)
            assert torch.equal(one.tokens, other.tokens)


def test_a_folder_of_another_plan_is_refused(tmp_path: Path) -> None:
    plan = CollectPlan((1,), True, 6, 32, 0.7, 8, 16, 0, "d", "m", "t")
    Collection(tmp_path, plan)
    Collection(tmp_path, plan)
    with pytest.raises(DataError, match="other settings"):
        Collection(tmp_path, CollectPlan((1,), True, 6, 32, 0.7, 8, 16, 1, "d", "m", "t"))


def test_a_collection_remembers_what_led_to_each_position(tmp_path: Path) -> None:
    from tide.models.attach import attach

    model = tiny_model("llama")
    documents = split_documents(texts(12))
    plan = CollectPlan((2,), False, 0, 32, 0.7, 5, 16, 0, documents.fingerprint, "m", "d")
    collection = Collection(tmp_path, plan)
    runner = attach(model)
    with runner:
        collection.collect(runner, tiny_tokenizer(), documents)
    (unit,) = collection.units("gate")
    row = tiny_tokenizer()(documents.gate[0])["input_ids"]
    tokens, prompt = unit.documents()[0]
    assert tokens == row and prompt == 1
    assert unit.documents()[1][0] == tiny_tokenizer()(documents.gate[1])["input_ids"]
    assert next(collection.answers("gate")) == row[1:]
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1]
    said = unit.top_tokens[: len(row) - 1, 0]
    assert said.tolist() == logits.argmax(-1).tolist()
    assert unit.states.shape[:2] == (2, sum(len(a) for a in collection.answers("gate")))


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


def test_what_cannot_be_calibrated_is_refused_at_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for config, options, words in (
        (TIDEConfig(), {}, "leave no checkpoint before the last of 6 layers"),
        (CONFIG.with_(exit_strategy="tail"), {}, "not calibrated"),
        (CONFIG, {"label": "agrement"}, "must be one of agreement, cosine"),
        (CONFIG, {"risk": 2}, "risk is 2; it must be between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            calibrate(model, tiny_tokenizer(), tmp_path / "router", config, data=texts(), **options)
    assert not list(tmp_path.iterdir())


def test_gates_are_chosen_on_what_they_see_when_serving(tmp_path: Path) -> None:
    """The blend's chance along an answer, while decoding, is that of the calibration."""
    model = tiny_model("llama")
    made = run(model, tmp_path / "router", work=tmp_path / "work", data=texts(60))
    seen: dict[tuple[int, ...], float] = {}

    class Watch(GatePolicy):
        def decide(self, checkpoint: int, hidden: Any, places: Any, *args: Any, **kw: Any) -> Any:
            decision = super().decide(checkpoint, hidden, places, *args, **kw)
            at = [(checkpoint, place.position) for place in places]
            seen.update(zip(at, decision.scores, strict=True))
            return decision

    checkpoints = made.checkpoints
    policy = Watch(
        [c.router for c in checkpoints], [Gate(blend=2.0)] * len(checkpoints),
        [c.blend for c in checkpoints],
        lambda index: index if made.vocabulary is None else made.vocabulary[index],
    )  # fmt: skip
    engine = TIDE(model, made, TIDEConfig(min_layers=0, drafts=()), policy=policy)
    plan = CollectPlan(**json.loads((tmp_path / "work/plan.json").read_text()))
    collection = Collection(tmp_path / "work", replace(plan, layers=tuple(plan.layers)))
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
    tokens, prompt = next(collection.units("gate")).documents()[0]
    text = torch.tensor([tokens[:prompt]])
    said = engine.generate(text, max_new_tokens=len(tokens) - prompt, do_sample=False,
                           pad_token_id=0)  # fmt: skip
    assert said[0].tolist() == tokens  # unit 0 is greedy
    for k, checkpoint in enumerate(checkpoints):
        at = scores[layers.index(checkpoint.layer)]
        wanted = checkpoint.blend(at.opinions).tolist()
        for position in range(prompt, len(tokens) - 1):  # the first is settled by the prefill
            # Collected states are kept in bf16.
            assert seen[k, position] == pytest.approx(wanted[position - prompt + 1], abs=0.03)


def test_checkpoints_mean_what_was_published() -> None:
    assert checkpoint_layers(TIDEConfig(), 32) == (7, 11, 15, 19, 23, 27)
    assert checkpoint_layers(TIDEConfig(checkpoint_interval=3, min_layers=0), 10) == (2, 5, 8)
    assert checkpoint_layers(TIDEConfig(checkpoint_interval=4, min_layers=0), 8) == (3,)


COSTS = Costs(layer=1.0, start=1.5, head=2.0, exit_head=0.5, router=0.05)


def synthetic(layer: int, n: int = 6000, seed: int = 0, skill: float = 0.3) -> Scores:
    """A checkpoint whose head knows a little of when it is right, and a hint that knows more."""
    draw = torch.Generator().manual_seed(seed)
    ease = torch.rand(n, generator=draw)
    right = torch.rand(n, generator=draw) < ease**skill
    top = torch.sigmoid(6 * (ease - 0.5) + torch.randn(n, generator=draw))
    router = torch.sigmoid(6 * (ease - 0.5) + 3 * torch.randn(n, generator=draw))
    hint = torch.where(torch.rand(n, generator=draw) < 0.9, right, ~right).float() * 2 - 1
    opinions = torch.zeros(n, sum(OPINIONS.values()))
    opinions[:, 0], opinions[:, 3] = torch.logit(top), hint
    document = torch.arange(n) // 20
    return Scores(
        layer, router.numpy(), top.numpy(), top.numpy(), right.numpy(), opinions, document.numpy()
    )


def test_every_document_of_the_gate_split_is_used_once() -> None:
    for documents in (3, 4, 7, 50):
        scores = synthetic(3, n=20 * documents)
        parts = [set(scores.part(name).document.tolist()) for name in sorted(set(PARTS))]
        assert sorted(d for part in parts for d in part) == list(range(documents))
        assert all(parts)
    with pytest.raises(DataError, match="has 2 documents"):
        synthetic(3, n=40).part("fit")


def test_gates_keep_their_risk_where_they_were_chosen() -> None:
    scores = synthetic(15)
    for judge in ("router", "top_probability"):
        saved = [one_judge(scores, judge, risk, COSTS, 30) for risk in (0.01, 0.02, 0.05)]
        assert all(c.wrong <= risk for c, risk in zip(saved, (0.01, 0.02, 0.05), strict=True))
        assert saved[0].leave < saved[1].leave < saved[2].leave
    one = one_judge(scores, "top_probability", 0.02, COSTS, 30)
    two = one_judge(scores, "top_probability", 0.02, COSTS, 30, veto=True)
    assert two.speedup >= one.speedup > 1
    never = Scores(15, *(scores.top_probability,) * 3, scores.right & False, scores.opinions,
                   scores.document)  # fmt: skip
    assert one_judge(never, "router", 0.02, COSTS, 30).leave <= 0.021


def test_a_blend_uses_what_other_judges_know() -> None:
    scores = synthetic(15)
    fit_blend(scores)
    held_out = scores.part("report")
    assert held_out.auc("blend") > held_out.auc("top_probability") + 0.1
    assert auc(held_out.blend, held_out.right) == held_out.auc("blend")


def test_exits_are_chosen_jointly_by_what_they_cost() -> None:
    scores = [synthetic(layer, seed=layer, skill=1 - layer / 40) for layer in (7, 15, 23)]
    for at in scores:
        fit_blend(at)
    found = choose(scores, 0.02, COSTS, 30)
    assert [len(choice.layers) for choice in found] == [1, 2, 3]
    for choice in found:
        assert choice.wrong <= 0.02
        some = [at for at in scores if at.layer in choice.layers]
        assert follow(some, choice.gates, COSTS, 30) == choice
        json.dumps(choice.to_dict())
    # Where a head costs more than the layers it saves, nobody leaves.
    dear = Costs(layer=1.0, start=1.5, head=2.0, exit_head=40.0, router=0.05)
    assert all(choice.leave == 0 for choice in choose(scores, 0.02, dear, 30))
    # A checkpoint that is never right is left by no more than the risk allows.
    for at in scores:
        at.right[:] = False
    assert all(choice.leave <= 0.021 for choice in choose(scores, 0.02, COSTS, 30))


def test_what_gates_do_is_counted_token_by_token() -> None:
    scores = [synthetic(layer, n=200, seed=layer) for layer in (7, 15)]
    gates = [Gate(router=0.4, blend=0.7), Gate(blend=0.5)]
    seconds = wrong = saved = left = 0.0
    for t in range(200):
        seconds += 1.5 + 30 + 2
        for at, gate in zip(scores, gates, strict=True):
            seconds += COSTS.router
            if gate.router is None or at.router[t] >= gate.router:
                seconds += COSTS.exit_head
                if at.blend[t] >= gate.blend:
                    seconds -= 30 - at.layer - 1 + COSTS.head
                    saved, left, wrong = saved + 29 - at.layer, left + 1, wrong + (not at.right[t])
                    break
            seconds += COSTS.start
    found = follow(scores, gates, COSTS, 30)
    assert found.speedup == pytest.approx(200 * 33.5 / seconds)
    assert (found.leave, found.wrong) == pytest.approx((left / 200, wrong / 200))
    assert found.depth_saved == pytest.approx(saved / (200 * 30))


MEMORY = """
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.data import Documents
from tide.calibration.progress import peak_memory_mb
from tide.models.attach import attach
from tiny import tiny_model, tiny_tokenizer

count = int(sys.argv[1])
texts = tuple(f"{number:05}" + "abcdefghij" * 6 for number in range(count))
runner = attach(tiny_model("llama", hidden_size=256, num_attention_heads=4))
plan = CollectPlan((1, 3), False, 0, 64, 0.7, 8, 32, 0, "d", "m", "t")
with TemporaryDirectory() as folder, runner:
    collection = Collection(Path(folder), plan)
    collection.collect(runner, tiny_tokenizer(), Documents(texts, (), ()), splits=("fit",))
    seen = sum(unit.states.shape[1] for unit in collection.units("fit"))
    assert seen == 63 * count, seen
print(peak_memory_mb())
"""


def test_peak_memory_does_not_grow_with_the_documents() -> None:
    # Held in memory, the states of 1,500 documents more would take 145 MB.
    peaks = []
    for count in (500, 2000):
        out = subprocess.run(
            [sys.executable, "-c", MEMORY, str(count)],
            check=True, capture_output=True, text=True, cwd=Path(__file__).parent,
        )  # fmt: skip
        peaks.append(int(out.stdout))
    assert peaks[1] <= 1.1 * peaks[0], peaks
