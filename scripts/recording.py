"""The terminal of `tide show` as a picture, recorded from a real run.

    python scripts/recording.py MODEL [DIR]

Writes docs/drawings/terminal.svg. Speeds are not compared: one prompt on some machine is no result.
The answer is short, since a recording does not wrap lines.
"""

from __future__ import annotations

import argparse
import re
from io import StringIO
from pathlib import Path
from unittest import mock

from rich import terminal_theme
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from tide.cli import main as tide

PROMPT = "Write a Python function that returns the largest number in a list."
FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)  # would be fetched from elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("artifact", nargs="?")
    args = parser.parse_args()
    console = Console(
        record=True, file=StringIO(), force_terminal=True, color_system="truecolor", width=110,
        highlight=False,
    )  # fmt: skip
    inputs = [args.artifact, PROMPT] if args.artifact else [PROMPT]
    mode = ["--mode", "exit"] if args.artifact else []
    shown = "tide show MODEL " + " ".join(["DIR", *mode] if args.artifact else [])
    console.print(f'$ {shown.strip()} "{PROMPT}"', style="bold", markup=False)
    how = ["--no-compare", "--new-tokens", "19", "--dtype", "float32"]
    with mock.patch("rich.console.Console", return_value=console):
        assert tide(["show", args.model, *inputs, *mode, *how]) == 0
    drawn = console.export_svg(
        title="tide show", theme=terminal_theme.SVG_EXPORT_THEME, unique_id="tide",
        code_format=FONT.sub("", CONSOLE_SVG_FORMAT),
    )  # fmt: skip
    told = "A terminal: the answer with exited tokens coloured and underlined, and what it cost"
    drawn = re.sub(r"(<svg [^>]*>)", rf"\1<title>{told}</title>", drawn, count=1)
    (Path(__file__).parent.parent / "docs" / "drawings" / "terminal.svg").write_text(drawn)


if __name__ == "__main__":
    main()
