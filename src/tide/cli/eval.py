"""Gives `tide eval [lm_eval options]`: lm-evaluation-harness's own command, with TIDE as model."""

from __future__ import annotations

import argparse
from typing import Any

PASSES_ON = True  # all options are lm_eval's


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.usage = (
        "tide eval [-h] --model_args pretrained=MODEL,artifact=DIR[,risk=R] --tasks TASK,... "
        "[lm_eval options]"
    )
    parser.epilog = "The options are those of `lm_eval run`; see `lm_eval run -h`."


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the harness know us, and hand everything on to its command line."""
    import sys
    from importlib import import_module

    import_module("tide.integrations.lm_eval")
    from lm_eval.__main__ import cli_evaluate

    words = ["lm_eval", "--model", "tide", *args.rest]
    before, sys.argv = sys.argv, words  # the harness reads nothing else
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return {"command": words}
