"""The foundation on real weights: SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import TIDE
import tide
from scenarios import SCENARIOS, error, full_depth
from tide.config import TIDEConfig
from tide.drift import CircuitBreaker, DriftMonitor, DriftWarning
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy, TokenPosition
from tide.exits.thresholds import Thresholds
from tide.models.attach import RUNNERS
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.models.tokens import TokenBatch

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("smollm2")]

TEXT = "Once upon a time, in a small town by the sea, there lived a clockmaker who"


@pytest.fixture(scope="module")
def ids(smollm2_path: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :12]
    return torch.cat([ids, ids.flip(1)])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_equals_full_forward(model: Any, ids: torch.Tensor, scenario: str, runner: str) -> None:
    made = RUNNERS[runner](model)
    for sequence, got in SCENARIOS[scenario](made, ids):
        assert error(got, full_depth(model, made, sequence)[-len(got) :]) <= 1e-5


@torch.no_grad()
def test_decodes_what_the_model_decodes(model: Any, ids: torch.Tensor) -> None:
    prompt = ids[:1]
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False)[0]
    runner = tide.attach(model)
    assert runner.name == "segments"
    cache, new, tokens = runner.new_cache(1), prompt, list(prompt[0])
    for _ in range(16):
        hidden = runner.run(TokenBatch(new), 0, runner.n_layers, cache=cache)
        new = runner.logits(hidden[:, -1:]).argmax(-1)
        tokens.append(new[0, 0])
    assert torch.stack(tokens).tolist() == expected.tolist()
    assert runner.counts.calls == [16] * 30
    assert runner.counts.tokens == [prompt.shape[1] + 15] * 30


def test_fingerprint_does_not_depend_on_the_dtype(model: Any, smollm2_path: Path) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16)
    here, there = tide.attach(model, check=False), tide.attach(rounded)
    assert fingerprint(model, here.parts) == fingerprint(rounded, there.parts)


@pytest.fixture(scope="module")
def artifact(model: Any) -> Artifact:
    """Real heads, untrained, at three checkpoints."""
    checkpoints = [
        Checkpoint(layer, ExitHead("identity", 576), thresholds=Thresholds(top_probability=0.5))
        for layer in (7, 15, 23)
    ]
    return Artifact(fingerprint(model, locate(model)), 576, checkpoints)


def chat(tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip


def test_lossless_on_twenty_real_prompts(
    model: Any, artifact: Artifact, tokenizer: Any, data_path: Path
) -> None:
    lines = (data_path / "spec_bench" / "question.jsonl").read_text().splitlines()[::24]
    texts = [json.loads(line)["turns"][0][:400] for line in lines]
    assert len(texts) == 20
    chains = TIDEConfig(mode="lossless", max_tree=0)
    engines = [tide.TIDE(model, artifact, config, check=False) for config in (None, chains)]
    drafted: Counter[str] = Counter()
    for start in range(0, 20, 4):
        engine = engines[start // 4 % 2]
        batch = chat(tokenizer, texts[start : start + 4])
        expected = model.generate(**batch, max_new_tokens=32, do_sample=False)
        assert torch.equal(engine.generate(**batch, max_new_tokens=32, do_sample=False), expected)
        drafted.update(engine.last_stats.drafted)
    assert drafted["tree"] > 0 and drafted["context 3"] > 0 and drafted["exit"] > 0


def test_a_script_that_exits_sixty_percent_at_layer_15(model: Any, ids: torch.Tensor) -> None:
    def script(at: TokenPosition, checkpoint: int) -> bool:
        return at.position % 5 < 3

    exits = Artifact(
        fingerprint(model, locate(model)), 576, [Checkpoint(15, ExitHead("identity", 576))]
    )
    engine = tide.TIDE(
        model, exits, TIDEConfig(drafts=()), policy=ScriptedPolicy(script), check=False
    )
    calls = [0] * 30
    handles = [
        layer.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
        for i, layer in enumerate(model.model.layers)
    ]
    engine.generate(ids[:1], max_new_tokens=51, do_sample=False, eos_token_id=None)
    for handle in handles:
        handle.remove()
    stats = engine.last_stats
    # 50 tokens after the first; the script lets 3 of every 5 exit.
    assert stats.exits_per_layer == {15: 30}
    assert calls == [51] * 16 + [21] * 14
    assert stats.layers_run == sum(calls) < stats.layers_full == 51 * 30


def test_the_published_example_runs_unchanged(
    smollm2_path: Path, artifact: Artifact, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The published README's lines, without its calibrate call: the artifact is given."""
    monkeypatch.chdir(tmp_path)
    artifact.save("router.pt")
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype="float32", device_map="cpu")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)

    engine = TIDE.TIDE(model, router_path="router.pt")
    output = engine.generate(tokenizer("Hello", return_tensors="pt").input_ids, max_new_tokens=16)
    print(tokenizer.decode(output[0]))

    assert capsys.readouterr().out.startswith("Hello")
    config = TIDE.TIDEConfig(exit_threshold=0.95)
    engine = TIDE.TIDE(model, "router.pt", config=config)
    assert engine(tokenizer("Hello there", return_tensors="pt").input_ids).shape[-1] == 49152
    assert engine.last_stats.summary().startswith("Total tokens: 2, Exited: ")


def test_calibrates_end_to_end_on_a_small_budget(
    model: Any, tokenizer: Any, small_artifact: Path
) -> None:
    made = Artifact.load(small_artifact)
    heads = made.record["heads"]
    at = heads["layers"].index(23)
    assert heads["agreement"][at] >= heads["identity"][at] + 0.20, heads
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    options = {"max_new_tokens": 48, "do_sample": False}
    lossless = TIDE.TIDE(model, small_artifact)
    assert torch.equal(lossless.generate(ids, **options), model.generate(ids, **options))
    exiting = TIDE.TIDE(model, small_artifact, config=TIDEConfig(exit_threshold=0.5))
    exiting.generate(ids, **options)
    assert exiting.last_stats.exited_tokens > 0
    assert exiting.last_stats.layers_run < exiting.last_stats.layers_full
    repeats_itself(exiting, chat(tokenizer, ["What is the sea?", "Why?", TEXT, "Name a colour."]))
    exiting.circuit_breaker = CircuitBreaker(DriftMonitor(0.001, delta=0.5), "full_depth")
    with pytest.warns(DriftWarning):
        exiting.circuit_breaker.add([1.0] * 9)
    assert torch.equal(exiting.generate(ids, **options), model.generate(ids, **options))


def repeats_itself(engine: Any, batch: dict[str, torch.Tensor]) -> None:
    """Exits predict the same run after run, greedy or drawn, whatever else is in the batch."""
    greedy: Any = {"max_new_tokens": 32, "do_sample": False}
    out = engine.generate(**batch, **greedy)
    assert engine.last_stats.exited_tokens > 0
    assert torch.equal(engine.generate(**batch, **greedy), out)
    for k, ids in enumerate(batch["input_ids"]):
        prompt = ids[batch["attention_mask"][k].bool()]
        alone = engine.generate(prompt[None], **greedy)[0, len(prompt) :].tolist()
        assert out[k, len(ids) :].tolist()[: len(alone)] == alone
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(engine.generate(**batch, max_new_tokens=16, do_sample=True))
    assert torch.equal(*drawn)
