"""Files of strangers: each case loads to something valid or is refused; defects stay fixed.

The cases are those of bench/hostile.py, which runs ten times as many.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Sentry, hostile
from hostile_surfaces import Characters, Ground, Surface, read_run, read_work
from safetensors.torch import load_file, save_file

from tide.calibration.costs import load_or_measure
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ArtifactError, DataError
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.exits.certificate import Certificate

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: Any) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


@pytest.fixture
def header(ground: Ground) -> dict[str, Any]:
    return json.loads(json.dumps(ground.header))


@linux
def test_a_thousand_hostile_files_are_loaded_or_refused() -> None:
    tallies = hostile(range(1000), 1, Sentry())
    assert [fault for tally in tallies.values() for fault in tally.faults] == []
    assert sum(tally.cases for tally in tallies.values()) == 1000
    for name in ("header", "certificate", "tensors", "folder", "report"):  # not all is refused
        assert tallies[name].loaded and tallies[name].refused, name


@linux
def test_the_sentry_sees_what_it_must_not(tmp_path: Path) -> None:
    sentry, inside = Sentry(), tmp_path / "inside"
    inside.mkdir()
    with sentry.noting(inside) as seen:
        (inside / "fine.txt").write_text("")
        (tmp_path / "outside.txt").write_text("")
        (inside / "link").symlink_to(tmp_path)
        (inside / "link" / "outside.txt").write_text("")
        os.system("true")
        pickle.loads(b"cos\ngetcwd\n.")
        exec(compile("1", str(inside / "code.py"), "exec"))
    events = [event.split()[0] for event in seen]
    assert events == ["write", "write", "os.system", "pickle.find_class", "compile", "exec"]


def refused(path: Path, header: Any, tensors: Any, match: str) -> None:
    files.write(path, header, tensors)
    with pytest.raises(ArtifactError, match=match):
        Artifact.load(path)


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("hidden_size", "16", "hidden_size is '16'; it must be a whole number"),
        ("hidden_size", 2**40, "hidden_size is 1099511627776"),
        ("checkpoints.0.layer", -1, "layer of checkpoint 0 is -1"),
        ("checkpoints.0.layer", 2, r"after layers \[2, 2\]; they must ascend"),
        ("checkpoints.0.thresholds.router", "0.5", "must be a number"),
        ("checkpoints.0.thresholds.confidence", 0.5, "confidence threshold, and nothing that"),
        ("checkpoints.1.confidence_model.features", ["head", "head"], "features of checkpoint 1"),
        ("checkpoints.1.prefilter.features", ["head"], "features of checkpoint 1"),
        ("candidates", 3, "candidates must be 3 token ids"),
        ("record", [], "record is"),
        ("record.used", [[1]], "an entry of used is"),
        ("fingerprint.head", None, "must be a text"),
        ("table", "abc", "table is 'abc'; it must be a list"),
        ("certificates.0.risk", float("nan"), "risk of a certificate is nan"),
        ("certificates.0.delta", 0.0, "risk and delta of a certificate"),
        ("certificates.0.sequences", "many", "sequences of a certificate"),
        ("certificates.0.thresholds", {"first": {}}, "thresholds for layer 'first'"),
        ("certificates.0.generation", {"max_new_tokens": "all"}, "max_new_tokens"),
    ],
)
def test_values_that_cannot_be_are_refused(
    where: str, value: Any, match: str, ground: Ground, header: Any, tmp_path: Path
) -> None:
    holder, keys = header, where.split(".")
    for key in keys[:-1]:
        holder = holder[int(key) if isinstance(holder, list) else key]
    holder[keys[-1]] = value
    refused(tmp_path / "router.safetensors", header, ground.tensors, match)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("checkpoints.0.head.affine.weight", lambda t: t * torch.nan, "not a finite number"),
        ("checkpoints.0.head.affine.weight", lambda t: t.to(torch.complex64), "16 or 32 bits"),
        ("checkpoints.1.confidence_model.spread", lambda t: t * 0, "spread that is not above 0"),
        ("vocabulary", lambda t: t - 1, "different token ids from 0"),
        ("vocabulary", lambda t: t.float(), "token ids, 64 bits each"),
        ("candidates", lambda t: t + 1, "a candidate is not in the vocabulary"),
        ("table.keys_2", lambda t: t.flip(0), "do not ascend"),
        ("table.next_1", lambda t: t + 97, "tokens outside of its 97"),
        ("table.chance_1", lambda t: t[:-1], "differ in length"),
        ("table.vocabulary_size", lambda t: t + 2**40, "vocabulary_size of the table"),
        ("recording.prompts", lambda t: t * 0, "no prompt or no answer"),
        ("recording.lengths", lambda t: t + 1, "other tokens than its documents"),
        ("recording.correct", lambda t: t[:, :-1], "score of the recording is not of shape"),
    ],
)
def test_tensors_that_cannot_be_are_refused(
    name: str, change: Any, match: str, ground: Ground, header: Any, tmp_path: Path
) -> None:
    tensors = {**ground.tensors, name: change(ground.tensors[name]).contiguous()}
    refused(tmp_path / "router", header, tensors, match)


def test_a_header_takes_no_memory_for_what_it_only_claims(
    ground: Ground, header: Any, tmp_path: Path
) -> None:
    header["hidden_size"] = 2**20  # an exit head of four terabytes
    header["checkpoints"][0]["router"]["bottleneck"] = 2**20
    refused(tmp_path / "router", header, ground.tensors, "size mismatch")


def test_token_ids_that_the_model_does_not_have_are_refused(ground: Ground, tmp_path: Path) -> None:
    tensors = {**ground.tensors, "table.vocabulary_size": torch.tensor(1000)}
    files.write(tmp_path / "router", ground.header, tensors)
    with pytest.raises(ArtifactError, match=r"token ids up to 999; the model has 97 tokens"):
        TIDE(ground.model, tmp_path / "router", check=False)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"digest": "x", "digest": "y"}', "the key 'digest' twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"digest": "../../../../outside"}', "must be 64 hex digits"),
        (" " * (9 << 20), "more than 8 MB"),
        ("", "is empty"),
    ],
)
def test_a_header_that_is_hardly_json_is_refused(
    text: str, match: str, ground: Ground, tmp_path: Path
) -> None:
    path = tmp_path / "router"
    files.write(path, ground.header, ground.tensors)
    (path / "tide.json").write_text(text)
    with pytest.raises(ArtifactError, match=match):
        Artifact.load(path)


def test_an_error_does_not_send_commands_to_the_terminal(ground: Ground, tmp_path: Path) -> None:
    tensors = {**ground.tensors, "checkpoints.0.head.\x1b[2J": torch.ones(1)}
    files.write(tmp_path / "router", ground.header, tensors)
    with pytest.raises(ArtifactError) as found:
        Artifact.load(tmp_path / "router")
    assert "[2J" in str(found.value) and "\x1b" not in str(found.value)


@linux
@pytest.mark.parametrize("name", ["tide.json", "tide.safetensors"])
def test_what_is_not_a_file_is_not_opened(name: str, ground: Ground, tmp_path: Path) -> None:
    path = tmp_path / "router"
    files.write(path, ground.header, ground.tensors)
    next(path.glob("*.safetensors")).rename(path / "tide.safetensors")
    Artifact.load(path)
    (path / name).unlink()
    os.mkfifo(path / name)  # who opens it waits for a writer
    with pytest.raises(ArtifactError, match="is not a file"):
        Artifact.load(path)


def test_a_pickle_is_never_read(ground: Ground, tmp_path: Path) -> None:
    """Not even an honest one: torch's unpickler allocates what a file tells it to."""
    path = tmp_path / "router.pt"
    torch.save({"header": json.dumps(ground.header), "tensors": ground.tensors}, path)
    with pytest.raises(ArtifactError, match=r"is a pickle, which may hold code and is never read"):
        Artifact.load(path)
    files.write(path, ground.header, ground.tensors)
    assert load_file(path).keys() == ground.tensors.keys()  # the format of .safetensors


