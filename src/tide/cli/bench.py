"""Gives `tide bench MODEL DIR`: every mode on the same prompts; `--attack` looks for bad ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tide.cli.loading import conditions, data_options, load, model_options


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    model_options(parser)
    parser.add_argument("artifact", type=Path, metavar="DIR", help="an artifact from calibrate")
    data_options(parser, samples=16)
    parser.add_argument(
        "--risk", type=float, help="a certified risk; without, thresholds as calibrated"
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument(
        "--attack", action="store_true", help="search for prompts that fool or deny the exits"
    )
    parser.add_argument("--rounds", type=int, default=10, help="of the search")
    parser.add_argument("--out", type=Path, help="write the JSON here")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and write."""
    import json

    from tide.calibration.data import load_texts
    from tide.exits.files import write_whole

    model, tokenizer = load(args)
    texts = load_texts(args.data, limit=args.samples)
    result = {
        "what": "attack" if args.attack else "every mode on the same prompts, at batch 1",
        "conditions": {
            **conditions(model),
            "risk": args.risk,
            "data": Path(args.data).name,
            "prompts": len(texts),
            "new_tokens": args.new_tokens,
        },
        "results": (_attack if args.attack else _modes)(args, model, tokenizer, texts),
    }
    if args.out:
        write_whole(
            args.out, lambda scratch: scratch.write_text(json.dumps(result, indent=2) + "\n")
        )
    return result


def _engine(args: argparse.Namespace, model: Any) -> Any:
    """The engine in mode exit, certified if a risk was given."""
    from tide.config import TIDEConfig
    from tide.engine import TIDE
    from tide.exits.artifact import Artifact

    made = Artifact.from_pretrained(args.artifact)
    settings = TIDEConfig(exit_threshold=None, min_layers=made.config.min_layers, audit_tail=True)
    # A certificate brings its own settings.
    return TIDE(model, made, None if args.risk else settings, risk=args.risk)


def _modes(args: argparse.Namespace, model: Any, tokenizer: Any, texts: list[str]) -> Any:
    from tide.bench.race import Entrants, Side, race
    from tide.calibration.collect import pad_left
    from tide.calibration.data import encode_prompts
    from tide.config import TIDEConfig
    from tide.engine import TIDE

    plain = {"max_new_tokens": args.new_tokens, "do_sample": False}
    engines = {
        "off": TIDE(model, args.artifact, TIDEConfig(mode="off"), check=False),
        "lossless": TIDE(model, args.artifact),
        "exit": _engine(args, model),
    }
    sides: dict[str, Side] = {
        "generate": lambda prompt: model.generate(**prompt, **plain),
        "prompt lookup": lambda prompt: model.generate(
            **prompt, **plain, prompt_lookup_num_tokens=10
        ),
    }
    ours = Entrants(engines, plain)
    encoded = encode_prompts(tokenizer, texts, 512)
    prompts = []
    for ids in encoded:
        tensors = pad_left(tokenizer, [ids], model.device)
        prompts.append(dict(zip(("input_ids", "attention_mask"), tensors, strict=True)))
    rows = [
        {**row, **ours.counts.get(row["side"], {})}
        for row in race({**sides, **ours.sides}, prompts, ours.add)
    ]
    for row in rows:
        print(f"{row['side']:>14}: {row['speedup']:.2f}x, {row['ms_per_token']:.1f} ms per token")
    return rows


def _attack(args: argparse.Namespace, model: Any, tokenizer: Any, texts: list[str]) -> Any:
    from tide.bench.attack import GOALS, attack, defend
    from tide.calibration.progress import bars

    rows = []
    with bars(quiet=False) as bar:
        for goal in GOALS:
            engine = _engine(args, model)
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
