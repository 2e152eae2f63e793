"""The command `tide bench MODEL DIR`: every mode on the same prompts, or an adversarial search."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide.cli.loading import (
    conditions,
    data_options,
    from_1,
    load,
    load_model,
    model_options,
    share,
)

if TYPE_CHECKING:
    from tide.calibration.data import Prompt


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    model_options(parser)
    parser.add_argument("artifact", metavar="DIR", help="an artifact from calibrate, or a hub id")
    data_options(parser, samples=16)
    parser.add_argument(
        "--risk", type=share, nargs="+", default=[], help="certified risks to run as well"
    )
    parser.add_argument(
        "--threshold-scale", type=float, nargs="+", default=[1.0],
        help="uncertified thresholds to run: 1 is as calibrated, higher values exit more often",
    )  # fmt: skip
    parser.add_argument(
        "--draft", metavar="MODEL", help="a draft model for assisted generation (default: none)"
    )
    parser.add_argument("--new-tokens", type=from_1, default=128, help="longest answer, in tokens")
    parser.add_argument("--batch", type=from_1, default=1, help="prompts answered together")
    parser.add_argument(
        "--compile", action="store_true", help="also run TIDE with compiled segments"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="run TIDE with compiled segments only"
    )
    parser.add_argument(
        "--attack",
        action="store_true",
        help="search for prompts that cause wrong exits or prevent exits",
    )
    parser.add_argument(
        "--generations", type=from_1, default=10, help="with --attack: search steps"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here (default: nowhere)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and write."""
    import json

    from tide.calibration.data import load_by_category
    from tide.calibration.fresh import unseen
    from tide.errors import ConfigError
    from tide.exits.artifact import Artifact
    from tide.exits.files import require_writable, write_whole

    _require_effect(args)
    if args.out:
        require_writable(args.out)
    made = Artifact.from_pretrained(args.artifact)
    enough = args.samples + len(made.record.get("used", ()))
    prompts = unseen(load_by_category(args.data, enough), made)[: args.samples]
    if args.batch > len(prompts):
        raise ConfigError(
            f"--batch must be at most the number of prompts, {len(prompts)}; got {args.batch}."
        )
    # Whole batches only: passes of another size would be timed, and compiled, while they count.
    prompts = prompts[: len(prompts) // args.batch * args.batch]
    model, tokenizer = load(args)
    result = {
        "what": "attack" if args.attack else "every mode on the same prompts",
        "conditions": {
            **conditions(model),
            "exits": made.exits,
            "draft": args.draft and Path(args.draft).name,
            "data": Path(args.data).name,
            "prompts": len(prompts),
            "batch": args.batch,
            "new_tokens": args.new_tokens,
        },
        "results": (_attack if args.attack else _modes)(args, made, model, tokenizer, prompts),
    }
    if args.out:
        write_whole(
            args.out, lambda scratch: scratch.write_text(json.dumps(result, indent=2) + "\n")
        )
    return result


def _require_effect(args: argparse.Namespace) -> None:
    """Raise for an option that would have no effect."""
    from tide.errors import ConfigError

    if args.draft and args.batch > 1:
        raise ConfigError("--draft counts with --batch 1 only: transformers drafts for one prompt.")
    for option in ("--draft", "--compile", "--compile-only"):
        if args.attack and getattr(args, option[2:].replace("-", "_")):
            raise ConfigError(f"--attack runs uncompiled exits alone: omit {option}.")
    if args.attack and args.batch > 1:
        raise ConfigError(f"--attack sets its own batches; got --batch {args.batch}: omit it.")


def _modes(
    args: argparse.Namespace, made: Any, model: Any, tokenizer: Any, prompts: list[Prompt]
) -> Any:
    from tide.bench.baselines import compiled_generate
    from tide.bench.compare import BASELINE, COMPILED, WARM_UP, EngineMethods, Method, compare
    from tide.calibration.answers import end_tokens, pad_left, pad_token
    from tide.calibration.data import encode_prompts
    from tide.models.fingerprint import dtype_name

    alone, greedy = args.batch == 1, {"max_new_tokens": args.new_tokens, "do_sample": False}
    greedy["pad_token_id"] = pad_token(tokenizer)
    categories = [prompt.category for prompt in prompts] if alone else []
    texts = [WARM_UP] * args.batch + [prompt.text for prompt in prompts]
    ids, encoded = encode_prompts(tokenizer, texts, 512), []
    for first in range(0, len(ids), args.batch):
        tensors = pad_left(tokenizer, ids[first : first + args.batch], model.device)
        encoded.append(dict(zip(("input_ids", "attention_mask"), tensors, strict=True)))
    warm_up, *encoded = encoded
    draft = load_model(args.draft, dtype_name(model), str(model.device)) if args.draft else None
    engines = {} if args.compile_only else _engines(args, made, model)
    if args.compile or args.compile_only:
        compiled = _engines(args, made, model, compile=True)
        engines |= {f"{name}, compiled": engine for name, engine in compiled.items()}
    theirs: dict[str, Method] = {
        BASELINE: lambda prompt: model.generate(**prompt, **greedy),
        COMPILED: compiled_generate(model, greedy),
    }
    if alone:  # transformers drafts for one sequence only
        theirs["prompt lookup"] = lambda prompt: model.generate(
            **prompt, **greedy, prompt_lookup_num_tokens=10
        )
    if draft is not None:
        theirs["assisted generation"] = lambda prompt: model.generate(
            **prompt, **greedy, assistant_model=draft
        )
    ours = EngineMethods(engines, greedy)
    results = compare(
        {**theirs, **ours.methods}, encoded, ours.add, categories=categories,
        baselines=list(theirs), ends=end_tokens(model), warm_up=warm_up,
    )  # fmt: skip
    print(f"{'':>36}  x {results[0]['baseline']}, x eager, ms per token")
    for found in results:
        name = found["method"]
        print(f"{name:>36}: {found['speedup']:.2f}, {found['speedup_over_eager']:.2f}, "
              f"{found['ms_per_token']:.1f}")  # fmt: skip
        if name in engines:
            engine = engines[name]
            found |= ours.counted(name, categories)
            found["mode"], found["threshold_scale"] = engine.config.mode, engine.threshold_scale
            found["plan"] = str(engine.plan)
            found["expected"] = engine.plan.expected
            found["expected_tokens_per_step"] = engine.plan.tokens_per_step
            found["drafts"] = list(engine.config.drafts)
            found["certificate"] = engine.certificate and engine.certificate.to_dict()
    return results


def _engines(args: argparse.Namespace, made: Any, model: Any, **options: Any) -> dict[str, Any]:
    """Every mode that is to be measured, by name."""
    from tide.config import TIDEConfig
    from tide.engine import TIDE

    exits = TIDEConfig(exit_threshold=None, min_layers=made.config.min_layers, audit_tail=True)
    engines = {
        "off": TIDE(model, made, TIDEConfig(mode="off"), **options),
        "lossless": TIDE(model, made, **options),
        "exit without drafts": TIDE(model, made, exits.with_(drafts=()), **options),
    }
    for scale in args.threshold_scale:
        engine = TIDE(model, made, exits, threshold_scale=scale, **options)
        engines[f"exit, threshold scale {scale:g}"] = engine
    if not args.risk:
        engines["auto"] = TIDE(
            model, made, exits.with_(mode="auto"), threshold_scale=args.threshold_scale[0],
            batch=args.batch, **options,
        )  # fmt: skip
    for risk in args.risk:
        auto = TIDE(model, made, risk=risk, batch=args.batch, **options)
        assert auto.certificate is not None
        certified = exits.with_(min_layers=auto.certificate.min_layers)
        for name, config in (
            (f"exit, risk {risk:g}", certified),
            (f"exit without drafts, risk {risk:g}", certified.with_(drafts=())),
        ):
            engines[name] = TIDE(model, made, config, risk=risk, **options)
        engines[f"auto, risk {risk:g}"] = auto
    return engines


def _attack(
    args: argparse.Namespace, made: Any, model: Any, tokenizer: Any, prompts: list[Prompt]
) -> Any:
    from tide.bench.attack import GOALS, Search, attack, defend
    from tide.config import TIDEConfig
    from tide.engine import TIDE
    from tide.errors import ConfigError
    from tide.progress import bars

    if len(args.risk) > 1:
        raise ConfigError(f"--attack takes one --risk; got {len(args.risk)}.")
    settings = TIDEConfig(exit_threshold=None, min_layers=made.config.min_layers, audit_tail=True)
    texts, results = [prompt.text for prompt in prompts], []
    search = Search(args.generations, min(16, len(texts)), args.new_tokens)
    with bars(quiet=False) as bar:
        for goal in GOALS:
            if args.risk:
                engine = TIDE(model, made, settings, risk=args.risk[0])
            else:
                engine = TIDE(model, made, settings, threshold_scale=args.threshold_scale[0])
            # The search must not trip the circuit breaker that it is about to test.
            circuit_breaker, engine.circuit_breaker = engine.circuit_breaker, None
            found = attack(engine, tokenizer, texts, goal, search, bar(f"Attack: {goal}"))
            engine.circuit_breaker = circuit_breaker
            result = found.to_dict()
            if circuit_breaker is not None:
                some = [attempt.text for attempt in found.end]
                result["served"] = defend(engine, tokenizer, some, new_tokens=args.new_tokens)
            results.append(result)
    for result in results:
        print(f"{result['goal']}: {result['start']['mean']:.1%} on average at the start, "
              f"{result['end']['best']:.1%} at best and {result['end']['mean']:.1%} on average "
              f"after {result['tried']} prompts")  # fmt: skip
        if "served" in result:
            after = result["served"]["drift_detected_after"]
            drift = "no drift detected" if after is None else f"drift detected after {after}"
            print(f"  certified bound {result['served']['certified_bound']:.1%}, {drift}"
                  f"{'' if after is None else ' sequences'}")  # fmt: skip
    return results
