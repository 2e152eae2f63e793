"""Benchmark runs, read from the files of `tide bench`; only comparable runs can be combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide.errors import DataError
from tide.strangers import listed, mapping, number, read_json, share, shown, text, whole

_NEEDED = {"method", "speedup", "per_prompt_speedup"}
MOST_METHODS, MOST = 60, 1e6  # that can be drawn, and the largest number


@dataclass(frozen=True)
class Runs:
    """What one or more runs measured under the same conditions.

    Attributes:
        conditions: the same for all of them.
        methods: every method that was timed, as `tide bench` wrote it; where more than one run has
            one of ours, with the name of the file. The first is HF `generate`.
    """

    conditions: dict[str, Any]
    methods: list[dict[str, Any]]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Runs:
        """Read runs; raises if they cannot be compared.

        Raises:
            DataError: with the conditions that differ, or the file that is not a benchmark.
        """
        if len(set(paths)) < len(paths):
            raise DataError(f"Got {', '.join(map(str, paths))}: one is given twice. Omit it.")
        runs = [_read(path) for path in paths]
        first = {**runs[0]["conditions"], "baseline": runs[0]["results"][0].get("baseline")}
        methods = dict[str, dict[str, Any]]()
        for place, (path, run) in enumerate(zip(paths, runs, strict=True), 1):
            under = {**run["conditions"], "baseline": run["results"][0].get("baseline")}
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
            for method in run["results"]:
                name = method["method"]
                if name in methods and "layers_run" not in method:
                    continue  # what runs without us is the same in every run
                if name in methods:
                    name = method["method"] = f"{name} ({place}: {path.stem})"
                methods[name] = method
        return cls(runs[0]["conditions"], list(methods.values()))

    @property
    def baseline(self) -> str:
        """What speed-ups are over: the fastest method without us."""
        return str(self.methods[0].get("baseline", self.methods[0]["method"]))

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
        run = read_json(path)
        mapping(run, "the run")
        results = listed(run.get("results"), "results")
        if not 0 < len(results) <= MOST_METHODS:
            raise ValueError(f"results has {len(results)} methods; 1 to {MOST_METHODS} are allowed")
        for method in results:
            _check(method)
        mapping(run.get("conditions"), "conditions")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error}. Make one with `tide bench --out`."
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path} is not a comparison of `tide bench` (without --attack): {error}. Make one "
            "with `tide bench MODEL DIR --out FILE`."
        ) from error
    return run


def _check(method: Any) -> None:
    """Raise unless a method has all that is drawn of it, in the size that can be drawn."""
    missing = _NEEDED - set(mapping(method, "a method"))
    if not missing and "layers_run" in method:
        missing = set(_OURS) - set(method)
    if missing:
        raise ValueError(f"a method lacks {sorted(missing)}")
    name(method["method"], "the name of a method")
    number(method["speedup"], "speedup", 0, MOST)
    spread = mapping(method["per_prompt_speedup"], "per_prompt_speedup", _positive)
    if "p20" in spread and not {"p50", "p80"} <= set(spread):
        raise ValueError("per_prompt_speedup has p20 but not p50 and p80")
    if (certificate := method.get("certificate")) is not None:
        share(mapping(certificate, "certificate").get("risk"), "the risk of a certificate")
    for part in _OURS if "layers_run" in method else ():
        _OURS[part](method[part], part)


def name(value: Any, what: str) -> str:
    """The value, if it is a name that fits beside a bar."""
    if not 0 < len(text(value, what)) <= 80 or not value.isprintable():
        raise ValueError(f"{what} is {shown(value)}; it must be printable, of up to 80 characters")
    return value


def _positive(value: Any, what: str) -> float:
    return number(value, what, 0, MOST)


def _by_layer(value: Any, what: str) -> None:
    found = mapping(value, what, lambda count, of: whole(count, of, 1))
    short = all(layer.isdecimal() and len(layer) < 6 for layer in found)
    if len(found) > MOST_METHODS or not short:
        raise ValueError(f"{what} is {shown(found)}; it must be by layer")


def _by_category(value: Any, what: str) -> None:
    found = mapping(value, what, _positive)
    if len(found) > MOST_METHODS:
        raise ValueError(f"{what} has {len(found)} categories; at most {MOST_METHODS} are allowed")
    for category in found:
        name(category or "-", "a category")


# What a method that runs on a TIDE engine has beside the others.
_OURS: dict[str, Callable[[Any, str], Any]] = {
    "ideal_speedup": _positive, "exit_rate": share, "disagreement": share, "mode": text,
    "exits_per_layer": _by_layer, "layer_calls_per_token": _by_category,
    "drafts": lambda value, what: listed(value, what, text),
    "certificate": lambda value, what: None,
}  # fmt: skip
