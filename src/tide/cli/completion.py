"""The command `tide completion SHELL`: a script that completes commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the script; `eval "$(tide completion bash)"` turns it on."""
    from tide.cli import COMMANDS, parser_of
    from tide.errors import MissingPackageError

    try:
        import shtab
    except ImportError as error:
        raise MissingPackageError(
            "Completion needs shtab. Install it with `pip install 'tide-llm[shtab]'`."
        ) from error
    print(shtab.complete(parser_of(COMMANDS), args.shell))
    return {"shell": args.shell}
