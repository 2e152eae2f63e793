"""An exported exit predicts the tokens that the exit predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tide.cli import main
from tide.errors import ArtifactError, UnsupportedModelError
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead, Readout
from tide.integrations.draft import export_draft
from tide.models.attach import attach
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.models.tokens import TokenBatch
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def made(model: Any) -> Artifact:
    head = ExitHead("affine", 32)
    assert head.affine is not None
    torch.manual_seed(1)
    torch.nn.init.normal_(head.affine.weight, std=0.1)
    return Artifact(fingerprint(model, locate(model)), 32, [Checkpoint(2, head)])


@torch.no_grad()
def test_the_draft_model_predicts_the_tokens_of_the_exit(
    model: Any, made: Artifact, tmp_path: Path
) -> None:
    share = export_draft(model, made, 3, tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(draft.model.layers) == 3 and 0.4 < share < 1
    ids = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(0))
    runner = attach(model, check=False)
    states = runner.run(TokenBatch(ids), 0, 3, cache=runner.new_cache(4))
    readout = Readout(runner.parts.norm, runner.parts.head, runner.config)
    predicted = readout(made.checkpoints[0].head.transform(states)).argmax(-1)
    assert torch.equal(draft(ids).logits.argmax(-1), predicted)


def test_an_exit_that_cannot_be_exported_raises(model: Any, made: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no exit after 4 layers; there are exits after \[3\]"):
        export_draft(model, made, 4, tmp_path)
    other = tiny_model("gpt2")
    with pytest.raises(ArtifactError, match="made for another model"):
        export_draft(other, made, 3, tmp_path)
    made.fingerprint = fingerprint(other, locate(other))
    with pytest.raises(UnsupportedModelError, match="is not x / rms"):
        export_draft(other, made, 3, tmp_path)


def test_command(model: Any, made: Artifact, tmp_path: Path, capsys: Any) -> None:
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    made.fingerprint = fingerprint(stored, locate(stored))  # saving changes the config
    made.save(tmp_path / "exits")
    folders = [str(tmp_path / name) for name in ("model", "exits", "draft")]
    assert main(["export-draft", *folders[:2], "-o", folders[2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["layers"] == 3
    assert (tmp_path / "draft" / "model.safetensors").exists()
