"""The command `tide certify MODEL DIR --risk R`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from tide.cli.loading import conditions, data_options, from_1, load, model_options, share
from tide.config import KV_CACHE_STRATEGIES


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    model_options(parser)
    parser.add_argument("artifact", type=Path, metavar="DIR", help="an artifact from calibrate")
    data_options(parser, samples=400)
    parser.add_argument(
        "--risk", type=share, nargs="+", default=[0.02],
        help="shares of tokens that may differ from full depth",
    )  # fmt: skip
    parser.add_argument(
        "--delta", type=share, default=0.05, help="probability that a certificate is wrong"
    )
    parser.add_argument(
        "--kv", choices=KV_CACHE_STRATEGIES, default="deferred", help="how exited tokens fill KV"
    )
    parser.add_argument(
        "--min-layers", type=int, help="use no exit below this depth (default: as calibrated)"
    )
    parser.add_argument("--new-tokens", type=from_1, default=128, help="longest answer, in tokens")
    parser.add_argument(
        "--max-prompt",
        type=from_1,
        default=512,
        help="longest prompt, in tokens; longer ones are cut",
    )
    parser.add_argument("--batch", type=from_1, default=8, help="sequences decoded together")
    parser.add_argument(
        "--force", action="store_true", help="certify risks below the noise floor of the dtype"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Certify, write the certificates into the artifact, and print them."""
    from tide import __version__
    from tide.certification import certify
    from tide.config import TIDEConfig
    from tide.exits.artifact import Artifact
    from tide.exits.files import require_writable

    made = Artifact.load(args.artifact)
    require_writable(args.artifact)
    model, tokenizer = load(args)
    least = made.config.min_layers if args.min_layers is None else args.min_layers
    config = TIDEConfig(kv_cache_strategy=args.kv, min_layers=least)
    found = certify(
        model, tokenizer, args.artifact, args.data, risk=args.risk, delta=args.delta,
        config=config, samples=args.samples, new_tokens=args.new_tokens,
        max_prompt=args.max_prompt, batch=args.batch, force=args.force, version=__version__,
    )  # fmt: skip
    for certificate in found:
        print(
            f"At most {100 * certificate.risk:g} % of tokens differ from full depth, certified at "
            f"{100 * (1 - certificate.delta):g} % confidence ({100 * certificate.estimate:.2f} % "
            f"measured on {certificate.sequences} sequences of up to {args.new_tokens} new tokens)."
        )
    if found:
        print(f"Saved in {args.artifact}.{_how_to_serve(args, found[0])}")
    missing = sorted(set(args.risk) - {certificate.risk for certificate in found})
    for risk in missing:
        print(
            f"Risk {risk:g} could not be shown at any setting. Certify a higher risk; or give more "
            "prompts, and others: those that were tested are not used for this claim again."
        )
    return {
        "conditions": conditions(model),
        "certificates": [certificate.to_dict() for certificate in found],
        "exit_code": 1 if missing else 0,
    }


def _how_to_serve(args: argparse.Namespace, certificate: Any) -> str:
    """The next step: exact KV is served by the engine, KV made at the exit by vLLM."""
    from tide.risk import DELTA

    risk, delta = f"{certificate.risk:g}", f"{certificate.delta:g}"
    usual = certificate.delta == DELTA
    if certificate.kv_cache_strategy == "deferred":
        more = "" if usual else f", delta={delta}"
        call = f'tide.TIDE(model, "{args.artifact}", risk={risk}{more})'
        return f" Serve it: {call}, the model in {certificate.dtype}"
    if certificate.kv_cache_strategy == "propagate":
        command = ["tide", "serve", args.model, str(args.artifact), "--risk", risk]
        command += [] if usual else ["--delta", delta]
        return f" Serve it: {shlex.join([*command, '--dtype', certificate.dtype])}"
    return ""
