"""Gives the documents of a calibration: prompts from a file, a data set or a list, and their split.

What cannot be had is an error. There is no stand-in text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from tide.errors import DataError

SPLITS = ("fit", "gate", "certify")

# Prompts that come with the package: enough to see exits at work, too few and alike to serve with.
STARTER = Path(__file__).with_name("starter.txt")

# Keys of a JSON line under which a text is looked for, most common first.
_TEXT_KEYS = ("text", "prompt", "question", "instruction", "turns")


@dataclass(frozen=True)
class Documents:
    """Texts, each in exactly one split; what was fitted on is never certified on."""

    fit: tuple[str, ...]
    gate: tuple[str, ...]
    certify: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Identity of the texts and their split, 16 hex digits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for text in getattr(self, split):
                digest.update(f"{split} {len(text)} {text}".encode())
        return digest.hexdigest()[:16]


def load_texts(source: str | Path | Iterable[str], limit: int | None = None) -> list[str]:
    """Texts of a local file, a Hugging Face data set or a list, in their order, without repeats.

    Args:
        source: a `.txt` (a paragraph each), `.jsonl` or `.json` file, also gzipped; "starter" for
            prompts that come with the package, enough to look and not to serve; the name of a data
            set on the hub; or the texts themselves.
        limit: most texts to take.

    Raises:
        DataError: if there is no such file or data set, or no text in it.
    """
    if isinstance(source, (str, Path)):
        rows, name = _rows(source), str(source)
    else:
        rows, name = (("", text) for text in source), "the list given"
    return [text for _, text in _some(islice(_distinct(rows), limit), name)]


def load_by_category(source: str | Path, limit: int) -> list[tuple[str, str]]:
    """Categories and texts, the same number of each category as far as they go, without repeats.

    Rows of a `.jsonl` file may have a key "category"; a text without one has the category "".
    """
    rows = _distinct(_rows(source))
    if not _path(source).exists():
        rows = islice(rows, limit)  # a data set has no categories that we know, and may be large
    by: dict[str, list[tuple[str, str]]] = {}
    for category, text in _some(rows, str(source)):
        by.setdefault(category, []).append((category, text))
    turns = zip_longest(*by.values())
    return [row for turn in turns for row in turn if row is not None][:limit]


def split_documents(
    texts: Sequence[str], *, seed: int = 0, gate: float = 0.2, certify: float = 0.15
) -> Documents:
    """Split texts by document, at random by `seed`.

    Args:
        gate, certify: shares kept for choosing thresholds and for certification.
    """
    if len(texts) < 3:
        raise DataError(
            f"Got {len(texts)} texts; fitting, choosing and certifying need at least one each, and "
            "a useful calibration some hundreds."
        )
    order = list(texts)
    random.Random(seed).shuffle(order)
    n_gate, n_certify = (max(1, round(share * len(order))) for share in (gate, certify))
    rest = len(order) - n_gate - n_certify
    return Documents(
        tuple(order[:rest]), tuple(order[rest : rest + n_gate]), tuple(order[rest + n_gate :])
    )


def text_key(text: str) -> str:
    """A short name of a text, by which it is known again without being kept."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:12]


def encode_prompts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of prompts, through the tokenizer's chat template where it has one."""
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        encoded = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    else:
        encoded = tokenizer(list(texts))["input_ids"]
    # The end of a chat prompt is where the answer starts, so a long one is cut at its head.
    return [list(ids[-max_tokens:]) for ids in encoded]


def encode_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of plain texts, cut at the end."""
    return [list(ids[:max_tokens]) for ids in tokenizer(list(texts))["input_ids"]]


def _rows(source: str | Path) -> Iterator[tuple[str, str]]:
    """Categories and texts of a file, or of a data set."""
    path = _path(source)
    if path.exists():
        return _from_file(path)
    return (("", text) for text in _from_hub(str(source)))


def _distinct(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Each text once, without space around it; no empty ones."""
    seen = set()
    for category, text in rows:
        text = text.strip()
        if text and text not in seen:
            seen.add(text)
            yield category, text


def _some(rows: Iterable[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    found = list(rows)
    if not found:
        raise DataError(f"There is no text in {name}. Name a file with one text per line.")
    return found


def _path(source: str | Path) -> Path:
    return STARTER if source == "starter" else Path(source)


def _from_file(path: Path) -> Iterator[tuple[str, str]]:
    """Categories and texts; the category is "" where none is given."""
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row_of(line, f"{path}, line {number}") if is_json else ("", line)


def _row_of(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}. Give one object per line.") from error
    if isinstance(row, str):
        return "", row
    for key in _TEXT_KEYS:
        if isinstance(row, dict) and key in row:
            value = row[key]
            return str(row.get("category", "")), str(value[0] if isinstance(value, list) else value)
    raise DataError(f"{where} has none of the keys {', '.join(_TEXT_KEYS)}.")


def _from_hub(name: str) -> Iterator[str]:
    """Stream a data set; texts are read until enough are there."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"There is no file {name!r}, and reading it as a Hugging Face data set needs the "
            "`datasets` package: `pip install datasets`. Or name a local .txt or .jsonl file, or "
            "`starter`, the prompts that come with TIDE."
        ) from error
    config = "wikitext-2-raw-v1" if name == "wikitext" else None
    repository = "Salesforce/wikitext" if name == "wikitext" else name
    try:
        rows = load_dataset(repository, config, split="train", streaming=True)
        first = list(islice(rows, 1))
    except Exception as error:
        raise DataError(
            f"There is no file {name!r}, and the Hugging Face data set {repository!r} cannot be "
            f"had: {type(error).__name__}: {error}. Name a local .txt or .jsonl file."
        ) from error
    key = next((k for k in _TEXT_KEYS if first and k in first[0]), None)
    if key is None:
        raise DataError(f"Data set {repository!r} has none of the columns {', '.join(_TEXT_KEYS)}.")
    for row in rows:
        value = row[key]
        yield str(value[0] if isinstance(value, list) else value)
