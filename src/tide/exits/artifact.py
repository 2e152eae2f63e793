"""Gives the artifact: what calibration made for one model, as JSON and safetensors.

The forms it may have on disk are in `tide.exits.files`. Unknown keys, missing tensors and another
model's fingerprint are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tide.config import EXIT_STRATEGIES, TIDEConfig
from tide.errors import ArtifactError, CertificateError
from tide.exits import files
from tide.exits.blend import Blend
from tide.exits.card import model_card
from tide.exits.certificate import Certificate
from tide.exits.heads import ExitHead
from tide.exits.policy import Gate
from tide.exits.routers import TokenRouter
from tide.models.fingerprint import Fingerprint

SCHEMA = 1
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Checkpoint:
    """One exit: the layer after which it sits (from 0), its head, and what decides who leaves."""

    layer: int
    head: ExitHead
    router: TokenRouter | None = None
    gate: Gate = field(default_factory=Gate)
    blend: Blend | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move it to where it is asked; only the head takes the model's dtype."""
        self.head.to(device, dtype)
        for judge in (self.router, self.blend):
            if judge is not None:
                judge.to(device)


@dataclass
class Artifact:
    """Everything an engine needs beside the model.

    Attributes:
        fingerprint: of the model it was made for.
        hidden_size: size of that model's hidden state.
        checkpoints: the exits, by depth; may be empty.
        config: the settings it was made with.
        vocabulary: token ids that the exit heads read, `[v]`; None for all.
        table: tensors of the draft table; empty for none.
        record: how it was made, for people and for `tide report`; not read by the engine.
        certificates: which risks hold, and under which conditions.
    """

    fingerprint: Fingerprint
    hidden_size: int
    checkpoints: list[Checkpoint] = field(default_factory=list)
    config: TIDEConfig = field(default_factory=TIDEConfig)
    vocabulary: Tensor | None = None
    table: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)

    @property
    def exits(self) -> str:
        """Digest of all that decides who leaves and with which token; a certificate is for one."""
        header = {"checkpoints": self._header()["checkpoints"]}
        return files.digest(header, self._tensors())[:16]

    def above(self, min_layers: int) -> list[Checkpoint]:
        """The checkpoints that are at least so deep."""
        return [c for c in self.checkpoints if c.layer + 1 >= min_layers]

    def thresholds(self, boldness: float, min_layers: int) -> dict[str, dict[str, float | None]]:
        """The gates at some boldness, by layer, as plain JSON."""
        return {str(c.layer): asdict(c.gate.at(boldness)) for c in self.above(min_layers)}

    def save(self, path: str | Path) -> Path:
        """Write a folder, or one file if `path` ends in `.safetensors` or `.pt`."""
        path = Path(path)
        files.write(path, self._header(), self._tensors())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read an artifact; nothing in it is executed.

        Raises:
            ArtifactError: if it is missing, damaged, of another schema, or not an artifact.
        """
        path = Path(path)
        header, tensors = files.read(path)
        try:
            return cls._from(header, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ArtifactError(
                f"{path}: {files.reason(error)}. The artifact was written by another version; make "
                "it again with `tide calibrate`."
            ) from error

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a folder, with the card that people read on the hub and the door for `generate`."""
        folder = self.save(folder)
        for name, text in {files.CARD: model_card(self.record), **files.CUSTOM_GENERATE}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        return folder

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> Artifact:
        """Read an artifact from disk or, if there is no such file, from the hub."""
        if Path(name).exists() or not _HUB_ID.fullmatch(str(name)):
            return cls.load(name)
        from huggingface_hub import snapshot_download

        wanted = [files.HEADER, files.TENSORS]
        try:
            found = snapshot_download(str(name), revision=revision, allow_patterns=wanted)
        except Exception as error:  # offline, unknown and private all have classes of their own
            raise ArtifactError(
                f"There is no artifact at {name}, neither on disk nor on the hub "
                f"({files.reason(error)}). Make one with `tide calibrate MODEL -o DIR`."
            ) from error
        return cls.load(found)

    def push_to_hub(self, name: str, *, private: bool | None = None) -> str:
        """Upload the folder that `save_pretrained` writes; returns its address."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        with TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "artifact")
            done = api.upload_folder(repo_id=name, folder_path=str(Path(folder) / "artifact"))
        return str(done)

    def covering(
        self,
        risk: float,
        delta: float,
        dtype: str,
        kv_cache_strategy: str,
        min_layers: int | None = None,
    ) -> Certificate:
        """The boldest certificate that covers a risk under some conditions.

        Args:
            min_layers: exits below this depth are not used; None to take what is certified.

        Raises:
            CertificateError: if there is none; says what there is, and how to make one.
        """
        layers = None if min_layers is None else [c.layer for c in self.above(min_layers)]
        exits, reasons, found = self.exits, [], []
        for certificate in self.certificates:
            misses = certificate.misses(risk, delta, exits, dtype, kv_cache_strategy, layers)
            reasons += ["; ".join(misses)] if misses else []
            found += [] if misses else [certificate]
        if not found:
            there = f" There is one that {', one that '.join(reasons)}." if reasons else ""
            raise CertificateError(
                f"No certificate covers risk {risk} at delta {delta} with {dtype} and "
                f"kv_cache_strategy={kv_cache_strategy!r}.{there} Make one with `tide certify "
                f"MODEL DIR --risk {risk} --dtype {dtype} --kv {kv_cache_strategy} --data "
                "prompts.jsonl`."
            )
        # Of equally bold ones that which promises what was asked for, and not less.
        return max(found, key=lambda certificate: (certificate.boldness, certificate.risk))

    def require(self, fingerprint: Fingerprint, *, force: bool = False) -> None:
        """Raise unless the artifact was made for the model with this fingerprint."""
        differing = self.fingerprint.differences(fingerprint)
        if differing and not force:
            raise ArtifactError(
                f"This artifact was made for another model: {', '.join(differing)} differ. "
                "Calibrate this model with `tide calibrate`, or pass allow_mismatch=True if you "
                "know that they are alike."
            )

    def _header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint.to_dict(),
            "hidden_size": self.hidden_size,
            "config": self.config.to_dict(),
            "checkpoints": [
                {
                    "layer": checkpoint.layer,
                    "strategy": checkpoint.head.strategy,
                    "tail_layers": checkpoint.head.tail_layers,
                    "router": None
                    if checkpoint.router is None
                    else {"bottleneck": checkpoint.router.up.in_features},
                    "gate": asdict(checkpoint.gate),
                    "blend": None
                    if checkpoint.blend is None
                    else {"features": list(checkpoint.blend.features)},
                }
                for checkpoint in self.checkpoints
            ],
            "table": sorted(self.table),
            "vocabulary": None if self.vocabulary is None else len(self.vocabulary),
            "record": self.record,
            "certificates": [certificate.to_dict() for certificate in self.certificates],
        }

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"table.{name}": tensor for name, tensor in self.table.items()}
        if self.vocabulary is not None:
            tensors["vocabulary"] = self.vocabulary
        for i, checkpoint in enumerate(self.checkpoints):
            for part in ("head", "router", "blend"):
                module = getattr(checkpoint, part)
                if module is not None:
                    for name, tensor in module.state_dict().items():
                        tensors[f"checkpoints.{i}.{part}.{name}"] = tensor
        return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}

    @classmethod
    def _from(cls, header: Any, tensors: dict[str, Tensor]) -> Artifact:
        _keys(
            header,
            {
                "schema",
                "fingerprint",
                "hidden_size",
                "config",
                "checkpoints",
                "table",
                "vocabulary",
                "record",
                "certificates",
            },
            "the artifact",
        )
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema {header['schema']} is not {SCHEMA}")
        hidden_size, tensors = int(header["hidden_size"]), dict(tensors)
        checkpoints = []
        for i, row in enumerate(header["checkpoints"]):
            where = f"checkpoint {i}"
            _keys(row, {"layer", "strategy", "tail_layers", "router", "gate", "blend"}, where)
            _keys(row["gate"], {"router", "top_probability", "blend"}, f"the gate of {where}")
            if row["strategy"] not in EXIT_STRATEGIES:
                raise ValueError(f"unknown exit strategy {row['strategy']!r} at {where}")
            head = ExitHead(row["strategy"], hidden_size, int(row["tail_layers"]))
            router = None
            if row["router"] is not None:
                _keys(row["router"], {"bottleneck"}, f"the router of {where}")
                router = TokenRouter(hidden_size, int(row["router"]["bottleneck"]))
            blend = None
            if row["blend"] is not None:
                _keys(row["blend"], {"features"}, f"the blend of {where}")
                blend = Blend(tuple(row["blend"]["features"]))
            for part, module in (("head", head), ("router", router), ("blend", blend)):
                if module is not None:
                    prefix = f"checkpoints.{i}.{part}."
                    names = [name for name in tensors if name.startswith(prefix)]
                    state = {name.removeprefix(prefix): tensors.pop(name) for name in names}
                    module.load_state_dict(state)  # strict: raises on a missing or strange tensor
                    module.to(next(iter(state.values())).dtype if state else torch.float32)
                    module.requires_grad_(False)
            gate = Gate(**row["gate"])
            checkpoints.append(Checkpoint(int(row["layer"]), head, router, gate, blend))
        table = {name: tensors.pop(f"table.{name}") for name in header["table"]}
        vocabulary = tensors.pop("vocabulary") if header["vocabulary"] is not None else None
        if tensors:
            raise ValueError(f"unknown tensors {sorted(tensors)}")
        return cls(
            Fingerprint(**header["fingerprint"]),
            hidden_size,
            checkpoints,
            TIDEConfig.from_dict(header["config"]),
            vocabulary,
            table,
            header["record"],
            [Certificate.from_dict(row) for row in header["certificates"]],
        )


def _keys(row: Any, allowed: set[str], what: str) -> None:
    if not isinstance(row, Mapping):
        raise TypeError(f"{what} is a {type(row).__name__}, not an object")
    if set(row) != allowed:
        strange, missing = sorted(set(row) - allowed), sorted(allowed - set(row))
        raise ValueError(f"{what} has unknown keys {strange} and lacks {missing}")
