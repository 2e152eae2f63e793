"""The terminal of `tide show` as a picture, recorded from a real run.

    python scripts/recording.py MODEL [DIR]

Writes docs/drawings/terminal.svg. Speeds are not compared: one prompt on some machine is no result.
The answer is short, since a recording does not wrap what is streamed.
"""

from __future__ import annotations

import argparse
import re
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme

from tide.cli import main as tide

PROMPT = "Write a Python function that returns the largest number in a list."
# White, so that dim text, half way to the background, can still be read.
_ansi = [tuple(SVG_EXPORT_THEME.ansi_colors[k]) for k in range(16)]
THEME = TerminalTheme((41, 41, 41), (255, 255, 255), _ansi[:8], _ansi[8:])
FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)  # would be fetched from elsewhere


class Wrapping(Console):
    """Wraps whole lines, which a real terminal would do by itself."""

    def print(
        self, *parts: Any, end: str = "\n", soft_wrap: bool | None = None, **how: Any
    ) -> None:
        """As the console does it, but for lines that are not to be wrapped."""
        super().print(*parts, end=end, soft_wrap=soft_wrap if end != "\n" else None, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("artifact", nargs="?")
    args = parser.parse_args()
    console = Wrapping(
        record=True, file=StringIO(), force_terminal=True, color_system="truecolor", width=64,
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
        title="tide show", theme=THEME, unique_id="tide",
        code_format=FONT.sub("", CONSOLE_SVG_FORMAT),
    )  # fmt: skip
    told = "A terminal: the answer with exited tokens coloured and underlined, and what it cost"
    drawn = re.sub(r"(<svg [^>]*>)", rf"\1<title>{told}</title>", drawn, count=1)
    (Path(__file__).parent.parent / "docs" / "drawings" / "terminal.svg").write_text(drawn)


if __name__ == "__main__":
    main()
