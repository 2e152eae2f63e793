"""Compares the speed-ups that a replay expects with those measured, on the same prompts.

python bench/replay.py MODEL DIR --batch 1 4 --out bench/results/replay.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import interleave, parser, report
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.calibration.answers import pad_left
from tide.config import TIDEConfig
from tide.decode.machinery import tree_lengths
from tide.decode.player import Setting
from tide.decode.recycled import RecycledPredictions
from tide.decode.replay import replay_ways, speedups
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.models.costs import measure_loop
from tide.models.fingerprint import dtype_name


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--documents", type=int, default=16)
    options.add_argument("--new", type=int, default=64, help="tokens of an answer")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threshold-scale", type=float, default=1.0)
    options.add_argument("--compile", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    made = Artifact.load(args.artifact)
    exits = TIDEConfig(exit_threshold=None, min_layers=made.config.min_layers)
    scale = {"threshold_scale": args.threshold_scale, "compile": args.compile}
    engines = {
        "off": TIDE(model.eval(), made, TIDEConfig(mode="off"), compile=args.compile),
        "lossless": TIDE(model, made, exits.with_(mode="lossless"), **scale),
        "exit": TIDE(model, made, exits.with_(drafts=()), **scale),
        "both": TIDE(model, made, exits, **scale),
    }
    results = [compare(engines, made, tokenizer, batch, args) for batch in args.batch]
    report(
        "speed-ups expected by a replay, and measured", args, results, dtype=dtype_name(model),
        documents=args.documents, new_tokens=args.new, repeats=args.repeats, compiled=args.compile,
        threshold_scale=args.threshold_scale, calibration_tokens=made.record["tokens"]["fit"],
    )  # fmt: skip


def compare(
    engines: dict[str, TIDE], made: Artifact, tokenizer: Any, batch: int, args: Any
) -> dict[str, Any]:
    """Expected and measured, at one size of batch."""
    engine = engines["both"]
    machinery, every = engine._machinery, made.recording
    assert every is not None
    # All of one length, since what is measured does not end where the model would end it.
    recording = every.cut(args.new, shortest=args.new)
    if not recording.tokens:
        raise SystemExit(f"No recorded answer has --new {args.new} tokens.")
    recording = recording.first(args.documents * args.new)
    costs = []
    for sequences in sorted({1, batch}):
        machinery.compile(sequences)
        stages = machinery.exits.stages(engine.runner.n_layers)
        read = machinery.exits.gates[0].head_timer()
        trees = tree_lengths(engine.config.max_tree, sequences)
        costs.append(measure_loop(engine.runner, stages, read, sequences, trees=trees))
    layers = tuple(checkpoint.layer for checkpoint in machinery.exits.checkpoints)
    thresholds = tuple(gate.thresholds for gate in machinery.exits.gates)
    setting = Setting(engine.config, layers, thresholds)
    replayed = replay_ways(recording, setting, costs, machinery.exits.table)
    expected = speedups(replayed)
    documents = list(zip(recording.tokens, recording.prompts, strict=True))
    groups = [documents[k : k + batch] for k in range(0, len(documents), batch)]

    steps: dict[str, float] = {}

    def run(name: str, new: int = args.new) -> None:
        engine = engines[name]
        # Or it would draft from its own earlier answers to the same prompts.
        engine._machinery.recycled = RecycledPredictions()
        taken = tokens = 0
        for group in groups:
            ids, mask = pad_left(tokenizer, [t[:p] for t, p in group], engine.model.device)
            engine.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
            tokens += engine.last_stats.total_tokens
            taken += engine.last_stats.steps
        steps[name] = tokens / max(1, taken)

    ways: dict[str, Callable[[], None]] = {name: partial(run, name) for name in engines}
    # Prompts take as long in every mode, and are not part of what is expected.
    seconds = interleave(
        {"prompts": partial(run, "off", 1), **ways}, args.repeats, f"batch {batch}"
    )
    pairs = {
        name: [
            own - prompts for own, prompts in zip(seconds[name], seconds["prompts"], strict=True)
        ]
        for name in engines
    }
    decoding = {name: statistics.median(times) for name, times in pairs.items()}
    measured = {name: decoding["off"] / s for name, s in decoding.items() if name != "off"}
    return {
        "batch": batch,
        "documents": len(documents),
        "expected": expected,
        "measured": measured,
        "ratio": {name: expected[name] / measured[name] for name in measured},
        "tokens_per_step": {
            name: {"expected": replayed[name].tokens_per_step, "measured": steps[name]}
            for name in measured
        },
        "costs": [at.to_dict() for at in costs],
    }


if __name__ == "__main__":
    main()
