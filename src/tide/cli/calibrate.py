"""The command `tide calibrate MODEL -o DIR`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from tide.cli.loading import conditions, data_options, from_1, load, model_options, share
from tide.config import TIDEConfig

INTERRUPTED = "Run the same command again to resume from the states collected so far."


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    usual = TIDEConfig()
    model_options(parser)
    data_options(parser, usual.calibration_samples)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="a folder, .safetensors or .pt file"
    )
    parser.add_argument(
        "--interval",
        type=from_1,
        default=usual.checkpoint_interval,
        help="layers between checkpoints",
    )
    parser.add_argument(
        "--min-layers", type=int, default=usual.min_layers, help="layers before the first exit"
    )
    parser.add_argument(
        "--bottleneck", type=from_1, default=usual.router_bottleneck_dim, help="size of the routers"
    )
    parser.add_argument(
        "--risk", type=share, default=0.02, help="error rate for which to choose the thresholds"
    )
    parser.add_argument(
        "--batch", type=from_1, default=4,
        help="choose exits for this number of sequences as well as for one",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary", type=int, default=8192, help="tokens that exit heads can predict; 0 for all"
    )
    parser.add_argument("--new-tokens", type=from_1, default=160, help="longest answer, in tokens")
    parser.add_argument(
        "--off-policy",
        action="store_true",
        help="calibrate on the texts themselves, not on the model's answers to them",
    )
    parser.add_argument(
        "--exit-strategy", choices=("affine", "identity"), default="affine",
        help="exit heads: fit an affine map per checkpoint, or none",
    )  # fmt: skip
    parser.add_argument(
        "--label", choices=("agreement", "cosine"), default="agreement",
        help="training target of the routers",
    )  # fmt: skip
    parser.add_argument(
        "--convergence-threshold",
        type=float,
        default=usual.convergence_threshold,
        help="with --label cosine: similarity that counts as converged",
    )
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers",
        help="engine that answers the prompts; transformers always collects the states",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of split, sampling and fitting")
    parser.add_argument(
        "--work",
        type=Path,
        help="keep the collected states here, to fit again (default: next to DIR, then removed)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, save, and print the model card."""
    from tide.calibration.pipeline import MAX_PROMPT, calibrate
    from tide.exits.card import model_card
    from tide.exits.files import ONE_FILE
    from tide.models.fingerprint import dtype_name

    model, tokenizer = load(args)
    config = TIDEConfig(
        checkpoint_interval=args.interval,
        min_layers=args.min_layers,
        router_bottleneck_dim=args.bottleneck,
        calibration_samples=args.samples,
        calibration_dataset=args.data,
        exit_strategy=args.exit_strategy,
        convergence_threshold=args.convergence_threshold,
    )
    answers = None
    if args.engine == "vllm":
        from tide.vllm.answers import VllmAnswers

        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = MAX_PROMPT + args.new_tokens
        answers = VllmAnswers(
            args.model, dtype_name(model), longest=min(longest, context or longest), seed=args.seed
        )
    made = calibrate(
        model, tokenizer, args.output, config, on_policy=not args.off_policy, label=args.label,
        risk=args.risk, batch=args.batch, vocabulary=args.vocabulary, new_tokens=args.new_tokens,
        seed=args.seed,
        work=args.work, answers=answers,
    )  # fmt: skip
    if made is None:  # one of several processes, and not the first
        return {}
    card = model_card(made.record)
    in_folder = not str(args.output).endswith(ONE_FILE)
    print(card[card.find("\n## ") + 1 :] if in_folder else card)  # the whole is in the folder
    show = ["tide", "show", args.model, str(args.output), "Why is the sky blue?"]
    show += [] if args.dtype == "auto" else ["--dtype", args.dtype]
    print(f"Written to {args.output}. See it: {shlex.join([*show, '--mode', 'exit'])}")
    return {"conditions": conditions(model), **made.record}
