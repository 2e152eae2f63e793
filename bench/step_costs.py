"""Where the time of decoding goes: layers, head, gates, and the rest, which the host spends.

    TIDE_DATA=... python bench/step_costs.py $(python scripts/weights.py) --artifact DIR \\
        --out bench/results/step_costs.json

Milliseconds for each generated token after the prompt, at batch 1 and not compiled, so that the
parts can be told apart; the methods take turns on the same prompts. The rest is what the steps take
beside the passes: drafting, preparing a pass, committing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import chat, parser, report, spec_bench
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.config import TIDEConfig
from tide.decode.loop import DecodeLoop
from tide.engine import TIDE
from tide.exits.gate import ExitGate
from tide.models.runner import DepthRunner


class StepClock:
    """Seconds of decode steps by part, from the time it is made."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._in_step = False
        step = DecodeLoop.step
        DecodeLoop.step = lambda loop: self._step(step, loop)  # type: ignore[method-assign]
        DepthRunner._forward_then = lambda *args: self._forward_then(*args)  # type: ignore

    def _step(self, step: Callable[[DecodeLoop], None], loop: DecodeLoop) -> None:
        began, self._in_step = time.perf_counter(), True
        step(loop)
        self._in_step = False
        self.seconds["all"] += time.perf_counter() - began

    def _forward_then(
        self, runner: Any, then: Any, hidden: Any, chunk: Any, cache: Any
    ) -> tuple[Any, Any]:
        began = time.perf_counter()
        states = runner._forward(hidden, chunk, cache)
        between = time.perf_counter()
        result = None if then is None else then(states, chunk.places.notes)
        if self._in_step:
            self.seconds["layers"] += between - began
            part = "gates" if isinstance(then, ExitGate) else "head"
            self.seconds[part] += time.perf_counter() - between
        return states, result


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
    clock = StepClock()
    spent: dict[str, Counter[str]] = {name: Counter() for name in engines}
    for turn, question in enumerate(track([*spec_bench(1), *spec_bench(args.prompts)])):
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
