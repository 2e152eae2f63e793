"""The files of an artifact: a header in JSON and tensors, with a digest over both.

A folder with `tide.json` and the `.safetensors` file that its digest names, or one file of that
format with the JSON in its metadata. So is a `.pt` file: a pickle is never read, since whether
`weights_only=True` keeps out code is up to the torch at hand, and it does not bound the memory.
Knows nothing of what the header means.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tide.errors import ArtifactError, StorageError
from tide.strangers import parse_json, read_json, require_file, require_small, shown

HEADER, CARD = "tide.json", "README.md"
# Tensors in a folder, as patterns: named by digest or, by earlier versions, without.
TENSORS = (f"tide-{'[0-9a-f]' * 16}.safetensors", "tide.safetensors")
ONE_FILE = (".safetensors", ".pt")  # endings of an artifact that is one file
MOST_TENSORS = 8192
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")

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
    try:
        require_small(text)
    except ValueError as error:
        raise ArtifactError(
            f"{path} could not be read again: {error}. Remove what is large from `record`, but not "
            "`used` and `failed`."
        ) from error
    if path.suffix in ONE_FILE:
        write_whole(path, lambda p: save_file(dict(tensors), p, metadata={"tide": text}))
        return
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path if path.exists() else _scratch(path)
        try:
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
        finally:
            if folder != path:
                shutil.rmtree(folder, ignore_errors=True)


def write_pages(folder: Path, pages: Mapping[str, str]) -> None:
    """Write pages by their paths in a folder; what others have put there stays, with a warning."""
    for name, page in pages.items():
        path, raw = folder / name, page.encode("utf-8", "replace")
        ours = b"library_name: tide" if name == CARD else b"tide"
        theirs = path.is_file() and not path.is_symlink() and ours not in path.read_bytes()
        if theirs:  # such as the card of the model itself
            warnings.warn(f"{path} was not written by TIDE, so it stays.", stacklevel=4)
        else:
            write_whole(path, lambda scratch, raw=raw: scratch.write_bytes(raw))  # type: ignore[misc]


def is_artifact(name: str) -> bool:
    """Whether a name, or any other text, is the path of an artifact."""
    of_file = name.endswith(ONE_FILE) and os.path.isfile(name)
    return of_file or os.path.isfile(os.path.join(name, HEADER))  # pathlib raises for long names


def require_writable(path: Path) -> None:
    """Raise if nothing could be written to a path, before the work whose result goes there."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in {path.parent, path} if path.is_dir() else {path.parent}:
            with TemporaryFile(dir=folder):
                pass


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
        header, tensors = _read(path)
        written, found = header.pop("digest"), digest(header, tensors)
    except Exception as error:
        # safetensors and torch raise a different class for every way in which a file can be bad.
        raise ArtifactError(
            f"{path} cannot be read as a TIDE artifact ({reason(error)}). It is damaged, is not "
            "an artifact, or is a pickle, which may hold code and is never read. Make it again "
            "with `tide calibrate`."
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
        found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def reason(error: Exception) -> str:
    """An error in one short line that a terminal only prints: it may quote a stranger's file."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {''.join(c if c.isprintable() else '?' for c in text)}"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if path.is_dir():
        header = _header(read_json(path / HEADER))
        named = path / _tensors_of(header["digest"])
        tensors = named if named.exists() else path / TENSORS[-1]
        return header, _tensors(tensors)[0]
    found, metadata = _tensors(path)
    return _header(parse_json(metadata["tide"])), found


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, if they are not too many, and its metadata."""
    require_file(path)
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        if len(names) > MOST_TENSORS:
            raise ValueError(f"it has {len(names)} tensors; at most {MOST_TENSORS} are allowed")
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def _header(found: Any) -> dict[str, Any]:
    """A header, whose digest may be used in the name of a file."""
    written = found.get("digest") if isinstance(found, dict) else None
    if not isinstance(written, str) or not _DIGEST.fullmatch(written):
        raise ValueError(f"its digest is {shown(written)}; it must be 64 hex digits")
    return found


def _tensors_of(digest: str) -> str:
    """The file in a folder that holds the tensors of the artifact with this digest."""
    return f"tide-{digest[:16]}.safetensors"


def write_whole(path: Path, save: Callable[[Path], Any]) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        StorageError: if the disk is full, or may not be written.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _scratch(path)
        try:
            scratch.touch()  # with the permissions that this process gives to new files
            permissions = scratch.stat().st_mode
            save(scratch)
            if scratch.stat().st_mode != permissions:  # safetensors lets the owner alone read
                scratch.chmod(permissions)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name what could not be written.

    Raises:
        StorageError: in place of an error of the disk.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path} could not be written ({reason(error)}). What was there before is unchanged. "
            "Free some space or name another place, then run this again."
        ) from error


def _scratch(path: Path) -> Path:
    """A name beside `path` that no other process takes, on any machine that shares the folder."""
    return path.with_name(f".{uuid4().hex}-{path.name}")
