"""Values from files that a stranger may have written: JSON within bounds, and what it must hold.

All checks raise ValueError with what was found and what is allowed; whoever reads the file names
it, and the next step. Knows nothing of what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Of JSON: parsed, values may take thirty times the memory of their text, and seconds to make.
MOST_BYTES, MOST_VALUES = 8 << 20, 400_000


def read_json(path: Path) -> Any:
    """The JSON value in a file; see `parse_json`.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is no file, too large, or not JSON.
    """
    require_file(path)
    with path.open("rb") as file:
        return parse_json(file.read(MOST_BYTES + 1))


def parse_json(text: str | bytes) -> Any:
    """A JSON value of bounded size and depth, in which no key is given twice."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # an error of decoding is a ValueError
    require_small(text)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def require_small(text: str) -> None:
    """Raise unless a text is short enough to be parsed as JSON."""
    if len(text) > MOST_BYTES or sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(
            f"its JSON has more than {MOST_BYTES >> 20} MB or {MOST_VALUES} values, which are the "
            "most allowed"
        )


def require_file(path: Path) -> None:
    """Raise unless a path is a file with something in it: opening a pipe or a device may hang."""
    if not path.stat().st_size or not path.is_file():
        raise ValueError(f"{path.name} is empty, or is not a file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        for twice, _ in pairs:
            if twice in seen:
                break
            seen.add(twice)
        raise ValueError(f"its JSON has the key {shown(twice)} twice")
    return found


def shown(value: Any) -> str:
    """A value as it is quoted in an error: short, and in ASCII."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_keys(entry: Any, allowed: set[str], what: str) -> None:
    """Raise unless an object has exactly the keys allowed."""
    mapping(entry, what)
    if set(entry) != allowed:
        unknown, missing = sorted(set(entry) - allowed), sorted(allowed - set(entry))
        raise ValueError(f"{what} has unknown keys {shown(unknown)} and lacks {missing}")


def mapping(value: Any, what: str, each: Callable[[Any, str], Any] | None = None) -> dict[str, Any]:
    """The value, if it is an object; `each` checks what it holds."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {shown(value)}; it must be an object")
    for name, held in value.items() if each is not None else ():
        each(held, f"{what}, {shown(name)},")  # type: ignore[misc]
    return dict(value)


def listed(
    value: Any, what: str, each: Callable[[Any, str], Any] | None = None, most: int | None = None
) -> list[Any]:
    """The value, if it is a list of at most `most`; `each` checks what it holds."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is {shown(value)}; it must be a list")
    if most is not None and len(value) > most:
        raise ValueError(f"{what} has {len(value)} entries; at most {most} are allowed")
    for held in value if each is not None else ():
        each(held, f"an entry of {what}")  # type: ignore[misc]
    return list(value)


def text(value: Any, what: str) -> str:
    """The value, if it is a text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {shown(value)}; it must be a text")
    return value


def flag(value: Any, what: str) -> bool:
    """The value, if it is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {shown(value)}; it must be true or false")
    return value


def whole(value: Any, what: str, least: int = 0, most: int = 2**31 - 1) -> int:
    """The value, if it is a whole number in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(
            f"{what} is {shown(value)}; it must be a whole number from {least} to {most}"
        )
    return value


def number(value: Any, what: str, least: float = -1e9, most: float = 1e9) -> float:
    """The value, if it is a number in a range, and so finite."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not least <= value <= most:
        raise ValueError(
            f"{what} is {shown(value)}; it must be a number from {least:g} to {most:g}"
        )
    return value


def share(value: Any, what: str) -> float:
    """The value, if it is a number from 0 to 1."""
    return number(value, what, 0, 1)


def optional(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """The check, for a value that may be null."""
    return lambda value, what: None if value is None else check(value, what)
