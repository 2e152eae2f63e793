"""The command `tide export-draft MODEL DIR -o OUT`: an exit as a draft model for vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tide.cli.loading import load, model_options

INTERRUPTED = "The folder may hold a part of the draft model; run the same command again."


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    model_options(parser)
    parser.add_argument("artifact", metavar="DIR", help="an artifact from calibrate, or a hub id")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=int, help="depth of the exit (default: the first)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the draft model, and print what it costs."""
    from tide.exits.artifact import Artifact
    from tide.exits.files import naming
    from tide.integrations.draft import export_draft

    with naming(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(args)
    made = Artifact.from_pretrained(args.artifact)
    layers = args.layers or made.checkpoints[0].layer + 1
    share = export_draft(model, made, layers, args.out)
    tokenizer.save_pretrained(args.out)
    print(
        f"Written to {args.out}: the first {layers} layers and the exit head, {share:.0%} of the "
        "model's weights read per token. It pays only if drafts are cheap and mostly accepted: "
        "see docs/vllm.md for measurements."
    )
    return {"layers": layers, "share_of_weights": share, "out": str(args.out)}
