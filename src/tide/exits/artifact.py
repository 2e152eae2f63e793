"""The artifact: what calibration made for one model, as JSON and safetensors.

The forms it may have on disk are in `tide.exits.files`. Unknown keys, missing tensors and another
model's fingerprint are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tide.config import TIDEConfig
from tide.errors import ArtifactError
from tide.exits import files
from tide.exits.card import model_card
from tide.exits.certificate import Certificate
from tide.exits.checkpoint import MOST_HIDDEN, Checkpoint, read_checkpoint
from tide.exits.recording import Recording
from tide.exits.table import MOST_TOKENS, check_table
from tide.models.fingerprint import Fingerprint
from tide.strangers import listed, mapping, require_keys, shown, text, whole

SCHEMA = 3


@dataclass
class Artifact:
    """Everything an engine needs beside the model.

    Attributes:
        fingerprint: of the model it was made for.
        hidden_size: size of that model's hidden state.
        checkpoints: the exits, by depth; may be empty.
        config: the settings it was made with.
        vocabulary: token ids that the exit heads read, `[v]`; None for all.
        candidates: token ids that prefilters read, `[c]`; None if there are none.
        table: tensors of the draft table; empty for none.
        record: how it was made, for people and for `tide report`; certification reads which prompts
            were `used`, and on which it has `failed`.
        certificates: which risks hold, and under which conditions.
        recording: held-out answers, by which exits and drafts are compared; None for none.
    """

    fingerprint: Fingerprint
    hidden_size: int
    checkpoints: list[Checkpoint] = field(default_factory=list)
    config: TIDEConfig = field(default_factory=TIDEConfig)
    vocabulary: Tensor | None = None
    table: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)
    candidates: Tensor | None = None
    recording: Recording | None = None

    @property
    def exits(self) -> str:
        """Digest of all that decides which tokens exit, and as what; a certificate is for one."""
        header = {"checkpoints": self._header()["checkpoints"]}
        tensors = {n: t for n, t in self._tensors().items() if not n.startswith("recording.")}
        return files.digest(header, tensors)[:16]

    def checkpoints_from(self, min_layers: int) -> list[Checkpoint]:
        """The checkpoints that are at least so deep."""
        return [c for c in self.checkpoints if c.layer + 1 >= min_layers]

    def thresholds(
        self, threshold_scale: float, min_layers: int
    ) -> dict[str, dict[str, float | None]]:
        """The scaled thresholds by layer, as JSON values."""
        return {
            str(c.layer): asdict(c.thresholds.scaled(threshold_scale))
            for c in self.checkpoints_from(min_layers)
        }

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
                f"{path}: {files.reason(error)}. The artifact was written by another version, or "
                "edited; make it again with `tide calibrate`."
            ) from error

    def save_pretrained(self, folder: str | Path, *, name: str | None = None) -> Path:
        """Write a folder, with the card that people read on the hub and the way in for `generate`.

        Args:
            folder: where to write.
            name: the hub id, if the folder is to be uploaded; by default, `generate` looks for the
                artifact where it was written.
        """
        try:
            card = model_card(self.record)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise ArtifactError(
                f"There is no model card for this record ({files.reason(error)}): it is not as "
                "calibration writes it. To save the artifact without it, keep `used` and `failed`, "
                "by which certification knows what it must not test on."
            ) from error
        entry = files.custom_generate(name or str(Path(folder).resolve()))
        for path in entry:
            if (inner := Path(folder, path).parent).is_symlink():
                raise ArtifactError(
                    f"{inner} is a link, and what is saved must stay in its folder. Remove the "
                    "link, or save elsewhere."
                )
        folder = self.save(folder)
        files.write_pages(folder, {files.CARD: card, **entry})
        return folder

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> Artifact:
        """Read an artifact from disk or, if there is no such file, from the hub."""
        if Path(name).exists() or not files.HUB_ID.fullmatch(str(name)):
            return cls.load(name)
        from huggingface_hub import snapshot_download

        wanted = [files.HEADER, *files.TENSORS]
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
            self.save_pretrained(Path(folder) / "artifact", name=name)
            done = api.upload_folder(
                repo_id=name,
                folder_path=str(Path(folder) / "artifact"),
                delete_patterns=[*files.TENSORS],  # of an artifact that was there before
            )
        return str(done)

    def require(self, fingerprint: Fingerprint, *, force: bool = False) -> None:
        """Raise unless the artifact was made for the model with this fingerprint."""
        differing = self.fingerprint.differences(fingerprint)
        if differing and not force:
            raise ArtifactError(
                f"This artifact was made for another model: {', '.join(differing)} differ. "
                "Calibrate this model with `tide calibrate`, or pass allow_mismatch=True if you "
                "know that they are alike."
            )

    def require_sizes(self, hidden_size: int, vocabulary_size: int) -> None:
        """Raise unless states and token ids of a model with these sizes fit the artifact."""
        if self.hidden_size != hidden_size:
            raise ArtifactError(
                f"This artifact is for hidden size {self.hidden_size}; the model has "
                f"{hidden_size}. Calibrate this model with `tide calibrate`."
            )
        last = [int(ids.max()) for _, ids in self._token_lists() if ids is not None]
        last += [int(self.table["vocabulary_size"]) - 1] if self.table else []
        if max(last, default=0) >= vocabulary_size:
            raise ArtifactError(
                f"This artifact has token ids up to {max(last)}; the model has {vocabulary_size} "
                "tokens. Calibrate this model with `tide calibrate`."
            )

    def _header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint.to_dict(),
            "hidden_size": self.hidden_size,
            "config": self.config.to_dict(),
            "checkpoints": [checkpoint.header() for checkpoint in self.checkpoints],
            "table": sorted(self.table),
            "recording": sorted(self._recording()),
            **{name: None if ids is None else len(ids) for name, ids in self._token_lists()},
            "record": self.record,
            "certificates": [certificate.to_dict() for certificate in self.certificates],
        }

    def _token_lists(self) -> tuple[tuple[str, Tensor | None], ...]:
        return ("vocabulary", self.vocabulary), ("candidates", self.candidates)

    def _recording(self) -> dict[str, Tensor]:
        return self.recording.tensors() if self.recording is not None else {}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"table.{name}": tensor for name, tensor in self.table.items()}
        tensors |= {f"recording.{name}": tensor for name, tensor in self._recording().items()}
        tensors |= {name: ids for name, ids in self._token_lists() if ids is not None}
        for i, checkpoint in enumerate(self.checkpoints):
            for name, tensor in checkpoint.tensors().items():
                tensors[f"checkpoints.{i}.{name}"] = tensor
        return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}

    @classmethod
    def _from(cls, header: Any, tensors: dict[str, Tensor]) -> Artifact:
        if isinstance(header, Mapping) and header.get("schema") != SCHEMA:
            raise ValueError(
                f"it has schema {header.get('schema')}, and this version reads {SCHEMA}"
            )
        require_keys(header, _HEADER_KEYS, "the artifact")
        require_keys(header["fingerprint"], {"config", "head", "layers"}, "the fingerprint")
        mapping(header["fingerprint"], "the fingerprint", text)
        mapping(header["config"], "config")
        record = mapping(header["record"], "record")
        listed(record.get("used", []), "used", text)
        for keys in mapping(record.get("failed", {}), "failed").values():
            listed(keys, "failed", text)
        certificates = listed(header["certificates"], "certificates", most=256)
        hidden_size = whole(header["hidden_size"], "hidden_size", 1, MOST_HIDDEN)
        tensors = dict(tensors)
        checkpoints = [
            read_checkpoint(i, entry, hidden_size, tensors)
            for i, entry in enumerate(listed(header["checkpoints"], "checkpoints", most=256))
        ]
        table, recorded = (
            {name: tensors.pop(f"{part}.{name}") for name in listed(header[part], part, text)}
            for part in ("table", "recording")
        )
        check_table(table)
        vocabulary, candidates = (
            _token_ids(tensors.pop(name), header[name], name) if header[name] is not None else None
            for name in ("vocabulary", "candidates")
        )
        if tensors:
            raise ValueError(f"unknown tensors {shown(sorted(tensors))}")
        made = cls(
            Fingerprint(**header["fingerprint"]),
            hidden_size,
            checkpoints,
            TIDEConfig.from_dict(header["config"]),
            vocabulary,
            table,
            header["record"],
            [Certificate.from_dict(entry) for entry in certificates],
            candidates,
            Recording.of(recorded) if recorded else None,
        )
        made._check_parts()
        return made

    def _check_parts(self) -> None:
        """Raise unless the parts, each valid by itself, fit together."""
        layers = [c.layer for c in self.checkpoints]
        if layers != sorted(set(layers)):
            raise ValueError(f"the checkpoints are after layers {shown(layers)}; they must ascend")
        wanted = [c.thresholds for c in self.checkpoints]
        if self.candidates is None:
            if any(thresholds.prefilter is not None for thresholds in wanted):
                raise ValueError("there is a prefilter threshold, and no candidates")
        elif self.vocabulary is not None and not torch.isin(self.candidates, self.vocabulary).all():
            raise ValueError("a candidate is not in the vocabulary")
        if self.recording is not None:
            if not set(layers) <= set(self.recording.layers):
                raise ValueError(f"the recording is for layers {self.recording.layers}")
            for name in ("router", "prefilter", "confidence"):
                used = any(getattr(thresholds, name) is not None for thresholds in wanted)
                if used and name not in self.recording.scores:
                    raise ValueError(f"the recording has no scores for the {name} threshold")


def _token_ids(ids: Tensor, count: Any, what: str) -> Tensor:
    """Token ids, if they are that many, two at least, and each is there once."""
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) < 2 or len(ids) != count:
        raise ValueError(f"{what} must be {shown(count)} token ids, 64 bits each, and at least 2")
    if not 0 <= int(ids.min()) <= int(ids.max()) < MOST_TOKENS or len(ids.unique()) != len(ids):
        raise ValueError(f"{what} must be different token ids from 0 to {MOST_TOKENS - 1}")
    return ids


_HEADER_KEYS = {
    "schema", "fingerprint", "hidden_size", "config", "checkpoints", "table", "vocabulary",
    "candidates", "recording", "record", "certificates",
}  # fmt: skip
