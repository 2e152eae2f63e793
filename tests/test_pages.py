"""Tests of the pages in a real browser, on a phone and a desktop: nothing overflows or fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from test_show import engine, exits, method, trace, write
from tide.cli import main
from tide.picture import contrast
from tide.report.page import trace_page

sync_api = pytest.importorskip("playwright.sync_api")
WIDTHS = {"phone": 360, "desktop": 1280}
# Of a drawing that has a paper: the colours of its texts that are not on a cell, and of the paper.
COLOURS = """() => {
    const paper = document.querySelector("svg > .paper");
    if (!paper) return [];
    const fill = of => getComputedStyle(of).fill;
    return [...document.querySelectorAll("text:not(.oncell)")].map(t => [fill(t), fill(paper)]);
}"""

# Parts of a page of the documentation that are cut off at the right.
OVERFLOWING = """() => [...document.querySelectorAll(".md-content *")]
    .filter(part => part.getBoundingClientRect().right > innerWidth + 1)
    .filter(part => !part.closest(".md-typeset__scrollwrap, pre"))
    .map(part => part.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium; install it with your system's packages")
    with sync_api.sync_playwright() as play:
        # Without a sandbox of its own it also runs as root, as in containers.
        yield play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])


@pytest.fixture(params=WIDTHS.values(), ids=WIDTHS)
def open_page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": request.param, "height": 800})
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith("file:") else errors.append(r.url))

    def visit(path: Path) -> Any:
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        return page

    yield visit
    page.close()
    assert not errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures(open_page: Any, tmp_path: Path, scheme: str) -> None:
    """Every picture loads by itself, fits a phone, and its text can be read on its background."""
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    assert len(pictures) > 8
    shown = "".join(f'<img src="{path.as_uri()}" style="max-width:100%">' for path in pictures)
    (tmp_path / "pictures.html").write_text(f"<!doctype html>{shown}")
    page = open_page(tmp_path / "pictures.html")
    loaded = "[...document.images].map(i => i.complete && i.naturalWidth > 0)"
    assert page.evaluate(loaded) == [True] * len(pictures)
    page.emulate_media(color_scheme=scheme)
    for path in pictures:
        page.goto(path.as_uri())
        pairs = page.evaluate(COLOURS)
        assert all(contrast(*map(hexadecimal, pair)) >= 4.5 for pair in pairs), path.name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built."""
    folder: Path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_documentation_fits(open_page: Any, site: Path) -> None:
    """Every page of it, light and dark; wide tables and code scroll by themselves."""
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 20
    for path in pages:
        page = open_page(path)
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(OVERFLOWING) == [], (path.parent.name, scheme)


def hexadecimal(colour: str) -> str:
    return "#" + "".join(f"{int(channel):02x}" for channel in re.findall(r"\d+", colour)[:3])


def test_show(open_page: Any, tmp_path: Path) -> None:
    shown = trace(engine())
    (tmp_path / "show.html").write_text(trace_page(shown), encoding="utf-8")
    page = open_page(tmp_path / "show.html")
    tokens, details = page.locator(".text .token"), page.locator(".details")
    assert tokens.count() == len(shown.pieces)
    exited = next(i for i, piece in enumerate(shown.pieces) if piece.score is not None)
    tokens.nth(exited).hover()
    assert "exited after" in details.inner_text() and "gate score" in details.inner_text()
    # Without a mouse, and without colours.
    tokens.nth(exited).focus()
    page.keyboard.press("ArrowRight")
    assert details.inner_text().startswith(f"Token {exited + 2},")
    number = tokens.nth(exited).locator("sub")
    assert not number.is_visible()
    page.locator("#numbers").check()
    assert number.is_visible()
    assert "underline" in tokens.nth(exited).evaluate("e => getComputedStyle(e).textDecorationLine")


def test_report(open_page: Any, tmp_path: Path) -> None:
    methods = [
        method("HF generate", 1.0),
        exits("exit, risk 0.02", 1.2, 0.01, 0.02),
        exits("exit, threshold scale 6", 1.5, 0.1),
    ]
    run, html = write(tmp_path / "run.json", methods), tmp_path / "report.html"
    assert main(["report", str(run), "--html", str(html)]) == 0
    page = open_page(html)
    assert page.locator("svg").count() == 5 and page.locator("tbody tr").count() == 3
