"""What TIDE reads from strangers: artifacts, certificates, work folders, benchmarks.

For each, how a hostile one is written, how it is read as a user would, and what may stop it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hostile_files as bad
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.costs import load_or_measure
from tide.calibration.data import Documents
from tide.calibration.fit import choose_vocabulary
from tide.calibration.table import build_table
from tide.cli import report
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ArtifactError, CertificateError, DataError, TideError
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.exits.certificate import TOKEN_LOSS, Certificate
from tide.exits.checkpoint import Checkpoint
from tide.exits.confidence import ConfidenceModel
from tide.exits.heads import ExitHead
from tide.exits.recording import Recording
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.attach import attach
from tide.models.fingerprint import fingerprint
from tide.risk import CertificateQuery, find_certificate

VOCABULARY, HIDDEN, LAYERS = 97, 16, 4
FORMS = ("router", "router.safetensors", "router.pt")
IDS = torch.tensor([[5, 9, 11, 5, 9, 11, 5, 9]])


class Ground:
    """Good files to start from, a model to use them with, and a place where nothing may change.

    Args:
        folder: where all of it is kept.
    """

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.inside, self.outside = folder, folder / "case", folder / "outside"
        self.outside.mkdir()
        (self.outside / "precious.txt").write_text("as it was")
        self.canary = self.outside / "ran"
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=32,
            num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        self.runner = attach(self.model, check=False)
        self.expected = self.model.generate(IDS, max_new_tokens=6, do_sample=False)
        made = good_artifact(self.model, self.runner)
        self.header, self.tensors = made._header(), made._tensors()
        self.run = good_run(made.certificates[0])
        self.documents = Documents(
            fit=("one two", "three four"), tuning=("five", "six"), certify=("seven",),
            tuning_document=(0, 1), used=(),
        )  # fmt: skip
        self.work = folder / "work"
        self.collection(self.work).collect(self.runner, Characters())
        load_or_measure(self.work / "costs.json", self.runner, 0, TIDEConfig(), 1)
        self._known: set[str] = set()

    def clean(self) -> Path:
        """An empty folder for the next case."""
        shutil.rmtree(self.inside, ignore_errors=True)
        self.inside.mkdir()
        return self.inside

    def damage(self) -> list[str]:
        """What has changed outside."""
        there = sorted(path.name for path in self.outside.iterdir())
        if there == ["precious.txt"] and (self.outside / "precious.txt").read_text() == "as it was":
            return []
        shutil.rmtree(self.outside)
        self.outside.mkdir()
        (self.outside / "precious.txt").write_text("as it was")
        return [f"changed outside: {there}"]

    def collection(self, folder: Path) -> Collection:
        """The collection of the plan that all work folders are for."""
        plan = CollectPlan(
            layers=(1, 2), on_policy=True, new_tokens=4, max_tokens=8, unit=1, seed=0,
            documents=self.documents.fingerprint, model="x", dtype="float32",
        )  # fmt: skip
        return Collection(folder, plan, self.documents)

    def is_new(self, made: Artifact) -> bool:
        """Whether an artifact like this has not been tried with the model yet."""
        found = made.exits + repr(made.config) + repr(made.recording)
        self._known, before = self._known | {found}, self._known
        return found not in before


class Characters:
    """A tokenizer: every character is a token."""

    chat_template, pad_token_id = None, 0

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        """Token ids."""
        return {"input_ids": [[3 + ord(c) % 90 for c in text] for text in texts]}


def good_artifact(model: Any, runner: Any) -> Artifact:
    """An artifact with every part that one can have."""
    head = ExitHead("affine", HIDDEN)
    torch.nn.init.normal_(head.affine.weight, std=0.1)  # type: ignore[union-attr]
    positions, names = 5, ("router", "prefilter", "confidence")
    first = Thresholds(router=0.3, top_probability=0.1)
    made = Artifact(
        fingerprint(model, runner.parts), HIDDEN,
        [
            Checkpoint(0, head, TokenRouter(HIDDEN, 4), first),
            Checkpoint(
                2, ExitHead("identity", HIDDEN), None, Thresholds(confidence=0.4, prefilter=0.3),
                ConfidenceModel(("head", "table")), ConfidenceModel(("candidates",)),
            ),
        ],
        TIDEConfig(exit_threshold=None, min_layers=0, drafts=("context", "table")),
        torch.arange(0, VOCABULARY, 2),
        build_table([[4, 2, 6, 4, 2, 6, 8, 4]], VOCABULARY),
        {"model": "tiny", "used": ["0123456789ab"],
         "documents": {"fit": 2, "tuning": 1, "certify": 1}},
        candidates=torch.arange(0, 20, 2),
        recording=Recording(
            LAYERS, (0, 2), [[3, 4, 5, 6], [7, 8, 9, 4, 5]], [2, 2],
            {name: np.full((2, positions), 0.5, np.float32) for name in names},
            np.ones((2, positions), bool), np.full((positions, 2), 4, np.int32),
        ),
    )  # fmt: skip
    made.certificates = [
        Certificate(
            risk=0.05, delta=0.05, threshold_scale=1.0, thresholds=made.thresholds(1.0, 0),
            sequences=300, estimate=0.02, p_value=0.01, test="betting", loss=TOKEN_LOSS,
            model=made.fingerprint.to_dict(), exits=made.exits, min_layers=0, dtype="float32",
            kv_cache_strategy="deferred", batch=8,
            generation={"do_sample": False, "max_new_tokens": 64, "logits_processors": []},
            data="0123456789abcdef", tide="0",
        )
    ]  # fmt: skip
    return made


def good_run(certificate: Certificate) -> dict[str, Any]:
    """A result of `tide bench`."""
    spread = {"p20": 0.9, "p50": 1.1, "p80": 1.4}
    base = {"speedup": 1.0, "per_prompt_speedup": spread, "ms_per_token": 40.0, "tokens": 100}
    ours = {
        **base, "layers_run": 900, "layers_full": 1000, "ideal_speedup": 1.2, "exit_rate": 0.3,
        "exits_per_layer": {"7": 20, "19": 10}, "disagreement": 0.01, "threshold_scale": 1.0,
        "layer_calls_per_token": {"writing": 20.0, "maths": 18.0}, "drafts": ["context"],
    }  # fmt: skip
    return {
        "what": "benchmark",
        "conditions": {"model": "tiny", "threads": 2, "data": "prompts.jsonl"},
        "results": [
            {"method": "HF generate", **base},
            {"method": "lossless", **ours, "mode": "lossless", "certificate": None},
            {"method": "exit", **ours, "mode": "exit", "certificate": certificate.to_dict()},
        ],
    }


def write_header(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """An artifact whose header was changed, with the digest that belongs to it."""
    header, what = bad.changed_json(rng, ground.header)
    return _write(rng, ground, json.dumps(bad.signed(header, ground.tensors)), ground.tensors), what


def write_certificate(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """The same, but only the certificates were changed."""
    header, what = bad.changed_json(rng, ground.header, ("certificates",))
    return _write(rng, ground, json.dumps(bad.signed(header, ground.tensors)), ground.tensors), what


def write_tensors(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """An artifact whose tensors were changed, with the digest that belongs to them."""
    tensors, what = bad.changed_tensors(rng, ground.tensors)
    return _write(rng, ground, json.dumps(bad.signed(ground.header, tensors)), tensors), what


def write_text(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """An artifact whose header is hardly JSON."""
    good = json.dumps(bad.signed(ground.header, ground.tensors))
    text, what = bad.changed_text(rng, good)
    return _write(rng, ground, text, ground.tensors), what


def write_bytes(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """A safetensors file that was changed below its tensors."""
    path = _write(
        rng, ground, json.dumps(bad.signed(ground.header, ground.tensors)), ground.tensors
    )
    file = path if path.is_file() else path / "tide.safetensors"
    raw, what = bad.changed_bytes(rng, file.read_bytes())
    file.write_bytes(raw)
    return path, what


def write_pickle(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """A pickle under one of the names that an artifact may have."""
    text = json.dumps(bad.signed(ground.header, ground.tensors))
    raw, what = bad.pickled(rng, ground.canary, text, ground.tensors)
    path = ground.inside / rng.choice(FORMS[1:])
    path.write_bytes(raw)
    return path, what


def write_folder(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """A folder as from the hub, with code, links, or things that are not files in it."""
    path = ground.inside / rng.choice(
        ("router", "r o\u202eu", "名前", "-rf", "a;b", "$(id)", "x" * 200)
    )
    bad.write_artifact(path, json.dumps(bad.signed(ground.header, ground.tensors)), ground.tensors)
    how = rng.randrange(4)
    if how == 0:
        return path, bad.add_code(rng, path, ground.canary)
    if how == 1:
        return path, bad.add_links(rng, path, ground.outside)
    return path, bad.folder_trick(rng, path, ground.outside)


def _write(rng: random.Random, ground: Ground, text: bytes | str, tensors: Any) -> Path:
    path = ground.inside / rng.choice(FORMS)
    bad.write_artifact(path, text, tensors)
    return path


def read_artifact(path: Path, ground: Ground) -> None:
    """Load, certify a claim, save again, and generate: what a user does with an artifact."""
    made = Artifact.from_pretrained(path)
    with contextlib.suppress(CertificateError):
        find_certificate(made, CertificateQuery(0.02, 0.05, "float32", "deferred"))
    for target in (path.with_name("again.safetensors"), path if path.is_dir() else None):
        if target is not None:
            made.save_pretrained(target) if target.is_dir() else made.save(target)
            again = Artifact.load(target)
            same = json.dumps(again._header()) == json.dumps(made._header())  # also with NaN in it
            assert same, "the header does not come back the same"
            assert again.exits == made.exits, "the tensors do not come back the same"
    if ground.is_new(made):
        for config in (TIDEConfig(mode="lossless"), TIDEConfig(exit_threshold=None, min_layers=0)):
            _generate(made, config, ground)


def _generate(made: Artifact, config: TIDEConfig, ground: Ground) -> None:
    try:
        engine = TIDE(ground.model, made, config, allow_mismatch=True, check=False)
    except TideError:  # valid, and not for this model or not with this mode
        return
    engine._machinery.prepare = lambda *args: None  # type: ignore[method-assign]  # times passes
    found = engine.generate(IDS, max_new_tokens=6, do_sample=False)
    if config.mode == "lossless":
        assert torch.equal(found, ground.expected), "other tokens than the model's own"
    assert 0 <= int(found.min()) <= int(found.max()) < VOCABULARY, "tokens out of range"


def write_work(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """A work folder of an interrupted calibration in which a file was changed."""
    path = ground.inside / "work"
    shutil.copytree(ground.work, path)
    file = rng.choice(sorted(path.iterdir()))
    if file.suffix == ".json":
        if rng.random() < 0.5:
            wrong, what = bad.changed_json(rng, json.loads(file.read_text()))
            file.write_text(json.dumps(wrong))
        else:
            raw, what = bad.changed_text(rng, file.read_text())
            file.write_bytes(raw)
    elif rng.random() < 0.5:
        tensors, what = bad.changed_tensors(rng, load_file(file))
        file.write_bytes(bad.save(tensors))
    else:
        raw, what = bad.changed_bytes(rng, file.read_bytes())
        file.write_bytes(raw)
    if rng.random() < 0.1:
        shutil.copy(file, path / f"fit-{rng.randrange(90000):05d}.safetensors")
    return path, f"{file.name}: {what}"


def read_work(path: Path, ground: Ground) -> None:
    """Resume a calibration as far as the collected states are read."""
    collection = ground.collection(path)
    collection.collect(ground.runner, Characters())
    load_or_measure(path / "costs.json", ground.runner, 0, TIDEConfig(), 1)
    for split in ("fit", "tuning"):
        states = [unit.states[0] for unit in collection.units(split)]
        also = list(collection.states(split, 0))
        assert all(torch.equal(a, b) for a, b in zip(states, also, strict=True))
        answers = list(collection.answers(split))
        assert all(0 <= token < VOCABULARY for some in answers for token in some)
    choose_vocabulary(collection, 8, VOCABULARY)
    build_table(collection.answers("fit"), VOCABULARY)


def write_run(rng: random.Random, ground: Ground) -> tuple[Path, str]:
    """A benchmark in which values were changed."""
    path = ground.inside / "run.json"
    if rng.random() < 0.15:
        raw, what = bad.changed_text(rng, json.dumps(ground.run))
        path.write_bytes(raw)
        return path, what
    run, what = bad.changed_json(rng, ground.run)
    path.write_text(json.dumps(run))
    return path, what


def read_run(path: Path, ground: Ground) -> None:
    """Make the page, and see that nothing in it came to life."""
    html = path.with_name("page.html")
    with contextlib.redirect_stdout(io.StringIO()):
        report.run(argparse.Namespace(runs=[path], html=html, png=None))
    page = Tags()
    page.feed(html.read_text(encoding="utf-8"))
    assert not page.alive, f"in the page: {page.alive[:3]}"


class Tags(HTMLParser):
    """Finds elements of a page that run, fetch or lead somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that may do something."""
        if tag in ("script", "img", "iframe", "object", "embed", "form", "link", "base", "b"):
            self.alive.append(tag)
        for name, value in attrs:
            if name.startswith("on") or "javascript:" in (value or ""):
                self.alive.append(f"{tag} {name}")
            if name in ("href", "src", "xlink:href") and not (value or "").startswith("#"):
                self.alive.append(f"{tag} {name}={value}")


@dataclass(frozen=True)
class Surface:
    """Something that is read from strangers.

    Attributes:
        title: for the table.
        weight: share of the cases.
        write: writes a hostile one; returns where, and what was done to it.
        read: reads it as a user would.
        errors: what may stop it.
    """

    title: str
    weight: int
    write: Callable[[random.Random, Ground], tuple[Path, str]]
    read: Callable[[Path, Ground], None]
    errors: tuple[type[Exception], ...]

    def warm_up(self, ground: Ground) -> Path:
        """A good one."""
        ground.clean()
        if self.read is read_run:
            path = ground.inside / "run.json"
            path.write_text(json.dumps(ground.run))
            return path
        if self.read is read_work:
            return Path(shutil.copytree(ground.work, ground.inside / "work"))
        files.write(ground.inside / "router", ground.header, ground.tensors)
        return ground.inside / "router"


_ARTIFACT = (ArtifactError,)
SURFACES = {
    "header": Surface("header of an artifact", 26, write_header, read_artifact, _ARTIFACT),
    "certificate": Surface("certificates", 12, write_certificate, read_artifact, _ARTIFACT),
    "tensors": Surface("tensors of an artifact", 18, write_tensors, read_artifact, _ARTIFACT),
    "text": Surface("text of the header", 6, write_text, read_artifact, _ARTIFACT),
    "bytes": Surface("`.safetensors` file", 14, write_bytes, read_artifact, _ARTIFACT),
    "pickle": Surface("`.pt` file", 6, write_pickle, read_artifact, _ARTIFACT),
    "folder": Surface(
        "folder with code, links, devices", 8, write_folder, read_artifact, _ARTIFACT
    ),
    "work": Surface("calibration work folder", 6, write_work, read_work, (DataError,)),
    "report": Surface("benchmark for `tide report`", 2, write_run, read_run, (DataError,)),
}
