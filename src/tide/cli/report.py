"""The command `tide report RUN.json --html FILE`: benchmarks as a page and as charts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN.json", help="files from `tide bench --out`"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page (default: none)")
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="write each chart as a PNG (default: none)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Read, draw, and write."""
    from functools import partial
    from io import StringIO

    from tide.errors import ConfigError
    from tide.exits.files import write_whole
    from tide.report.charts import figures
    from tide.report.page import report_page
    from tide.report.runs import Runs

    if args.html is None and args.png is None:
        raise ConfigError("There is nothing to write. Give --html FILE, --png FOLDER, or both.")
    runs = Runs.read(args.runs)
    drawn, written = figures(runs), list[Path]()
    for name, (_, figure) in drawn.items() if args.png else ():
        written.append(args.png / f"{name}.png")
        write_whole(written[-1], partial(figure.savefig, format="png", dpi=120))
    if args.html:
        charts = {}
        for name, (title, figure) in drawn.items():
            buffer = StringIO()
            figure.savefig(buffer, format="svg")
            charts[name] = (title, buffer.getvalue().split("?>", 1)[-1].split('dtd">', 1)[-1])
        page = report_page(runs, charts)
        raw = page.encode("utf-8", "replace")  # JSON may hold halves of characters
        write_whole(args.html, lambda scratch: scratch.write_bytes(raw))
        written.append(args.html)
    for path in written:
        print(f"Written: {path}")
    return {"conditions": runs.conditions, "written": [str(path) for path in written]}
