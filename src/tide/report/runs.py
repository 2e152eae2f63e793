"""Gives benchmark runs, read from the files of `tide bench`; only alike runs go together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide.errors import DataError

_NEEDED = {"side", "speedup", "speedup_of_a_prompt"}


@dataclass(frozen=True)
class Runs:
    """What one or more runs measured under the same conditions.

    Attributes:
        conditions: of all of them.
        sides: every way to decode that was timed, as `tide bench` wrote it.
    """

    conditions: dict[str, Any]
    sides: list[dict[str, Any]]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Runs:
        """Read runs, and refuse to mix what cannot be compared.

        Raises:
            DataError: naming what differs, or what the file is not.
        """
        runs = [_read(path) for path in paths]
        first, sides = runs[0]["conditions"], dict[str, dict[str, Any]]()
        for path, run in zip(paths, runs, strict=True):
            under = run["conditions"]
            differing = [
                f"{key} ({first.get(key)} and {under.get(key)})"
                for key in {**first, **under}
                if first.get(key) != under.get(key)
            ]
            if differing:
                raise DataError(
                    f"{paths[0]} and {path} were run under different conditions: "
                    f"{', '.join(differing)}. Figures of both in one picture would mislead; make a "
                    "report of each."
                )
            for place, side in enumerate(run["results"]):
                # The baseline is in every run; any other side may be in one only.
                if sides.setdefault(side["side"], side) is not side and place:
                    raise DataError(
                        f"{side['side']!r} is in more than one of the runs. Name the run to report."
                    )
        return cls(first, list(sides.values()))

    @property
    def ours(self) -> list[dict[str, Any]]:
        """The sides whose layers were counted."""
        return [side for side in self.sides if "layers_run" in side]

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The sides that trade tokens that differ for speed, the safest first."""
        some = [side for side in self.ours if side["mode"] != "off" and side["drafts"]]
        return sorted(some, key=lambda side: side["disagreement"])


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error}. Make one with `tide bench --out`."
        ) from error
    except ValueError:
        run = None
    sides = run.get("results") if isinstance(run, dict) else None
    known = isinstance(sides, list) and "conditions" in run
    if not known or not sides or not all(set(side) >= _NEEDED for side in sides):
        raise DataError(
            f"{path} is not a race of `tide bench`, without --attack. Make one with `tide bench "
            "MODEL DIR --out FILE`."
        )
    return run
