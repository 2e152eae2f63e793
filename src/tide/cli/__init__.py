"""The command line: `tide COMMAND`. One file per command, with heavy imports inside its `run`."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any

# Command -> what it does. Its file has `options(parser)` and `run(args)`.
COMMANDS = {
    "assess": "measure how much depth a model could save, before any training",
    "calibrate": "fit exit heads, routers and a draft table",
    "certify": "find thresholds that keep a risk, at a stated confidence",
    "show": "print an answer with its tokens coloured by depth",
    "bench": "time every mode on the same prompts, or search for adversarial prompts",
    "report": "turn a benchmark into a page and charts",
    "eval": "run lm-evaluation-harness with TIDE as the model",
    "serve": "run vLLM's server with exits or drafts",
    "export-draft": "write a calibrated exit as a draft model for speculative decoding",
    "kernels": "show which kernels run here, check, compile and time them",
    "env": "print versions and devices, and the runner of a model, for bug reports",
    "completion": "print a script that completes commands and options in your shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 1 on failure, 2 on wrong usage, 130 if interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Only the command that is called needs its options, and no command needs the others'.
    parser = parser_of(arguments[:1])
    command = arguments[0] if arguments else "-"
    if not command.startswith("-") and command not in COMMANDS:
        parser.error(
            f"there is no command {command!r}.{did_you_mean(command, COMMANDS)} "
            f"The commands are {', '.join(COMMANDS)}."
        )
    args, rest = parser.parse_known_args(arguments)
    if getattr(_module(args.command), "PASSES_ON", False):
        args.rest = rest
    elif rest and not rest[0].startswith("-"):
        args.parser.error(
            f"unexpected argument {rest[0]!r}. Put options before or after all other arguments."
        )
    elif rest:
        known = [option for action in args.parser._actions for option in action.option_strings]
        suggestion = did_you_mean(rest[0].split("=")[0], known)
        args.parser.error(f"there is no option {rest[0]}.{suggestion}")
    from tide.errors import TideError

    try:
        result: Any = _module(args.command).run(args)
    except TideError as error:
        print(f"tide {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        what_now = getattr(_module(args.command), "INTERRUPTED", "Nothing was written.")
        print(f"tide {args.command}: interrupted. {what_now}", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result))
    return int(result.get("exit_code", 0))


def parser_of(filled: Collection[str]) -> argparse.ArgumentParser:
    """The parser of `tide`, with the options of the commands in `filled`."""
    parser = argparse.ArgumentParser(
        prog="tide",
        description="Faster decoding for Hugging Face causal LMs: lossless drafts, and early exit "
        "within a certified risk.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        sub.set_defaults(parser=sub)
        if name in filled:
            _module(name).options(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON line at the end")
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of an option, unless it is a switch or its help has it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False or action.default == []
        complete = nothing or "(default" in (action.help or "")
        return action.help if complete else super()._get_help_string(action)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the closest known name; empty if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _version() -> str:
    from tide import __version__

    return f"tide {__version__}"


def _module(command: str) -> Any:
    return import_module(f"tide.cli.{command.replace('-', '_')}")
