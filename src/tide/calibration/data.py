"""The documents of a calibration: prompts from a file, a data set or a list, and their split.

A source that cannot be read is an error; no other text takes its place.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tide.errors import DataError

SPLITS = ("fit", "tuning", "certify")

# Prompts that ship with the package: enough to see exits at work, too few and too similar for
# serving.
STARTER = Path(__file__).with_name("starter.txt")

# Keys of a JSON line that may hold the text, most common first.
_TEXT_KEYS = ("text", "prompt", "question", "instruction", "turns")


class Prompt(NamedTuple):
    """A text of the data.

    Attributes:
        text: of the prompt.
        category: "" where none is given.
        document: name of what the text was made from, such as an article; "" where none is given.
    """

    text: str
    category: str = ""
    document: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Short hashes of the text and, where one is named, its document."""
        return tuple(text_key(name) for name in (self.text, self.document) if name)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Prompts by split. No document that is used for fitting is used for certification.

    Attributes:
        fit, tuning, certify: texts of the splits.
        tuning_document: the document of each text of `tuning`, counted from 0.
        used: keys of the prompts that certification must not use.
    """

    fit: tuple[str, ...]
    tuning: tuple[str, ...]
    certify: tuple[str, ...]
    tuning_document: tuple[int, ...]
    used: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Identity of the texts and their split, 16 hex digits."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for text in getattr(self, split):
                digest.update(f"{split} {len(text)} {text}".encode())
        return digest.hexdigest()[:16]


def load_prompts(source: str | Path | Iterable[str], limit: int | None = None) -> list[Prompt]:
    """Prompts of a local file, a Hugging Face data set or a list, in their order, without repeats.

    Args:
        source: a file, also gzipped: `.txt`, a prompt in each line, or `.jsonl`, whose objects
            may name a "category" and a "document"; "starter" for prompts that ship with the
            package, enough for a first look and not for serving; the name of a data set on the hub;
            or the texts themselves.
        limit: most texts to take.

    Raises:
        DataError: if there is no such file or data set, or no text in it.
    """
    return _nonempty(islice(each_prompt(source), limit), source)


def each_prompt(source: str | Path | Iterable[str]) -> Iterator[Prompt]:
    """Prompts of a source as `load_prompts` takes them, read as they are needed."""
    return _distinct(_records(source) if isinstance(source, (str, Path)) else map(Prompt, source))


def is_streamed(source: Any) -> bool:
    """Whether a source is a data set on the hub, which may have no end."""
    return isinstance(source, (str, Path)) and not _path(source).exists()


def load_texts(source: str | Path | Iterable[str], limit: int | None = None) -> list[str]:
    """The texts of `load_prompts`."""
    return [prompt.text for prompt in load_prompts(source, limit)]


def load_by_category(source: str | Path, limit: int) -> list[Prompt]:
    """Prompts, taken from the categories in turn, without repeats."""
    records = _distinct(_records(source))
    if is_streamed(source):
        records = islice(records, limit)  # a data set has no known categories and may be large
    by: dict[str, list[Prompt]] = {}
    for prompt in _nonempty(records, source):
        by.setdefault(prompt.category, []).append(prompt)
    turns = zip_longest(*by.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:limit]


def split_documents(
    prompts: Sequence[Prompt], *, seed: int = 0, tuning: float = 0.2, certify: float = 0.15
) -> Documents:
    """Split prompts by document, at random by `seed`; one that names none is its own document.

    Args:
        tuning, certify: shares reserved for choosing thresholds and for certification.
    """
    by: dict[tuple[bool, str], list[Prompt]] = {}
    for prompt in prompts:
        by.setdefault((bool(prompt.document), prompt.document or prompt.text), []).append(prompt)
    if len(by) < 3:
        raise DataError(
            f"Got {len(prompts)} texts of {len(by)} documents; fitting, tuning and certification "
            "need at least one document each, and a useful calibration needs some hundreds."
        )
    order = list(by.values())
    random.Random(seed).shuffle(order)
    n_tuning, n_certify = (max(1, round(share * len(order))) for share in (tuning, certify))
    n_used = len(order) - n_certify
    n_fit = n_used - n_tuning
    parts = order[:n_fit], order[n_fit:n_used], order[n_used:]
    fit, chosen, reserved = (
        tuple(prompt.text for document in part for prompt in document) for part in parts
    )
    numbers = (number for number, document in enumerate(parts[1]) for _ in document)
    used = (key for document in order[:n_used] for prompt in document for key in prompt.keys)
    return Documents(
        fit=fit, tuning=chosen, certify=reserved, tuning_document=tuple(numbers),
        used=tuple(dict.fromkeys(used)),
    )  # fmt: skip


def text_key(text: str) -> str:
    """A short hash that identifies a text without storing it."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:12]