@linux
def test_saving_does_not_follow_links_out_of_the_folder(ground: Ground, tmp_path: Path) -> None:
    path, precious = tmp_path / "router", tmp_path / "precious.txt"
    files.write(path, ground.header, ground.tensors)
    precious.write_text("as it was")
    (path / "README.md").symlink_to(precious)
    made = Artifact.load(path)
    made.save_pretrained(path)
    assert precious.read_text() == "as it was" and not (path / "README.md").is_symlink()
    for file in (path / "custom_generate").iterdir():
        file.unlink()
    (path / "custom_generate").rmdir()
    (path / "custom_generate").symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="custom_generate is a link"):
        made.save_pretrained(path)
    assert not (tmp_path / "generate.py").exists()


def test_a_record_without_what_the_card_shows_is_named(ground: Ground, tmp_path: Path) -> None:
    made = Artifact._from(ground.header, dict(ground.tensors))
    made.record = {"heads": 5}
    with pytest.raises(ArtifactError, match="no model card for this record"):
        made.save_pretrained(tmp_path / "router")


def test_a_model_name_stays_a_name_in_the_card(ground: Ground, tmp_path: Path) -> None:
    made = Artifact._from(ground.header, dict(ground.tensors))
    made.record = {"model": 'x")\nimport os\nlicense: mit'}
    made.save_pretrained(tmp_path / "router")
    lines = (tmp_path / "router/README.md").read_text().splitlines()
    assert r'base_model: "x\") import os license: mit"' in lines
    assert "import os" not in lines and "license: mit" not in lines


