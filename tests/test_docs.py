"""Tests of the README and the docs: every fenced block runs or has a reason not to; links resolve.

The blocks of a page run in order, in one folder and one namespace, with the local copy of the model
instead of the hub's. Pages of the docs continue where the tutorial ended: their folder has its
files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import tide
from tide import cli
from tide.exits.artifact import Artifact
from tide.models.fingerprint import Fingerprint

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = ("CONTRIBUTING", "RELEASING", "CODE_OF_CONDUCT", "CHANGELOG")
LINKING = [*PAGES, *(ROOT / f"{name}.md" for name in OTHERS)]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

RUN = ("python", "bash", "shell")
SHOWN = ("text", "json")
REASONS = (
    "needs a GPU",
    "needs the hub",
    "starts a server",
    "a long benchmark",
    "whether it succeeds depends on the machine",
    "the test's own environment has it",
)
FENCE = re.compile(
    r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>\S*).*?\n(?P<code>.*?)^ *(?P=marks) *$",
    re.DOTALL | re.MULTILINE,
)
NOT_RUN = re.compile(r"<!-- not run: (.*?) -->\s*\Z")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PRINTED = re.compile(r"^# > ?(.*)$", re.MULTILINE)  # in a block: what it prints
MOST_WORDS = 900  # of the README


class Block(NamedTuple):
    line: int
    language: str
    code: str
    reason: str | None  # not to run it


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = NOT_RUN.search(before)
        found.append(Block(before.count("\n") + 2, match["language"], dedent(match["code"]),
                           reason[1] if reason else None))  # fmt: skip
    return found


def faults(text: str) -> list[str]:
    """The errors in the fences of a page, each with its line."""
    found = []
    for block in blocks(text):
        if block.language not in RUN + SHOWN:
            found.append(f"{block.line}: {block.language!r} is none of {RUN + SHOWN}")
        if block.reason is not None and block.reason not in REASONS:
            found.append(f"{block.line}: {block.reason!r} is none of {REASONS}")
        if block.reason is not None and block.language in SHOWN:
            found.append(f"{block.line}: {block.language} is not run anyway")
    if text.count("<!-- not run:") != sum(block.reason is not None for block in blocks(text)):
        found.append("a 'not run' comment is not right before a block")
    return found


def to_run(page: Path) -> list[Block]:
    return [b for b in blocks(page.read_text()) if b.language in RUN and b.reason is None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_has_a_reason_not_to(page: Path) -> None:
    assert faults(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\ntide assess\n```", "'' is none of"),
        ("~~~\ntide assess\n~~~", "'' is none of"),
        ("```console\n$ tide assess\n```", "'console' is none of"),
        ("<!-- not run: too slow -->\n```bash\ntide\n```", "'too slow' is none of"),
        ("<!-- not run: needs a GPU -->\n```text\ntide\n```", "is not run anyway"),
        ("<!-- not run: needs a GPU -->\nSo:\n```bash\ntide\n```", "right before a block"),
    ],
)
def test_a_block_that_is_never_run_is_detected(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert fault in found


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_blocks(page: Path, folder: Path, model: Path) -> None:
    """Run the blocks of a page; a failure names its line."""
    names: dict[str, Any] = {"__name__": page.stem}
    with inside(folder):
        for block in to_run(page):
            code = block.code.replace(MODEL, str(model))
            if block.language == "python":
                # Empty lines before it, so that a traceback has the page's line numbers.
                with redirect_stdout(StringIO()) as out:
                    exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), names)
                assert_prints(code, out.getvalue())
            else:
                run_commands(code, f"{page.name}, line {block.line}")


def assert_prints(code: str, out: str) -> None:
    """Assert that a block prints the lines that it shows behind `# >`."""
    shown = PRINTED.findall(code)
    printed = [line.rstrip() for line in out.splitlines()]
    assert not shown or shown == printed, f"printed {printed}, but the page shows {shown}"


def test_output_that_is_not_printed_is_detected() -> None:
    assert_prints("print(1)\n# > 1", "1\n")
    with pytest.raises(AssertionError, match="the page shows"):
        assert_prints("print(1)\n# > 2", "1\n")


def words(text: str) -> int:
    """How many words a reader of a page reads: tables too, code and addresses not."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return len([word for word in text.split() if re.search(r"\w", word)])


def test_the_readme_is_short() -> None:
    assert (
        words("Two [words](https://a.b) | --- |\n```bash\nnone here\n```\n<!-- nor here -->") == 2
    )
    assert words((ROOT / "README.md").read_text()) <= MOST_WORDS


def run_commands(code: str, where: str) -> None:
    """Run the commands of a block in this process, which has imported what they need."""
    for line in code.replace("\\\n", " ").splitlines():
        if given := shlex.split(line, comments=True):
            program, *arguments = given
            assert program == "tide", f"{where}: only `tide` is run here, not {line}"
            # HF's compiled baseline of `tide bench` would take minutes. Not by Dynamo's own
            # `disable`: a full graph then fails, and leaves the tests after this one dynamic.
            with mock.patch.object(torch, "compile", partial(torch.compile, disable=True)):
                assert cli.main(arguments) == 0, f"{where}: {line}"


@pytest.fixture(scope="session")
def tutorial(smollm2_path: Path, tmp_path_factory: Any) -> Path:
    """The folder in which the tutorial ran."""
    folder: Path = tmp_path_factory.mktemp("tutorial")
    run_blocks(TUTORIAL, folder, smollm2_path)
    return folder


@pytest.mark.real
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize(
    "page", [TUTORIAL, *(p for p in PAGES if to_run(p) and p != TUTORIAL)], ids=lambda p: p.name
)
def test_blocks_run(page: Path, smollm2_path: Path, tmp_path: Path, request: Any) -> None:
    folder = tmp_path
    if page.parent.name == "docs":
        done = request.getfixturevalue("tutorial")
        folder = shutil.copytree(done, tmp_path / "page")
    if page != TUTORIAL:
        run_blocks(page, folder, smollm2_path)


@pytest.mark.xdist_group("docs")
def test_tests_of_a_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    """Else the tutorial runs once in each: pytest-xdist finds a group by this suffix."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("--dist loadgroup is not given")
    assert request.node.nodeid.endswith("@docs")


def test_the_api_page_shows_every_public_name() -> None:
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {f"{home}.{name}" for name, home in tide._HOME.items()} <= set(shown)


def test_the_artifact_page_names_every_key() -> None:
    page = (ROOT / "docs" / "artifact.md").read_text()
    header = Artifact(Fingerprint("", "", ""), hidden_size=1)._header()
    assert [key for key in (*header, "digest") if f"| `{key}` |" not in page] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown makes them; nothing in a fence is a heading."""
    text = FENCE.sub("", page.read_text())
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
        for title in HEADING.findall(text)
    }


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for path, anchor in LINK.findall(FENCE.sub("", text)):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_pictures_have_a_text(page: Path) -> None:
    assert [
        found for found in re.findall(r"!\[(.*?)\]\(", page.read_text()) if len(found) < 5
    ] == []


def test_a_broken_link_is_detected() -> None:
    text = "[a](no.md) [b](tutorial.md#no) [c](#no) [d](tutorial.md#certify) [e](https://no.no/x)"
    assert broken_links(ROOT / "docs" / "index.md", text) == ["no.md", "tutorial.md#no", "#no"]
