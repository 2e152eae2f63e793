"""The screenshots of the docs, taken of fresh pages of `tide show` and `tide report`.

    python scripts/screenshots.py MODEL DIR

DIR is a calibrated artifact. Needs chromium and playwright.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tide.cli import main as tide

DOCS = Path(__file__).parent.parent / "docs"
RUN = DOCS.parent / "bench" / "results" / "bench_smollm2.json"
PROMPT = "Write a short story about a lighthouse keeper who counts the waves."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("artifact")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        show, report = Path(folder) / "show.html", Path(folder) / "report.html"
        how = ["--dtype", "bfloat16", "--no-compare", "--html", str(show)]
        assert tide(["show", args.model, args.artifact, PROMPT, *how]) == 0
        assert tide(["report", str(RUN), "--html", str(report), "--png", str(DOCS / "report")]) == 0
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, page, width, height in (
            ("show", show, 960, 900), ("show_phone", show, 390, 844), ("report", report, 960, 1500),
        ):  # fmt: skip
            view = browser.new_page(viewport={"width": width, "height": height})
            view.goto(page.as_uri())
            if page == show:
                view.locator(".token[style]").nth(3).hover()
            view.screenshot(path=DOCS / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
