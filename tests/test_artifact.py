"""Artifacts come back as they were saved, and anything else is refused without running it."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ArtifactError, ConfigError
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.confidence import ConfidenceModel
from tide.exits.heads import ExitHead
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tiny import tiny_model

FORMS = ["router", "router.safetensors", "router.pt"]


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def made(model: Any) -> Artifact:
    torch.manual_seed(0)
    head = ExitHead("affine", 32)
    torch.nn.init.normal_(head.affine.weight)  # type: ignore[union-attr]
    return Artifact(
        fingerprint(model, locate(model)),
        32,
        [
            Checkpoint(1, head, TokenRouter(32, 8), Thresholds(router=0.7, top_probability=0.9)),
            Checkpoint(
                3,
                ExitHead("identity", 32),
                confidence_model=ConfidenceModel(("head", "table")),
                prefilter=ConfidenceModel(("candidates",)),
            ),
        ],
        TIDEConfig(exit_threshold=0.7, drafts=("table",)),
        torch.arange(40),
        build_table([[1, 2, 3, 4, 1, 2, 3, 5]], 97),
        {"made": "by a test"},
        candidates=torch.arange(5),
    )


@pytest.mark.parametrize("form", FORMS)
def test_comes_back_as_it_was_saved(form: str, made: Artifact, tmp_path: Path) -> None:
    back = Artifact.load(made.save(tmp_path / form))
    assert back._header() == made._header()
    before, after = made._tensors(), back._tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", FORMS)
def test_others_may_read_it_as_any_new_file(form: str, made: Artifact, tmp_path: Path) -> None:
    """A server may run under another user than calibration."""
    (tmp_path / "usual").touch()
    (tmp_path / "folder").mkdir()
    path = made.save(tmp_path / form)
    files = list(path.iterdir()) if path.is_dir() else [path]
    assert len(files) == (2 if path.is_dir() else 1)
    assert {file.stat().st_mode for file in files} == {(tmp_path / "usual").stat().st_mode}
    assert not path.is_dir() or path.stat().st_mode == (tmp_path / "folder").stat().st_mode


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_uses_it(form: str, model: Any, made: Artifact, tmp_path: Path) -> None:
    ids = torch.randint(3, 97, (1, 6))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    tide = TIDE(model, made.save(tmp_path / form))
    assert tide.config.mode == "lossless"
    out = tide.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(out, expected)


def test_another_models_artifact_is_refused(made: Artifact, tmp_path: Path) -> None:
    other = tiny_model("llama", seed=1)
    path = made.save(tmp_path / "router")
    with pytest.raises(ArtifactError, match=r"another model: head, layers differ.*allow_mismatch"):
        TIDE(other, path)
    TIDE(other, path, allow_mismatch=True)


def test_the_error_for_a_missing_artifact_names_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no artifact at .*nowhere.*tide calibrate"):
        Artifact.load(tmp_path / "nowhere")


@pytest.mark.parametrize("form", ["router.safetensors", "router.pt"])
def test_a_truncated_file_is_refused(form: str, made: Artifact, tmp_path: Path) -> None:
    path = made.save(tmp_path / form)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"cannot be read.*tide calibrate"):
        Artifact.load(path)


def test_unknown_keys_and_tensors_are_refused(made: Artifact, tmp_path: Path) -> None:
    path = made.save(tmp_path / "router")
    header, tensors = files.read(path)
    for change, named in (
        ({**header, "surprise": 1}, "unknown keys.*surprise"),
        ({k: v for k, v in header.items() if k != "record"}, "lacks.*record"),
        ({**header, "schema": 99}, "schema 99, and this version reads 3"),
        ({**header, "config": {"exit_treshold": 1}}, "Did you mean 'exit_threshold'"),
    ):
        files.write(path, change, tensors)
        with pytest.raises(ArtifactError, match=named):
            Artifact.load(path)
    files.write(path, header, {**tensors, "surprise": torch.ones(1)})
    with pytest.raises(ArtifactError, match=r"unknown tensors.*surprise"):
        Artifact.load(path)
    tensors.pop("checkpoints.0.router.up.weight")
    files.write(path, header, tensors)
    with pytest.raises(ArtifactError, match=r"up\.weight|Missing key"):
        Artifact.load(path)


@pytest.mark.parametrize("form", FORMS)
def test_an_artifact_of_schema_1_is_refused(form: str, made: Artifact, tmp_path: Path) -> None:
    """As version 0.1 wrote them: a gate where there are thresholds now, a blend, a tail."""
    header = {**made._header(), "schema": 1}
    for checkpoint in header["checkpoints"]:
        checkpoint["gate"] = {**checkpoint.pop("thresholds"), "blend": None}
        checkpoint["gate"].pop("confidence")
        checkpoint["blend"] = checkpoint.pop("confidence_model")
        checkpoint["tail_layers"] = 0
    files.write(tmp_path / form, header, made._tensors())
    with pytest.raises(ArtifactError, match=r"schema 1, and this version reads 3.*tide calibrate"):
        Artifact.load(tmp_path / form)


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_byte_is_refused(form: str, made: Artifact, tmp_path: Path) -> None:
    path = made.save(tmp_path / form)

    def load() -> Artifact | ArtifactError:
        try:
            return Artifact.load(path)
        except ArtifactError as error:
            return error

    for file in path.iterdir() if path.is_dir() else [path]:
        good = file.read_bytes()
        outcomes = []
        for place in range(len(good) // 50, len(good), len(good) // 20):
            bad = bytearray(good)
            bad[place] ^= 1
            file.write_bytes(bad)
            outcomes.append(load())
            if isinstance(outcomes[-1], Artifact):  # padding between the parts of the file
                assert files.digest(outcomes[-1]._header(), outcomes[-1]._tensors()) == (
                    files.digest(made._header(), made._tensors())
                )
        errors = [str(found) for found in outcomes if isinstance(found, ArtifactError)]
        assert len(errors) > 10 and all("tide calibrate" in text for text in errors)
        file.write_bytes(good)
    Artifact.load(path)


def test_an_edited_threshold_is_refused(made: Artifact, tmp_path: Path) -> None:
    path = made.save(tmp_path / "router") / "tide.json"
    path.write_text(path.read_text().replace("0.9", "0.1"))
    with pytest.raises(ArtifactError, match=r"digest differs.*tide calibrate"):
        Artifact.load(path.parent)


def test_an_interruption_keeps_what_was_there(
    made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.save(tmp_path / "router")
    made.record["made"] = "again"

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", interrupt)
    for name in ("router", "fresh", "fresh.safetensors"):
        with pytest.raises(KeyboardInterrupt):
            made.save(tmp_path / name)
    assert Artifact.load(path).record["made"] == "by a test"
    assert not (tmp_path / "fresh").exists() and not (tmp_path / "fresh.safetensors").exists()


def test_an_interruption_at_any_moment_keeps_the_old_artifact_or_the_new(
    made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found, interrupted = tmp_path / "router", [], True
    while interrupted:
        made.record["made"] = "before"
        made.save(path)
        made.record["made"] = "after"
        made.checkpoints[0].head.affine.weight.data += 1  # type: ignore[union-attr]
        steps = [len(found)]  # changes of files that are made before the process is killed

        def until_killed(change: Any, steps: list[int] = steps) -> Any:
            def changed(*args: Any, **kwargs: Any) -> Any:
                steps[0] -= 1
                if steps[0] < 0:
                    raise KeyboardInterrupt
                return change(*args, **kwargs)

            return changed

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, until_killed(getattr(Path, name)))
            try:
                made.save(path)
                interrupted = False
            except KeyboardInterrupt:
                pass
        found.append(Artifact.load(path).record["made"])
    assert found == sorted(found, reverse=True) and set(found) == {"before", "after"}
    assert len(list(path.glob("tide*.safetensors"))) == 1  # nothing is there of the others


def test_a_folder_whose_tensors_have_no_digest_in_their_name_is_read(
    made: Artifact, tmp_path: Path
) -> None:
    path = made.save(tmp_path / "router")
    next(path.glob("*.safetensors")).rename(path / "tide.safetensors")
    back = Artifact.load(path)
    assert back._header() == made._header()
    back.save(path)
    assert not (path / "tide.safetensors").exists()
    assert Artifact.load(path)._header() == made._header()


def test_goes_to_the_hub_and_comes_back(
    made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"

    class Api:
        def create_repo(self, name: str, **_: Any) -> None:
            assert name == "someone/router"

        def upload_folder(self, repo_id: str, folder_path: str, delete_patterns: Any) -> str:
            for pattern in delete_patterns:
                for file in (hub / repo_id).glob(pattern):
                    file.unlink()
            shutil.copytree(folder_path, hub / repo_id, dirs_exist_ok=True)
            return f"hub:{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: hub / name)
    assert made.push_to_hub("someone/router") == "hub:someone/router"
    made.record["made"] = "again"
    made.push_to_hub("someone/router")
    assert len(list((hub / "someone/router").glob("*.safetensors"))) == 1
    card = (hub / "someone/router/README.md").read_text()
    assert "library_name: tide" in card and "from tide import TIDE" in card
    assert Artifact.from_pretrained("someone/router")._header() == made._header()
    assert Artifact.from_pretrained(hub / "someone/router")._header() == made._header()
    with pytest.raises(ArtifactError, match=r"neither on disk nor on the hub.*tide calibrate"):
        monkeypatch.undo()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        Artifact.from_pretrained("someone/nowhere")


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(__file__).parent / "exploded",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    trace = Path(__file__).parent / "exploded"
    for form, write in (
        ("pickle.pt", lambda p: p.write_bytes(pickle.dumps(Bomb()))),
        ("torch.pt", lambda p: torch.save({"header": Bomb(), "tensors": {}}, p)),
    ):
        path = tmp_path / form
        write(path)
        with pytest.raises(ArtifactError, match="may hold code and is never read"):
            Artifact.load(path)
        assert not trace.exists()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="mode is 'loss'; it must be one of lossless, exit, off"):
        TIDEConfig(mode="loss")
    with pytest.raises(ConfigError, match="min_layers is -1; it must be a whole number from 0"):
        TIDEConfig(min_layers=-1)
    with pytest.raises(ConfigError, match=r"compaction_threshold is 1.5; it must be between"):
        TIDEConfig(compaction_threshold=1.5)
    with pytest.raises(ConfigError, match="needs the exact KV"):
        TIDEConfig(mode="lossless", kv_cache_strategy="propagate")
    with pytest.raises(ConfigError, match="prefill_exit=True"):
        TIDEConfig(prefill_exit=True)
    config = TIDEConfig(exit_threshold=0.5, drafts=("context",))
    assert TIDEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    published = {
        "exit_threshold": 0.85, "min_layers": 8, "checkpoint_interval": 4,
        "calibration_samples": 2000, "calibration_dataset": "wikitext",
        "convergence_threshold": 0.98, "router_bottleneck_dim": 128, "exit_strategy": "identity",
        "kv_cache_strategy": "zero_pad", "compaction_threshold": 0.25,
    }  # fmt: skip
    made, default = TIDEConfig(**published), TIDEConfig()
    changed = [name for name in published if getattr(made, name) != getattr(default, name)]
    assert changed == ["exit_strategy", "kv_cache_strategy"]
