"""The command `tide eval [lm_eval options]`: lm-evaluation-harness with TIDE as the model."""

from __future__ import annotations

import argparse
from typing import Any

PASSES_ON = True  # all options are lm_eval's


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = (
        "tide eval [-h] --model_args pretrained=MODEL,artifact=DIR[,risk=R] --tasks TASK,... "
        "[lm_eval options]"
    )
    parser.epilog = "The options are those of `lm_eval run`; see `lm_eval run -h`."


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Register the model with the harness, and pass everything on to its command line."""
    import sys
    from importlib import import_module

    import_module("tide.integrations.lm_eval")
    from lm_eval.__main__ import cli_evaluate

    command = ["lm_eval", "--model", "tide", *args.rest]
    before, sys.argv = sys.argv, command  # the harness reads nothing else
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return {"command": command}
