"""The files of an artifact: a header in JSON and tensors, with a digest over both.

A folder with `tide.json` and the `.safetensors` file that its digest names, or one `.safetensors`
file with the JSON in its metadata. A `.pt` file holds the same and is read with
`weights_only=True`, so no file can run code. Knows nothing of what the header means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tide.errors import ArtifactError

HEADER, CARD = "tide.json", "README.md"
# Tensors in a folder, as patterns: named by digest or, by earlier versions, without.
TENSORS = (f"tide-{'[0-9a-f]' * 16}.safetensors", "tide.safetensors")

# What `model.generate(custom_generate=FOLDER, trust_remote_code=True)` looks for. It first reads
# the imports, and for a missing one advises to install a package of the module's name, which is not
# ours; those inside a `try` are up to the requirements. It copies this file and runs the copy,
# so the file names the artifact that it belongs to.
_GENERATE = '''"""Decodes with the TIDE artifact of this repository."""

from functools import partial

try:
    from tide.integrations.huggingface import generate as _generate
except ImportError as error:
    raise ImportError("This needs TIDE: pip install tide-llm") from error

generate = partial(_generate, artifact={artifact!r})
'''


def custom_generate(artifact: str) -> dict[str, str]:
    """The files, by path, that let `generate` find an artifact.

    Args:
        artifact: its folder or hub id.
    """
    return {
        "custom_generate/generate.py": _GENERATE.format(artifact=artifact),
        "custom_generate/requirements.txt": "tide-llm\n",
    }


def write(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an artifact; an interruption at any moment keeps what was there, or the new one."""
    header = {**header, "digest": digest(header, tensors)}
    text = json.dumps(header, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        write_whole(path, lambda p: torch.save({"header": text, "tensors": dict(tensors)}, p))
    elif path.suffix == ".safetensors":
        write_whole(path, lambda p: save_file(dict(tensors), p, metadata={"tide": text}))
    else:
        folder = path if path.exists() else _scratch(path)
        folder.mkdir(exist_ok=True)
        # Tensors that were there stay until the header names the new ones.
        name = _tensors_of(header["digest"])
        write_whole(folder / name, lambda p: save_file(dict(tensors), p))
        write_whole(folder / HEADER, lambda p: p.write_text(text + "\n"))
        for other in (file for pattern in TENSORS for file in folder.glob(pattern)):
            if other.name != name:
                other.unlink(missing_ok=True)
        if folder != path:
            folder.replace(path)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of any of the three forms, as they were written.

    Raises:
        ArtifactError: if it is missing, cannot be read, or is not what was written.
    """
    if not path.exists():
        raise ArtifactError(
            f"There is no artifact at {path}. Make one with `tide calibrate MODEL -o {path}` or "
            "tide.calibrate(model, tokenizer, save_path=...)."
        )
    try:
        text, tensors = _read(path)
        header = json.loads(text)
        written, found = header.pop("digest"), digest(header, tensors)
    except Exception as error:
        # torch.load raises a different class for every way in which a pickle can be bad.
        raise ArtifactError(
            f"{path} cannot be read as a TIDE artifact ({reason(error)}). It is damaged, is not "
            "an artifact, or holds code, which is never run. Make it again with `tide calibrate`."
        ) from error
    if written != found:
        raise ArtifactError(
            f"{path} is not what was written: its digest differs. It was damaged or edited. Fetch "
            "it again, or make it again with `tide calibrate`."
        )
    return header, tensors


def digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the header and every tensor's name, type, shape and bytes."""
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def reason(error: Exception) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _read(path: Path) -> tuple[str, dict[str, Tensor]]:
    if path.is_dir():
        text = (path / HEADER).read_text()
        named = path / _tensors_of(json.loads(text)["digest"])
        return text, load_file(named if named.exists() else path / TENSORS[-1])
    if path.suffix == ".pt":
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return stored["header"], stored["tensors"]
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {})["tide"], load_file(path)


def _tensors_of(digest: str) -> str:
    """The file in a folder that holds the tensors of the artifact with this digest."""
    return f"tide-{digest[:16]}.safetensors"


def write_whole(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch(path)
    try:
        save(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    """A name beside `path` that no other process takes, on any machine that shares the folder."""
    return path.with_name(f".{uuid4().hex}-{path.name}")
