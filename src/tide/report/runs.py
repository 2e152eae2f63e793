"""Benchmark runs, read from the files of `tide bench`; only comparable runs can be combined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide.errors import DataError

_NEEDED = {"method", "speedup", "per_prompt_speedup"}


@dataclass(frozen=True)
class Runs:
    """What one or more runs measured under the same conditions.

    Attributes:
        conditions: the same for all of them.
        methods: every method that was timed, as `tide bench` wrote it; the first is the baseline.
    """

    conditions: dict[str, Any]
    methods: list[dict[str, Any]]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Runs:
        """Read runs; raises if they cannot be compared.

        Raises:
            DataError: with the conditions that differ, or the file that is not a benchmark.
        """
        runs = [_read(path) for path in paths]
        first, methods = runs[0]["conditions"], dict[str, dict[str, Any]]()
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
                    f"{', '.join(differing)}. They cannot be compared; report each separately."
                )
            for i, method in enumerate(run["results"]):
                # The baseline is in every run; any other method may be in one only.
                if methods.setdefault(method["method"], method) is not method and i > 0:
                    raise DataError(
                        f"{method['method']!r} is in more than one of the runs. Report only one of "
                        "them."
                    )
        return cls(first, list(methods.values()))

    @property
    def ours(self) -> list[dict[str, Any]]:
        """The methods that run on a TIDE engine, which counts layers."""
        return [method for method in self.methods if "layers_run" in method]

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The methods that trade agreement for speed, the most cautious first."""
        some = [method for method in self.ours if method["mode"] != "off" and method["drafts"]]
        return sorted(some, key=lambda method: method["disagreement"])


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error}. Make one with `tide bench --out`."
        ) from error
    except ValueError:
        run = None
    methods = run.get("results") if isinstance(run, dict) else None
    known = isinstance(methods, list) and "conditions" in run
    if not known or not methods or not all(set(method) >= _NEEDED for method in methods):
        raise DataError(
            f"{path} is not a comparison of `tide bench` (without --attack). Make one with `tide "
            "bench MODEL DIR --out FILE`."
        )
    return run
