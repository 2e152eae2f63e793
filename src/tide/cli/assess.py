"""The command `tide assess MODEL`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tide.cli.loading import conditions, data_options, from_1, load, model_options


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    model_options(parser)
    data_options(parser, samples=48)
    parser.add_argument("--new-tokens", type=from_1, default=128, help="longest answer, in tokens")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the result (default: no plot)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Assess, print the table, and draw it with `--plot`."""
    from tide.calibration.assess import assess, image_form

    if args.plot:
        image_form(args.plot)
    model, tokenizer = load(args)
    found = assess(model, tokenizer, args.data, samples=args.samples, new_tokens=args.new_tokens)
    print(found.summary())
    if args.plot:
        found.plot(args.plot)
        print(f"Plot written to {args.plot}")
    return {"conditions": conditions(model), **found.to_dict()}
