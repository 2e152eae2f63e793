"""Gives the command line: `tide COMMAND`. One file per command, heavy imports inside its `run`."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# Command -> what it does. Its file has `options(parser)` and `run(args)`.
COMMANDS = {
    "assess": "how much depth this model could save, before any training",
    "calibrate": "fit exit heads, routers and a draft table",
    "bench": "every mode on the same prompts; or a search for prompts that fool the exits",
    "certify": "find thresholds that hold a risk, with a stated confidence",
    "export-draft": "write a calibrated exit as a draft model for speculation",
    "serve": "vLLM's own server, with exits or drafts",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 1 if it could not, 2 if it was called wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="tide", description="A frozen causal LM that spends less depth on easy tokens."
    )
    chosen = parser
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f" Did you mean `tide {near[0]}`?" if near else ""
        parser.error(f"there is no command {words[0]!r}.{hint} There is {', '.join(COMMANDS)}.")
    for name, what in COMMANDS.items():
        # Only the command that is called needs its options, and no command needs the others'.
        sub = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if words[:1] == [name]:
            chosen = sub
            _module(name).options(sub)
            sub.add_argument("--json", action="store_true", help="print one JSON line at the end")
    args, rest = parser.parse_known_args(words)
    if getattr(_module(args.command), "PASSES_ON", False):
        args.rest = rest
    elif rest:
        known = [option for action in chosen._actions for option in action.option_strings]
        near = difflib.get_close_matches(rest[0].split("=")[0], known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        chosen.error(f"there is no option {rest[0]}.{hint}")
    from tide.errors import TideError

    try:
        result: Any = _module(args.command).run(args)
    except TideError as error:
        print(f"tide {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"tide {args.command}: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result))
    return 0


def _module(command: str) -> Any:
    return import_module(f"tide.cli.{command.replace('-', '_')}")
