"""Gives `tide bench MODEL DIR`: every mode on the same prompts; `--attack` looks for bad ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tide.cli.loading import conditions, data_options, load, model_options


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    model_options(parser)
    parser.add_argument("artifact", metavar="DIR", help="an artifact from calibrate, or a hub id")
    data_options(parser, samples=16)
    parser.add_argument(
        "--risk", type=float, nargs="+", default=[], help="certified risks to run as well"
    )
    parser.add_argument(
        "--boldness", type=float, nargs="+", default=[1.0],
        help="uncertified thresholds to run: 1 is as calibrated, 0 lets nobody leave",
    )  # fmt: skip
    parser.add_argument(
        "--draft", metavar="MODEL", help="a draft model for assisted generation (default: none)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument(
        "--attack", action="store_true", help="search for prompts that fool or deny the exits"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of the search")
    parser.add_argument("--out", type=Path, help="write the JSON here (default: nowhere)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and write."""
    import json

    from tide.calibration.data import load_by_category
    from tide.exits.artifact import Artifact
    from tide.exits.files import write_whole

    prompts = load_by_category(args.data, args.samples)
    made = Artifact.from_pretrained(args.artifact)
    model, tokenizer = load(args)
    result = {
        "what": "attack" if args.attack else "every mode on the same prompts, at batch 1",
        "conditions": {
            **conditions(model),
            "exits": made.exits,
            "draft": args.draft and Path(args.draft).name,
            "data": Path(args.data).name,
            "prompts": len(prompts),
            "new_tokens": args.new_tokens,
        },
        "results": (_attack if args.attack else _modes)(args, made, model, tokenizer, prompts),
    }
    if args.out:
        write_whole(
            args.out, lambda scratch: scratch.write_text(json.dumps(result, indent=2) + "\n")
        )
    return result


def _modes(
    args: argparse.Namespace, made: Any, model: Any, tokenizer: Any, prompts: list[tuple[str, str]]
) -> Any:
    from transformers import AutoModelForCausalLM

    from tide.bench.race import Entrants, Side, race
    from tide.calibration.collect import pad_left
    from tide.calibration.data import encode_prompts
    from tide.config import TIDEConfig
    from tide.engine import TIDE

    plain = {"max_new_tokens": args.new_tokens, "do_sample": False}
    early = TIDEConfig(exit_threshold=None, min_layers=made.config.min_layers, audit_tail=True)
    engines = {
        "off": TIDE(model, made, TIDEConfig(mode="off")),
        "lossless": TIDE(model, made, check=False),
        "exit without drafts": TIDE(model, made, early.with_(drafts=()), check=False),
    }
    for bold in args.boldness:
        engines[f"exit, boldness {bold:g}"] = TIDE(model, made, early, boldness=bold, check=False)
    for risk in args.risk:
        engines[f"exit, risk {risk:g}"] = TIDE(model, made, risk=risk, check=False)
    sides: dict[str, Side] = {
        "generate": lambda prompt: model.generate(**prompt, **plain),
        "prompt lookup": lambda prompt: model.generate(
            **prompt, **plain, prompt_lookup_num_tokens=10
        ),
    }
    if args.draft:
        draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=model.dtype).to(model.device)
        sides["assisted generation"] = lambda prompt: model.generate(
            **prompt, **plain, assistant_model=draft
        )
    ours = Entrants(engines, plain)
    categories = [category for category, _ in prompts]
    encoded = []
    for ids in encode_prompts(tokenizer, [text for _, text in prompts], 512):
        tensors = pad_left(tokenizer, [ids], model.device)
        encoded.append(dict(zip(("input_ids", "attention_mask"), tensors, strict=True)))
    rows = race({**sides, **ours.sides}, encoded, ours.add, categories=categories)
    for row in rows:
        print(f"{row['side']:>20}: {row['speedup']:.2f}x, {row['ms_per_token']:.1f} ms per token")
        if engine := engines.get(row["side"]):
            row |= ours.counted(row["side"], categories)
            row["mode"], row["boldness"] = engine.config.mode, engine.boldness
            row["drafts"] = list(engine.config.drafts)
            row["certificate"] = engine.certificate and engine.certificate.to_dict()
    return rows


def _attack(
    args: argparse.Namespace, made: Any, model: Any, tokenizer: Any, prompts: list[tuple[str, str]]
) -> Any:
    from tide.bench.attack import GOALS, attack, defend
    from tide.calibration.progress import bars
    from tide.config import TIDEConfig
    from tide.engine import TIDE
    from tide.errors import ConfigError

    if len(args.risk) > 1:
        raise ConfigError(f"--attack takes one --risk; got {len(args.risk)}.")
    settings = TIDEConfig(exit_threshold=None, min_layers=made.config.min_layers, audit_tail=True)
    texts, rows = [text for _, text in prompts], []
    with bars(quiet=False) as bar:
        for goal in GOALS:
            if args.risk:  # a certificate brings its own settings
                engine = TIDE(model, made, risk=args.risk[0])
            else:
                engine = TIDE(model, made, settings, boldness=args.boldness[0])
            engine.guard, guard = None, engine.guard  # the search must not trip what it attacks
            found = attack(
                engine, tokenizer, texts, goal, rounds=args.rounds,
                population=min(16, len(texts)), new_tokens=args.new_tokens,
                tick=bar(f"Attack: {goal}"),
            )  # fmt: skip
            engine.guard = guard
            row = found.to_dict()
            if guard is not None:
                some = [attempt.text for attempt in found.end]
                row["served"] = defend(engine, tokenizer, some, new_tokens=args.new_tokens)
            rows.append(row)
    for row in rows:
        print(f"{row['goal']}: {row['start']['mean']:.1%} on average at the start, "
              f"{row['end']['best']:.1%} at best and {row['end']['mean']:.1%} on average after "
              f"{row['tried']} prompts")  # fmt: skip
        if "served" in row:
            print(f"  promised {row['served']['promised']:.1%}, the watch fired after "
                  f"{row['served']['watch_fired_after']} sequences")  # fmt: skip
    return rows
