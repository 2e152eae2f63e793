"""Where the time of decoding goes: layers, head, gates, and the rest, which the host spends.

    TIDE_DATA=... python bench/step_costs.py $(python scripts/weights.py) --artifact DIR \\
        --out bench/results/step_costs.json

Milliseconds for each generated token after the prompt, at batch 1 and not compiled, so that the
parts can be told apart; the methods take turns on the same prompts. The rest is what the steps take
beside the passes: drafting, preparing a pass, committing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from measure import Stopwatch, chat, parser, report, spec_bench
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.config import TIDEConfig
from tide.decode.loop import DecodeLoop
from tide.engine import TIDE
from tide.exits.gate import ExitGate
from tide.exits.heads import SuccessorHead, TargetHead
from tide.models.segments import SegmentRunner

PARTS = {
    "all": [(DecodeLoop, "step")],
    "layers": [(SegmentRunner, "_forward")],
    "head": [(TargetHead, "forward"), (SuccessorHead, "forward")],
    "gates": [(ExitGate, "forward")],
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--prompts", type=int, default=13)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--artifact", type=Path, required=True)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    configs = {
        "off": TIDEConfig(mode="off"),
        "lossless": TIDEConfig(mode="lossless"),
        "exits": TIDEConfig(mode="exit", drafts=()),
        "exits and drafts": TIDEConfig(mode="exit"),
    }
    engines = {name: TIDE(model, args.artifact, config) for name, config in configs.items()}
    clock = Stopwatch(PARTS, within="all")
    spent: dict[str, Counter[str]] = {name: Counter() for name in engines}
    for turn, question in enumerate(track(spec_bench(args.prompts + 1))):
        prompt = chat(tokenizer, [question["text"]])
        for name, engine in engines.items():
            clock.seconds.clear()
            engine.generate(**prompt, max_new_tokens=args.new, do_sample=False)
            stats = engine.last_stats
            if turn:  # the first warms up
                spent[name].update(clock.seconds)
                spent[name]["tokens"] += stats.total_tokens - 1  # the prompt's pass gives the first
                spent[name]["steps"] += stats.steps
    rows = []
    for name, found in spent.items():
        parts = {part: 1e3 * found[part] / found["tokens"] for part in ("layers", "head", "gates")}
        parts["host"] = 1e3 * found["all"] / found["tokens"] - sum(parts.values())
        rows.append(
            {"method": name, "tokens_per_step": round(found["tokens"] / found["steps"], 3),
             "ms_per_token": {part: round(ms, 3) for part, ms in parts.items()}}
        )  # fmt: skip
        print(rows[-1])
    report(
        "time of decoding by part, batch 1, not compiled", args, rows, dtype=args.dtype,
        batch=1, prompts=args.prompts, new_tokens=args.new,
    )  # fmt: skip


if __name__ == "__main__":
    main()
