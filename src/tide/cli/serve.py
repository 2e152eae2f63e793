"""Gives `tide serve MODEL DIR [vllm options]`: vLLM's own server, with the plugin on."""

from __future__ import annotations

import argparse
from typing import Any

PASSES_ON = True  # options that are not ours are vLLM's
INTERRUPTED = "The server was stopped."


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.usage = (
        "tide serve [-h] [--risk R | --uncertified | --lossless] MODEL DIR [vllm options]"
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id or a folder")
    parser.add_argument("artifact", metavar="DIR", help="an artifact from calibrate, or a hub id")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--risk", type=float, help="serve exits with this certified risk (default: none)"
    )
    how.add_argument(
        "--uncertified", action="store_true", help="serve exits as calibrated, without a promise"
    )
    how.add_argument(
        "--lossless",
        action="store_true",
        help="no exits: draft from context and table",
    )
    parser.add_argument(
        "--delta", type=float, default=0.05, help="chance that the certificate may be wrong"
    )
    parser.add_argument(
        "--on-drift", choices=("warn", "full_depth"), default="warn",
        help="what to do when early tokens differ more often than promised",
    )  # fmt: skip
    parser.add_argument(
        "--drafts", type=int, default=8, help="with --lossless: most tokens guessed"
    )
    parser.add_argument(
        "--learn", action="store_true",
        help="with --lossless: draft from what other requests were answered, too",
    )  # fmt: skip
    parser.add_argument(
        "--audit-rate", type=float, default=0.01, help="share of tokens checked at full depth"
    )
    parser.add_argument("--dtype", default="auto", help="precision of the weights")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check artifact and certificate, then start vLLM's server and stay until it ends."""
    import subprocess
    import sys
    from tempfile import TemporaryDirectory

    # Not `vllm serve`, which asks for the version of a package that CPU builds do not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words(args)]
    # The model runs in another process than the server; vLLM adds up what both count here.
    with TemporaryDirectory(prefix="tide-metrics-") as folder:
        # A session of its own: a signal reaches it once, from us.
        server = subprocess.Popen(command, env=_environment(folder), start_new_session=True)
        code = _until_it_ends(server)
    if code > 0:
        raise SystemExit(code)
    return {"exit_code": code}


def words(args: argparse.Namespace) -> list[str]:
    """The options of vLLM's server; refuses here what it would refuse a minute later."""
    import json

    from tide.errors import CertificateError, ConfigError
    from tide.exits.artifact import Artifact
    from tide.vllm import require_version

    require_version()
    for ours in ("--additional-config", "--speculative-config"):
        if any(word.split("=")[0] == ours for word in args.rest):
            raise ConfigError(f"{ours} is what `tide serve` writes; with yours, use `vllm serve`.")
    made = Artifact.from_pretrained(args.artifact)
    given: dict[str, Any] = {"artifact": str(args.artifact)}
    mine = ["--model", args.model, "--dtype", args.dtype]
    if args.lossless:
        given |= {"mode": "lossless", "learn": args.learn}
        mine += ["--speculative-config", json.dumps({
            "method": "custom_class", "model": "tide.vllm.proposer.TableProposer",
            "num_speculative_tokens": args.drafts,
        })]  # fmt: skip
    elif args.uncertified:
        given["uncertified"] = True
    elif args.risk is None:
        raise CertificateError(
            "Which promise? Give --risk R with a certificate for it, --uncertified for exits as "
            "calibrated, or --lossless for drafts alone."
        )
    else:
        made.covering(args.risk, args.delta, _dtype(args), "propagate")
        given |= {"risk": args.risk, "delta": args.delta, "on_drift": args.on_drift}
    if not args.lossless:
        given["audit_rate"] = args.audit_rate
        mine.append("--enforce-eager")
    return [*mine, "--additional-config", json.dumps({"tide": given}), *args.rest]


def _dtype(args: argparse.Namespace) -> str:
    """The dtype that vLLM will use."""
    if args.dtype != "auto":
        return str(args.dtype)
    from transformers import AutoConfig

    from tide.models.fingerprint import dtype_name

    # vLLM takes half precision for what is stored in full.
    found = dtype_name(AutoConfig.from_pretrained(args.model))
    return "bfloat16" if found == "float32" else found


def _environment(folder: str) -> dict[str, str]:
    import os

    return {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}


def _until_it_ends(server: Any) -> int:
    """Wait for the server, and hand on to it what we are told."""
    import signal

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda number, frame: server.send_signal(number))
    return int(server.wait())
