"""The command `tide serve MODEL DIR [vllm options]`: vLLM's server with the plugin on."""

from __future__ import annotations

import argparse
from typing import Any

PASSES_ON = True  # options that are not ours are vLLM's
INTERRUPTED = "The server was stopped."


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
        "--uncertified",
        action="store_true",
        help="serve exits as calibrated, without a certificate",
    )
    how.add_argument(
        "--lossless", action="store_true", help="no exits: draft from the context and the table"
    )
    parser.add_argument(
        "--delta", type=float, default=0.05, help="probability that the certificate is wrong"
    )
    parser.add_argument(
        "--on-drift", choices=("warn", "full_depth"), default="warn",
        help="what to do when audited tokens differ more often than the certified bound",
    )  # fmt: skip
    parser.add_argument(
        "--drafts", type=int, default=8, help="with --lossless: longest draft, in tokens"
    )
    parser.add_argument(
        "--cross-request-drafts", action="store_true",
        help="with --lossless: also draft from recent answers to other requests",
    )  # fmt: skip
    parser.add_argument(
        "--audit-rate", type=float, default=0.01, help="share of tokens audited at full depth"
    )
    parser.add_argument("--dtype", default="auto", help="precision of the weights")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check artifact and certificate, then run vLLM's server until it ends."""
    import subprocess
    import sys
    from tempfile import TemporaryDirectory

    # Not `vllm serve`, which needs the version of a package that CPU builds do not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *server_arguments(args)]
    # The model runs in another process than the server; vLLM adds up the counters of both here.
    with TemporaryDirectory(prefix="tide-metrics-") as folder:
        # A session of its own: a signal reaches it once, from us.
        server = subprocess.Popen(command, env=_environment(folder), start_new_session=True)
        code = _until_it_ends(server)
    if code > 0:
        raise SystemExit(code)
    return {"exit_code": code}


def server_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of vLLM's server; raises now what would fail a minute later."""
    import json

    from tide.errors import CertificateError, ConfigError
    from tide.exits.artifact import Artifact
    from tide.risk import CertificateQuery, find_certificate
    from tide.vllm import require_version

    require_version()
    for ours in ("--additional-config", "--speculative-config"):
        if any(given.split("=")[0] == ours for given in args.rest):
            raise ConfigError(f"`tide serve` sets {ours} itself; to set it, use `vllm serve`.")
    made = Artifact.from_pretrained(args.artifact)
    settings: dict[str, Any] = {"artifact": str(args.artifact)}
    arguments = ["--model", args.model, "--dtype", args.dtype]
    if args.lossless:
        settings |= {"mode": "lossless", "cross_request_drafts": args.cross_request_drafts}
        arguments += ["--speculative-config", json.dumps({
            "method": "custom_class", "model": "tide.vllm.proposer.TableProposer",
            "num_speculative_tokens": args.drafts,
        })]  # fmt: skip
    elif args.uncertified:
        settings["uncertified"] = True
    elif args.risk is None:
        raise CertificateError(
            "Choose how to serve: --risk R with a certificate for it, --uncertified for exits as "
            "calibrated, or --lossless for drafts alone."
        )
    else:
        query = CertificateQuery(args.risk, args.delta, _dtype(args), "propagate")
        find_certificate(made, query)
        settings |= {"risk": args.risk, "delta": args.delta, "on_drift": args.on_drift}
    if not args.lossless:
        settings["audit_rate"] = args.audit_rate
        arguments.append("--enforce-eager")
    return [*arguments, "--additional-config", json.dumps({"tide": settings}), *args.rest]


def _dtype(args: argparse.Namespace) -> str:
    """The dtype that vLLM will use."""
    if args.dtype != "auto":
        return str(args.dtype)
    from transformers import AutoConfig

    from tide.models.fingerprint import dtype_name

    # vLLM serves weights stored in full precision in half precision.
    found = dtype_name(AutoConfig.from_pretrained(args.model))
    return "bfloat16" if found == "float32" else found


def _environment(folder: str) -> dict[str, str]:
    import os

    return {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}


def _until_it_ends(server: Any) -> int:
    """Wait for the server, and pass signals on to it."""
    import signal

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda number, frame: server.send_signal(number))
    return int(server.wait())
