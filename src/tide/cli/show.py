"""The command `tide show MODEL [DIR] "prompt"`: tokens coloured by the depth they needed."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tide.cli.loading import conditions, from_1, load, model_options, share

# What there is to try; the answers to the first repeat parts of it, so that drafts are accepted.
EXAMPLES = (
    "Rewrite this as a list, one step per line: wash the rice, boil the rice, rest the rice, serve "
    "the rice.",
    "Write a Python function that returns the largest number in a list.",
    "Why is the sky blue?",
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "tide show [options] MODEL [DIR] [PROMPT]"
    model_options(parser)
    parser.add_argument(
        "inputs", nargs="*", metavar="[DIR] [PROMPT]",
        help="an artifact from calibrate, and the prompt; without an artifact, no token exits and "
        "drafts come from the context; without a prompt, an example is used",
    )  # fmt: skip
    parser.add_argument(
        "--mode", choices=("auto", "exit", "lossless"),
        help="exit: exits and drafts; lossless: drafts alone; auto: what is faster here (default: "
        "auto)",
    )  # fmt: skip
    parser.add_argument(
        "--risk", type=share, help="a certified risk (default: thresholds as calibrated)"
    )
    parser.add_argument(
        "--threshold", type=float, help="one confidence for all exits, uncertified (default: none)"
    )
    parser.add_argument("--new-tokens", type=from_1, default=128, help="longest answer, in tokens")
    parser.add_argument("--raw", action="store_true", help="use no chat template")
    parser.add_argument("--compile", action="store_true", help="compile the segments first")
    parser.add_argument(
        "--compare", action="store_true",
        help="print the text of HF generate too, and where it differs first",
    )  # fmt: skip
    parser.add_argument(
        "--no-compare", action="store_true", help="do not time HF generate for comparison"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page as well (default: none)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Generate, print as it comes, and write the page."""
    from rich.console import Console

    from tide.bench.baselines import compiled_generate
    from tide.bench.compare import BASELINE, COMPILED, WARM_UP
    from tide.exits.artifact import Artifact
    from tide.exits.files import write_whole
    from tide.report.difference import first_difference
    from tide.report.live import DepthStreamer, print_legend
    from tide.report.page import trace_page
    from tide.report.trace import Trace

    folder, prompt = _inputs(args)
    made = Artifact.from_pretrained(folder) if folder else None
    model, tokenizer = load(args)
    engine = _engine(args, model, made)
    console = Console(highlight=False)
    encoded = _encode(tokenizer, prompt, args.raw).to(model.device)
    greedy = {"max_new_tokens": args.new_tokens, "do_sample": False}

    def timed(generate: Any, **more: Any) -> tuple[list[int], float]:
        began = time.perf_counter()
        out = generate(**encoded, **greedy, **more)[0, encoded["input_ids"].shape[1] :].tolist()
        return out, len(out) / (time.perf_counter() - began)

    if not args.no_compare:  # the first call of a process is slower than later ones
        other = _encode(tokenizer, WARM_UP, args.raw).to(model.device)  # else it drafts from itself
        engine.generate(**other, max_new_tokens=4, do_sample=False)
    name = engine.config.mode
    plan = str(engine.plan) if folder else "lossless: without an artifact no token exits"
    console.print(f"[dim]{plan}[/dim]")
    tokens, speed = timed(engine.generate, streamer=DepthStreamer(engine, tokenizer, console))
    trace = Trace.of(tokenizer, prompt, tokens, engine.last_stats)
    trace.conditions = {
        **conditions(model), "mode": name, "exits": folder and engine.artifact.exits,
        "risk": args.risk, "threshold": args.threshold, "new_tokens": args.new_tokens,
        "compile": args.compile,
    }  # fmt: skip
    difference = None
    if not args.no_compare:
        theirs, their_speed = timed(model.generate)
        trace.speeds = {name: speed, BASELINE: their_speed}
        difference = first_difference(model, encoded["input_ids"], tokens, theirs)
        if args.compile:
            compiled = compiled_generate(model, greedy)
            compiled(encoded)
            began = time.perf_counter()
            new = compiled(encoded).shape[1] - encoded["input_ids"].shape[1]
            trace.speeds[COMPILED] = new / (time.perf_counter() - began)
    print_legend(trace, console)
    if args.compare:
        told = "HF generate gives the same text, token for token."
        if difference:
            text = tokenizer.decode(theirs, skip_special_tokens=True)
            told = f"HF generate:\n{text}\n{difference.line(tokenizer, trace.conditions['dtype'])}"
        console.print(told, markup=False, soft_wrap=True)
    if args.html:
        write_whole(
            args.html, lambda scratch: scratch.write_text(trace_page(trace), encoding="utf-8")
        )
        print(f"Page written to {args.html}")
    stats = trace.stats
    return {
        "plan": plan,
        "conditions": trace.conditions,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": [
            {
                "text": piece.text,
                "depth": piece.depth,
                "score": piece.score,
                "draft_source": piece.draft_source,
                "target_token": piece.target_token,
            }
            for piece in trace.pieces
        ],
        "layers_run": stats.layers_run,
        "layers_full": stats.layers_full,
        "audited": stats.audited,
        "differed": stats.differed,
        "tokens_per_second": trace.speeds,
        "gain": trace.gain() if trace.speeds else None,
        "first_difference": difference and asdict(difference),
    }


