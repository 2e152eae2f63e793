"""Gives the artifact: what calibration made for one model, as JSON and safetensors.

A folder with `tide.json` and `tide.safetensors`, or one `.safetensors` file with the JSON in its
metadata. A `.pt` file holds the same and is read with `weights_only=True`, so no artifact can run
code. Unknown keys, missing tensors and another model's fingerprint are errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tide.config import EXIT_STRATEGIES, TIDEConfig
from tide.errors import ArtifactError
from tide.exits.heads import ExitHead
from tide.exits.policy import Gate
from tide.exits.routers import TokenRouter
from tide.models.fingerprint import Fingerprint

SCHEMA = 1
_JSON, _TENSORS = "tide.json", "tide.safetensors"


@dataclass
class Checkpoint:
    """One exit: the layer after which it sits (from 0), its head, its router and its thresholds."""

    layer: int
    head: ExitHead
    router: TokenRouter | None = None
    gate: Gate = field(default_factory=Gate)


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
    """

    fingerprint: Fingerprint
    hidden_size: int
    checkpoints: list[Checkpoint] = field(default_factory=list)
    config: TIDEConfig = field(default_factory=TIDEConfig)
    vocabulary: Tensor | None = None
    table: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> Path:
        """Write a folder, or one file if `path` ends in `.safetensors` or `.pt`."""
        path = Path(path)
        header, tensors = json.dumps(self._header(), indent=2), self._tensors()
        if path.suffix == ".pt":
            torch.save({"header": header, "tensors": tensors}, path)
        elif path.suffix == ".safetensors":
            save_file(tensors, path, metadata={"tide": header})
        else:
            path.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path / _TENSORS)
            (path / _JSON).write_text(header + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Read an artifact; nothing in it is executed.

        Raises:
            ArtifactError: if it is missing, damaged, of another schema, or not an artifact.
        """
        path = Path(path)
        header, tensors = _read(path)
        try:
            return cls._from(header, tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ArtifactError(
                f"{path}: {_reason(error)}. The artifact is damaged or was written by another "
                "version; make it again with `tide calibrate`."
            ) from error

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
                    else {
                        "bottleneck": checkpoint.router.up.in_features,
                        "features": list(checkpoint.router.features),
                    },
                    "gate": {
                        "router": checkpoint.gate.router,
                        "top_probability": checkpoint.gate.top_probability,
                    },
                }
                for checkpoint in self.checkpoints
            ],
            "table": sorted(self.table),
            "vocabulary": None if self.vocabulary is None else len(self.vocabulary),
            "record": self.record,
        }

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"table.{name}": tensor for name, tensor in self.table.items()}
        if self.vocabulary is not None:
            tensors["vocabulary"] = self.vocabulary
        for i, checkpoint in enumerate(self.checkpoints):
            for part in ("head", "router"):
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
            },
            "the artifact",
        )
        if header["schema"] != SCHEMA:
            raise ValueError(f"schema {header['schema']} is not {SCHEMA}")
        hidden_size, tensors = int(header["hidden_size"]), dict(tensors)
        checkpoints = []
        for i, row in enumerate(header["checkpoints"]):
            where = f"checkpoint {i}"
            _keys(row, {"layer", "strategy", "tail_layers", "router", "gate"}, where)
            _keys(row["gate"], {"router", "top_probability"}, f"the gate of {where}")
            if row["strategy"] not in EXIT_STRATEGIES:
                raise ValueError(f"unknown exit strategy {row['strategy']!r} at {where}")
            head = ExitHead(row["strategy"], hidden_size, int(row["tail_layers"]))
            router = None
            if row["router"] is not None:
                _keys(row["router"], {"bottleneck", "features"}, f"the router of {where}")
                router = TokenRouter(
                    hidden_size, int(row["router"]["bottleneck"]), tuple(row["router"]["features"])
                )
            for part, module in (("head", head), ("router", router)):
                if module is not None:
                    prefix = f"checkpoints.{i}.{part}."
                    names = [name for name in tensors if name.startswith(prefix)]
                    state = {name.removeprefix(prefix): tensors.pop(name) for name in names}
                    module.load_state_dict(state)  # strict: raises on a missing or strange tensor
                    module.to(next(iter(state.values())).dtype if state else torch.float32)
                    module.requires_grad_(False)
            checkpoints.append(Checkpoint(int(row["layer"]), head, router, Gate(**row["gate"])))
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
        )


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """The header and the tensors of any of the three forms."""
    if not path.exists():
        raise ArtifactError(
            f"There is no artifact at {path}. Make one with `tide calibrate MODEL -o {path}` or "
            "tide.calibrate(model, tokenizer, save_path=...)."
        )
    try:
        if path.is_dir():
            return json.loads((path / _JSON).read_text()), load_file(path / _TENSORS)
        if path.suffix == ".pt":
            stored = torch.load(path, map_location="cpu", weights_only=True)
            _keys(stored, {"header", "tensors"}, "the file")
            return json.loads(stored["header"]), stored["tensors"]
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})["tide"]), load_file(path)
    except ArtifactError:
        raise
    except Exception as error:
        # torch.load raises a different class for every way in which a pickle can be bad.
        raise ArtifactError(
            f"{path} cannot be read as a TIDE artifact ({_reason(error)}). It is damaged, is not "
            "an artifact, or holds code, which is never run. Make it again with `tide calibrate`."
        ) from error


def _keys(row: Any, allowed: set[str], what: str) -> None:
    if not isinstance(row, Mapping):
        raise TypeError(f"{what} is a {type(row).__name__}, not an object")
    if set(row) != allowed:
        strange, missing = sorted(set(row) - allowed), sorted(allowed - set(row))
        raise ValueError(f"{what} has unknown keys {strange} and lacks {missing}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
