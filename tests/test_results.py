"""Tests that the result files behind the docs are of this version, and that a command makes each.

Also of what else a release rests on: links of the README, pictures, extras, the changelog.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tide
from conftest import ROOT
from tide import errors

RESULTS = ROOT / "bench" / "results"
# Result file -> why it names no version of TIDE.
NO_VERSION = {
    "risk_simulation": "a simulation of the test statistics",
    "hostile": "counts of cases, and no speed",
    "faults": "counts of cases, and no speed",
    "kernels": "what a compiler computed, and no speed",
    "tokens_c154cfd": "tokens of an older commit, to compare with",
    "tokens_redesign": "tokens of a commit, compared with an older one",
}
# Comparisons of two commits, which nobody can run again with one.
OF_TWO_COMMITS = {"commits_speed", "commits_speed_off", "tokens_c154cfd", "tokens_redesign"}


def script(name: str) -> Any:
    """A module of scripts/."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return module


def other_versions(folder: Path) -> dict[str, str | None]:
    """The result files that were not measured with this version, and their own."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        of = json.loads(path.read_text())
        version = {**of.get("versions", {}), **of.get("conditions", {})}.get("tide")
        if version != tide.__version__ and not (version is None and path.stem in NO_VERSION):
            found[path.stem] = version
    return found


def test_figures_are_of_this_version() -> None:
    assert len(list(RESULTS.glob("*.json"))) > 20
    assert other_versions(RESULTS) == {}


def test_figures_of_another_version_are_detected(tmp_path: Path) -> None:
    for name, version in {"old": "0.0.9", "new": tide.__version__}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"conditions": {"tide": version}}))
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "hostile.json").write_text("{}")
    assert other_versions(tmp_path) == {"old": "0.0.9", "none": None}


def test_every_result_can_be_reproduced() -> None:
    steps = (ROOT / "scripts" / "reproduce.sh").read_text()
    named = set(re.findall(r"^step (\w+)", steps, re.MULTILINE))
    assert {path.stem for path in RESULTS.glob("*.json")} - OF_TWO_COMMITS <= named


@pytest.mark.parametrize("what", ["figure", "table"])
def test_what_is_generated_stands_on_a_page(what: str) -> None:
    tables = script("tables")
    pages = "".join(page.read_text() for page in tables.PAGES)
    made = tables.TABLES if what == "table" else script("figures").FIGURES
    assert set(re.findall(rf"<!-- {what}: (\w+) -->", pages)) == made.keys()


@pytest.mark.parametrize(
    ("step", "code", "told"),
    [
        ("kernel", 2, "There is no step kernel. The steps are: calibration_smollm2 "),
        ("kernels", 0, "kernels: "),
    ],
)
def test_a_step_is_checked_before_it_runs(step: str, code: int, told: str, tmp_path: Path) -> None:
    for name, status in (("python", 1), ("tide", 0)):  # `kernels` needs no weights
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    found = subprocess.run(
        ["bash", str(ROOT / "scripts" / "reproduce.sh"), step], check=False, capture_output=True,
        text=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORK": str(tmp_path / "work")},
    )  # fmt: skip
    assert found.returncode == code and told in found.stdout + found.stderr


def test_every_error_has_an_entry() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    made = script("error_tables")
    names = [error.__name__ for error in made.public(errors)]
    assert len(names) > 10 and "TideError" not in names
    assert [name for name in names if f"\n## {name}\n" not in page] == []
    assert made.ADVICE.keys() == set(names)


def test_messages_are_read_from_the_source() -> None:
    found = {(error, text) for error, text, _ in script("error_tables").messages()}
    assert len(found) > 100
    assert any(
        e == "ArtifactError" and t.startswith("There is no artifact at ...") for e, t in found
    )


@pytest.mark.parametrize("name", ["charts", "badges", "hero"])
def test_pictures_are_up_to_date(name: str) -> None:
    module = script(name)
    if name == "charts":
        made = {f"charts/{of}": draw() for of, draw in module.CHARTS.items()}
    elif name == "badges":
        made = {f"badges/{of}": module.badge(*texts) for of, texts in module.BADGES.items()}
    else:
        made = {"drawings/hero": module.draw(module.read("hero")["results"])}
    for path, text in made.items():
        assert (ROOT / "docs" / f"{path}.svg").read_text() == text, f"run scripts/{name}.py"
        assert "<title>" in text


def test_a_token_catches_up_in_the_next_deep_pass() -> None:
    depths = [4, 2, 2, 3, 4, 2]
    caught_up = script("hero").caught_up
    assert [caught_up(depths, token, 4) for token in (1, 2, 3, 5)] == [4, 4, 4, None]
    assert caught_up(depths, 1, 3) == 3


def test_links_of_a_release_are_absolute() -> None:
    made = script("release").absolute(
        "![a](docs/a.svg) [b](docs/b.md#c) [d](https://e.f) [g](#h)", "https://x.y/t/", "v1"
    )
    assert made == (
        "![a](https://x.y/t/raw/v1/docs/a.svg) [b](https://x.y/t/blob/v1/docs/b.md#c) "
        "[d](https://e.f) [g](#h)"
    )
    settings = script("release").with_urls((ROOT / "pyproject.toml").read_text(), "https://x.y/t")
    assert '[project.urls]\nHomepage = "https://x.y/t"\n' in settings


def test_a_release_needs_a_date_and_one_version() -> None:
    faults = script("release").faults
    assert faults("1.2.3", "# C\n\n## 1.2.3 (2026-12-01)\n", "version: 1.2.3\n") == []
    assert len(faults("1.2.3", "## 1.2.3 (unreleased)\n", "version: 1.2.2\n")) == 2
    assert f"\nversion: {tide.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_messages_name_extras_that_exist() -> None:
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = {
        extra
        for path in (ROOT / "src" / "tide").rglob("*.py")
        for extra in re.findall(r"tide-llm\[([\w-]+)\]", path.read_text())
    }
    assert {"datasets", "shtab", "plot"} <= named
    assert named <= set(extras)