def has_chat_format(tokenizer: Any) -> bool:
    """Whether a tokenizer formats chats; Mistral's own does, and has no template."""
    mistral = type(tokenizer).__name__ == "MistralCommonBackend"
    return mistral or bool(tokenizer.chat_template)


def encode_prompts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of prompts, formatted as a chat where the tokenizer does that."""
    if has_chat_format(tokenizer):
        chats = [[{"role": "user", "content": text}] for text in texts]
        encoded = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    else:
        encoded = tokenizer(list(texts))["input_ids"]
    # The answer starts at the end of a chat prompt, so a long prompt is cut at its beginning.
    return [list(ids[-max_tokens:]) for ids in encoded]


def encode_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of texts without a chat template, cut at the end."""
    return [list(ids[:max_tokens]) for ids in tokenizer(list(texts))["input_ids"]]


def _records(source: str | Path) -> Iterator[Prompt]:
    """Prompts of a file, or of a data set."""
    path = _path(source)
    if path.exists():
        return _from_file(path)
    return _from_hub(str(source))


def _distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Each non-empty text once, stripped."""
    seen = set()
    for prompt in prompts:
        text = prompt.text.strip()
        if text and text not in seen:
            seen.add(text)
            yield prompt._replace(text=text)


def _nonempty(prompts: Iterable[Prompt], source: Any) -> list[Prompt]:
    """The prompts as a list; none at all is an error."""
    found = list(prompts)
    if not found:
        name = source if isinstance(source, (str, Path)) else "the list given"
        raise DataError(f"There is no text in {name}. Name a file with one text per line.")
    return found


def _path(source: str | Path) -> Path:
    return STARTER if source == "starter" else Path(source)


def _from_file(path: Path) -> Iterator[Prompt]:
    """Prompts of a file."""
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse(line, f"{path}, line {number}") if is_json else Prompt(line)
    except (EOFError, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as text ({type(error).__name__}: {error}). Give a .txt or "
            ".jsonl file in UTF-8, which may be gzipped."
        ) from error


def _parse(line: str, where: str) -> Prompt:
    """The prompt of one JSON line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}. Give one object per line.") from error
    if isinstance(record, str):
        return Prompt(record)
    for key in _TEXT_KEYS:
        if isinstance(record, dict) and key in record:
            about = (str(record.get(name) or "") for name in ("category", "document"))
            return Prompt(_text(record[key], f"{key} of {where}"), *about)
    raise DataError(f"{where} has none of the keys {', '.join(_TEXT_KEYS)}.")


def _from_hub(name: str) -> Iterator[Prompt]:
    """Prompts of a data set, streamed, so that only as many as needed are read."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"There is no file {name!r}, and reading it as a Hugging Face data set needs the "
            "`datasets` package: `pip install 'tide-llm[datasets]'`. Or name a local .txt or "
            ".jsonl file, or `starter`, the prompts that ship with TIDE."
        ) from error
    config = "wikitext-2-raw-v1" if name == "wikitext" else None
    repository = "Salesforce/wikitext" if name == "wikitext" else name
    try:
        records = load_dataset(repository, config, split="train", streaming=True)
        first = list(islice(records, 1))
    except Exception as error:
        raise DataError(
            f"There is no file {name!r}, and the Hugging Face data set {repository!r} is not "
            f"available: {type(error).__name__}: {error}. Name a local .txt or .jsonl file."
        ) from error
    key = next((k for k in _TEXT_KEYS if first and k in first[0]), None)
    if key is None:
        raise DataError(f"Data set {repository!r} has none of the fields {', '.join(_TEXT_KEYS)}.")
    if name == "wikitext":
        yield from _articles(_text(record[key], f"{key} of {repository}") for record in records)
        return
    for record in records:
        yield Prompt(
            _text(record[key], f"{key} of {repository}"), document=str(record.get("document") or "")
        )


def _articles(lines: Iterable[str]) -> Iterator[Prompt]:
    """The paragraphs of WikiText, each with the title of its article as its document."""
    title = ""
    for line in lines:
        if heading := re.fullmatch(r"\s*= ([^=]+) =\s*", line):
            title = heading[1]
        elif not line.lstrip().startswith("="):  # nor the heading of a section
            yield Prompt(line, document=title)


def _text(value: Any, what: str) -> str:
    """A field as a text; of the turns of a conversation, the user's first."""
    turns = value if isinstance(value, list) else [value]
    others = [t for t in turns if not (isinstance(t, dict) and t.get("role") == "system")]
    first = others[0] if others else None
    text = first.get("content") if isinstance(first, dict) else first
    if not isinstance(text, str):
        raise DataError(f"{what} is {str(value)[:80]!r}; it must be a text, or turns of a chat.")
    return text