def _inputs(args: argparse.Namespace) -> tuple[str | None, str]:
    """The artifact and the prompt; checks all options before a model is loaded."""
    from tide.errors import ConfigError
    from tide.exits.files import is_artifact

    inputs = list(args.inputs)
    if len(inputs) > 2:
        raise ConfigError(
            f"Got {len(inputs)} arguments after MODEL; expected DIR and PROMPT. Put the prompt in "
            "quotes."
        )
    if not inputs or (len(inputs) == 1 and is_artifact(inputs[0])):
        print(f"No prompt is given; this is an example: {EXAMPLES[0]}")
        print("Others to try: " + " | ".join(EXAMPLES[1:]))
        inputs.append(EXAMPLES[0])
    elif len(inputs) == 1 and re.fullmatch(r"[\w.~/-]+", inputs[0], re.ASCII):
        if "/" in inputs[0]:
            raise ConfigError(
                f"There is no folder {inputs[0]!r} with an artifact. Make one with `tide calibrate "
                "MODEL -o DIR`; for one on the hub, add a prompt; a prompt alone needs a space."
            )
        print(f"There is no artifact at {inputs[0]!r}, so it is the prompt.")
    *folders, prompt = inputs
    if args.compare and args.no_compare:
        raise ConfigError("--compare prints what --no-compare omits; give one of them.")
    args.mode = args.mode or ("auto" if folders else "lossless")
    if args.mode != "lossless" and not folders:
        raise ConfigError(
            f"--mode {args.mode} needs an artifact: tide show MODEL DIR PROMPT. Make one with "
            "`tide calibrate MODEL -o DIR`."
        )
    if args.mode == "lossless" and (args.risk is not None or args.threshold is not None):
        raise ConfigError("--mode lossless takes no --risk and no --threshold: no token exits.")
    if args.risk is not None and args.threshold is not None:
        raise ConfigError("--risk sets the thresholds; give --risk or --threshold, not both.")
    return (folders[0] if folders else None), prompt


def _engine(args: argparse.Namespace, model: Any, made: Any) -> Any:
    from tide.config import TIDEConfig
    from tide.engine import TIDE
    from tide.models.fingerprint import dtype_name
    from tide.risk import DELTA, CertificateQuery, find_certificate

    if args.mode == "lossless":
        return TIDE(model, made, compile=args.compile)
    least = made.config.min_layers
    if args.risk is not None:  # a certificate brings its own
        query = CertificateQuery(args.risk, DELTA, dtype_name(model), "deferred")
        least = find_certificate(made, query).min_layers
    config = TIDEConfig(
        exit_threshold=args.threshold, audit_tail=True, min_layers=least, mode=args.mode
    )
    return TIDE(model, made, config, risk=args.risk, compile=args.compile)


def _encode(tokenizer: Any, prompt: str, raw: bool) -> Any:
    from tide.calibration.data import has_chat_format

    if raw or not has_chat_format(tokenizer):
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip
