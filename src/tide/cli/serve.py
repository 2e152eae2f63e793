"""The command `tide serve MODEL [DIR] [vllm options]`: vLLM's server with the plugin on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tide.cli.loading import load_config, share

PASSES_ON = True  # options that are not ours are vLLM's
INTERRUPTED = "The server was stopped."

# Options that count in some modes only, with their defaults.
_WITH_RISK = {"delta": 0.05, "on_drift": "warn"}
_WITH_EXITS = {"gates": "by_cost", "audit_rate": 0.01}
_WITH_DRAFTS = {"drafts": 8, "cross_request_drafts": False}


class _ModelAndArtifact(argparse.Action):
    """Stores both. Newer Pythons would take the value of an option of vLLM's for a missing DIR."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if len(values) > 2:
            parser.error(f"unexpected argument {values[2]!r}.")
        namespace.model, namespace.artifact = (*values, None)[:2]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = (
        "tide serve [-h] MODEL [DIR] [--risk R | --uncertified | --lossless [auto] | --off] "
        "[vllm options]"
    )
    parser.add_argument(
        "model", metavar="MODEL [DIR]", nargs="+", action=_ModelAndArtifact,
        help="the model, and an artifact from calibrate for exits and table drafts: hub ids or "
        "folders",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--risk", type=share, help="serve exits with this certified risk (default: none)"
    )
    how.add_argument(
        "--uncertified",
        action="store_true",
        help="serve exits as calibrated, without a certificate",
    )
    how.add_argument(
        "--lossless", nargs="?", const="always", choices=("always", "auto"),
        help="no exits: draft from the context and the table, where it pays; auto: not where vLLM "
        "would give something up for it (default: auto without DIR)",
    )  # fmt: skip
    how.add_argument(
        "--off", action="store_true", help="neither exits nor drafts: vLLM's own server, unchanged"
    )
    parser.add_argument(
        "--delta", type=share, help="with --risk: probability that the certificate is wrong"
    )
    parser.add_argument(
        "--on-drift", choices=("warn", "full_depth"),
        help="with --risk: what to do when audited tokens differ more often than certified",
    )  # fmt: skip
    parser.add_argument(
        "--gates", choices=("by_cost", "always"),
        help="with exits: evaluate gates where they pay at that number of requests, or always",
    )  # fmt: skip
    parser.add_argument("--drafts", type=int, help="with --lossless: longest draft, in tokens")
    parser.add_argument(
        "--cross-request-drafts", action="store_true",
        help="with --lossless: also draft from recent answers to other requests",
    )  # fmt: skip
    parser.add_argument(
        "--audit-rate", type=float, help="with exits: share of requests audited at full depth"
    )
    parser.set_defaults(**_WITH_RISK, **_WITH_EXITS, **_WITH_DRAFTS)
    parser.add_argument("--dtype", default="auto", help="precision of the weights")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check artifact and certificate, then run vLLM's server until it ends."""
    import os
    import sys

    if args.risk is not None or args.uncertified:  # exits do not run in the other
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    # Not `vllm serve`, which needs the version of a package that CPU builds do not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *server_arguments(args)]
    if code := supervise(command):
        raise SystemExit(code)
    return {"exit_code": 0}


def server_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of vLLM's server; raises now what would fail a minute later."""
    import json
    import sys

    from tide.errors import ConfigError
    from tide.vllm import require_version

    require_version()
    if args.rest and not args.rest[0].startswith("-"):
        raise ConfigError(
            f"Unexpected argument {args.rest[0]!r}: put MODEL and DIR next to each other, and "
            "options after them."
        )
    arguments = ["--model", args.model, "--dtype", args.dtype]
    if args.off:
        _require_effect(args, {**_WITH_RISK, **_WITH_EXITS, **_WITH_DRAFTS}, "exits or drafts")
        return [*arguments, *args.rest]
    for ours in ("--additional-config", "--speculative-config", "--config"):
        if _given(args.rest, ours):
            raise ConfigError(f"`tide serve` sets what {ours} would; to set it, use --off.")
    no_mode = args.risk is None and not args.uncertified
    lossless = args.lossless or ("auto" if no_mode and args.artifact is None else None)
    if lossless is None:
        _require_effect(args, _WITH_DRAFTS, "--lossless")
        if args.uncertified:
            _require_effect(args, _WITH_RISK, "--risk")
        settings = _exits(args)
        arguments += _piecewise(args.rest)
    elif lossless == "auto" and (reason := _against_drafts(args)):
        _require_effect(args, {**_WITH_RISK, **_WITH_EXITS}, "exits")
        print(f"tide serve: no drafts, since {reason}. To draft nevertheless, add --lossless.",
              file=sys.stderr)  # fmt: skip
        return [*arguments, *args.rest]
    else:
        _require_effect(args, {**_WITH_RISK, **_WITH_EXITS}, "exits")
        settings = _lossless(args)
        arguments += ["--speculative-config", json.dumps({
            "method": "custom_class", "model": "tide.vllm.proposer.TableProposer",
            "num_speculative_tokens": args.drafts,
        })]  # fmt: skip
        if not _given(args.rest, "--per-request-spec-decode-metrics"):
            arguments += ["--per-request-spec-decode-metrics", "summary"]
    return [*arguments, "--additional-config", json.dumps({"tide": settings}), *args.rest]


def _require_effect(args: argparse.Namespace, defaults: dict[str, Any], wanted: str) -> None:
    """Raise for an option that would have no effect."""
    from tide.errors import ConfigError

    for name, default in defaults.items():
        if (got := getattr(args, name)) != default:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {got!r}, and counts with {wanted} only: omit it.")


def _lossless(args: argparse.Namespace) -> dict[str, Any]:
    """The plugin's settings for drafts; raises if there is no such artifact."""
    from tide.exits.artifact import Artifact

    settings = {"mode": "lossless", "cross_request_drafts": args.cross_request_drafts}
    if args.artifact is not None:
        Artifact.from_pretrained(args.artifact)
        settings["artifact"] = args.artifact
    return settings


def _exits(args: argparse.Namespace) -> dict[str, Any]:
    """The plugin's settings for exits; raises unless artifact and certificate allow them."""
    from tide.errors import CertificateError, ConfigError
    from tide.exits.artifact import Artifact
    from tide.risk import CertificateQuery, find_certificate
    from tide.vllm.settings import require_architecture

    if args.artifact is None:
        raise ConfigError(
            "Exits need an artifact: `tide calibrate MODEL -o DIR`, then `tide serve MODEL DIR`."
        )
    require_architecture(load_config(args.model))
    made = Artifact.from_pretrained(args.artifact)
    settings = {
        "artifact": args.artifact, "audit_rate": args.audit_rate, "gates": args.gates,
    }  # fmt: skip
    if args.uncertified:
        return settings | {"uncertified": True}
    if args.risk is None:
        raise CertificateError(
            "Choose how to serve: --risk R with a certificate for it, --uncertified for exits as "
            "calibrated, or --lossless for drafts alone."
        )
    find_certificate(made, CertificateQuery(args.risk, args.delta, _dtype(args), "propagate"))
    return settings | {"risk": args.risk, "delta": args.delta, "on_drift": args.on_drift}


def _piecewise(rest: Sequence[str]) -> list[str]:
    """The option with which exits can decide between CUDA graphs, where vLLM would make any."""
    from vllm.platforms import current_platform

    graphs = not (current_platform.is_cpu() or "--enforce-eager" in rest)
    if not graphs or _given(rest, "--compilation-config"):
        return []
    return ["--compilation-config", '{"cudagraph_mode": "PIECEWISE"}']


def _against_drafts(args: argparse.Namespace) -> str | None:
    """Why drafts would cost something, or refuse requests, that vLLM's own server does not."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return (
            "vLLM would give up asynchronous scheduling for them on this device, and full CUDA "
            "graphs in steps without drafts"
        )
    if _given(args.rest, "--logits-processors"):
        return "vLLM takes no --logits-processors beside them"
    if _given(args.rest, "--generation-config"):
        return None  # whoever sets it knows what is in it
    from transformers import GenerationConfig

    try:
        usual = GenerationConfig.from_pretrained(args.model)
    except OSError:  # the model has none
        return None
    if usual.min_p:
        return "the model's generation config sets min_p, which vLLM refuses beside them"
    return None


_SHORT = {"-sc": "--speculative-config", "-cc": "--compilation-config"}  # of vLLM


def _given(rest: Sequence[str], option: str) -> bool:
    """Whether an option of vLLM is given, in any of the spellings that vLLM takes."""
    names = (given.split("=")[0].split(".")[0].replace("_", "-") for given in rest)
    return any(_SHORT.get(name, name) == option for name in names)


def _dtype(args: argparse.Namespace) -> str:
    """The dtype that vLLM will use."""
    if args.dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(args.dtype, str(args.dtype))
    from tide.models.fingerprint import dtype_name

    # vLLM serves weights stored in full precision in half precision.
    found = dtype_name(load_config(args.model))
    return "bfloat16" if found == "float32" else found


def supervise(command: Sequence[str]) -> int:
    """Run the server until it ends, pass signals on to it, and end what it had started.

    Returns:
        Its exit code; never 0 if nobody told it to end, and 128 more than the signal if something
        killed it.
    """
    import os
    import signal
    import subprocess
    from contextlib import suppress
    from tempfile import TemporaryDirectory

    told: list[int] = []
    # The model runs in another process than the server; vLLM adds up the counters of both here.
    with TemporaryDirectory(prefix="tide-metrics-", ignore_cleanup_errors=True) as folder:
        server = subprocess.Popen(
            command,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},
            start_new_session=True,  # a signal reaches it once, from us
            preexec_fn=end_with_parent,
        )

        def pass_on(number: int, frame: Any) -> None:
            told.append(number)
            server.send_signal(number)

        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, pass_on)
        code = server.wait()
        if code < 0:  # killed, so it could not end its engine, which would hold its memory for ever
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    if told:
        return max(code, 0)
    # vLLM ends with 0 after its engine has died; nobody told it to, so it should be started again.
    return 128 - code if code < 0 else code or 1


def end_with_parent() -> None:
    """Have Linux tell this process to end if its parent is killed; the port would stay taken."""
    import ctypes
    import signal
    import sys

    if sys.platform == "linux":
        set_parent_death_signal = 1  # as in linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