def test_a_certificate_with_other_values_is_refused(ground: Ground) -> None:
    with pytest.raises(ValueError, match=r"p_value of a certificate is 2; it must be a number"):
        Certificate.from_dict({**ground.header["certificates"][0], "p_value": 2})


def work(ground: Ground) -> Path:
    return Surface("", 0, None, read_work, ()).warm_up(ground)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("tokens", lambda t: t + 97, "token ids outside of 0 to 96"),
        ("ends", lambda t: t + 1, "do not end where"),
        ("states", lambda t: t[:, :-1], "states have the shape"),
        ("top_logprobs", lambda t: -t, "log-probability above 0"),
        ("top_tokens", lambda t: t.long(), "other types"),
    ],
)
def test_a_unit_that_was_changed_is_refused(
    name: str, change: Any, match: str, ground: Ground
) -> None:
    path = work(ground)
    unit = path / "fit-00001.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(unit).items()}
    save_file({**tensors, name: change(tensors[name]).contiguous()}, unit)
    with pytest.raises(DataError, match=rf"fit-00001.*{match}.*Remove it, and run again"):
        read_work(path, ground)
    unit.unlink()
    read_work(path, ground)  # the advice works


def test_notes_of_a_work_folder_that_were_changed_are_refused(ground: Ground) -> None:
    path = work(ground)
    costs = json.loads((path / "costs.json").read_text())
    costs["costs"]["layer"] = "fast"
    (path / "costs.json").write_text(json.dumps(costs))
    with pytest.raises(DataError, match=r"costs\.json does not hold the costs"):
        load_or_measure(path / "costs.json", ground.runner, 0, TIDEConfig(), 1)
    (path / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan\.json is not what calibration wrote"):
        ground.collection(path)


def test_a_unit_too_many_is_refused(ground: Ground) -> None:
    path = work(ground)
    (path / "fit-00002.safetensors").write_bytes((path / "fit-00000.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"fit-00002.*is not of this collection"):
        ground.collection(path).collect(ground.runner, Characters())


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("speedup", float("nan"), "speedup is nan"),
        ("speedup", "fast", "speedup is 'fast'"),
        ("exit_rate", 3, "exit_rate is 3"),
        ("exits_per_layer", {"deep": 1}, "must be by layer"),
        ("exits_per_layer", {"7": 0}, "whole number from 1"),
        ("method", "x" * 100, "up to 80 characters"),
        ("method", None, "must be a text"),
        ("certificate", {"risk": None}, "risk of a certificate"),
    ],
)
def test_a_benchmark_that_cannot_be_drawn_is_refused(
    key: str, value: Any, match: str, ground: Ground, tmp_path: Path
) -> None:
    run = json.loads(json.dumps(ground.run))
    run["results"][1][key] = value
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(DataError, match=rf"not a comparison.*{match}.*tide bench MODEL"):
        read_run(tmp_path / "run.json", ground)


def test_names_in_a_benchmark_are_shown_as_they_are(ground: Ground, tmp_path: Path) -> None:
    run = json.loads(json.dumps(ground.run))
    for method, name in zip(run["results"], ("<b>a$b</b>", "$\\frac", "_--><b>"), strict=True):
        method["method"] = name
    run["results"][1]["layer_calls_per_token"] = {"$x^2": 3.0, "<b>": 1.0}  # not those of the other
    run["conditions"]["data"] = "\ud800"  # half of a character
    (tmp_path / "run.json").write_text(json.dumps(run))
    read_run(tmp_path / "run.json", ground)
    assert "&lt;b&gt;a$b" in (tmp_path / "page.html").read_text()
