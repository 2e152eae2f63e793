"""Soak: thousands of requests, each compared with its solo run, and the memory over time.

`threads`: `engine.generate` from 8 threads, short prompts of mixed lengths with mixed options.
`serve`: `tide serve` with streaming, aborting, slow and invalid clients; see `soak_serve.py`.
Ctrl-C ends a run early; what was measured so far is written.

    TIDE_DATA=... python bench/soak.py $(python scripts/weights.py) threads \\
        --out bench/results/soak_threads.json
    TIDE_DATA=... python bench/soak.py $(python scripts/weights.py) serve \\
        --out bench/results/soak_serve.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from measure import MemorySlope, parser, report, short_prompts
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from tide.config import TIDEConfig
from tide.engine import TIDE

CALLS_OF_A_ROUND = 50  # memory is looked at after each round
# Options of calls; all but the first change tokens.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 4},
    {"bad_words_ids": [[260], [11, 28]]},
    {"eos_token_id": [2, 28, 30]},
)


class Pieces(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take some tokens."""
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        """Nothing to do."""


def draw_calls(
    rng: random.Random, prompts: Sequence[list[int]], count: int, new: int, padding: int,
    options: Sequence[dict[str, Any]] = OPTIONS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Arguments of `generate`: batches of one to three prompts with mixed lengths and options."""
    calls = []
    for number in range(count):
        some = rng.sample(prompts, rng.choice((1, 1, 1, 2, 3)))
        longest = max(map(len, some))
        ids = torch.tensor([[padding] * (longest - len(p)) + list(p) for p in some])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in some])
        calls.append(
            {
                "input_ids": ids, "attention_mask": mask, "max_new_tokens": rng.randint(1, new),
                "do_sample": False, "pad_token_id": padding, **options[number % len(options)],
            }
        )  # fmt: skip
    return calls


def run_call(generate: Any, call: dict[str, Any]) -> list[list[int]]:
    """The sequences of a call; raises if a streamer is shown anything else."""
    pieces = Pieces() if len(call["input_ids"]) == 1 else None
    found: list[list[int]] = generate(**call, streamer=pieces).tolist()
    if pieces is not None and pieces.tokens != found[0]:
        raise RuntimeError("the streamer was shown other tokens than the caller")
    return found


def soak_threads(
    engine: TIDE, calls: Sequence[dict[str, Any]], count: int, threads: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Make `count` calls from some threads, each compared with its solo run."""
    alone = [run_call(engine.generate, call) for call in calls]
    wrong = sum(
        found != run_call(engine.model.generate, call)
        for found, call in zip(alone, calls, strict=True)
    )
    rng, work = random.Random(seed), queue.SimpleQueue[int]()
    outcomes: list[str] = []
    stop = threading.Event()
    kept = MemorySlope(lambda: [psutil.Process()])

    def run() -> None:
        while not stop.is_set():
            try:
                number = work.get_nowait()
            except queue.Empty:
                return
            try:
                found = run_call(engine.generate, calls[number])
                what = "same" if found == alone[number] else "different"
                if what == "different" and found in alone:
                    what = "crossed"
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
            outcomes.append(what)

    began = time.perf_counter()
    # Between the rounds no call is under way: what memory is held then is kept from call to call.
    rounds = max(1, count // CALLS_OF_A_ROUND)
    with contextlib.suppress(KeyboardInterrupt), Progress() as bar:
        task = bar.add_task("calls", total=count)
        for number in range(rounds):
            for _ in range(count * number // rounds, count * (number + 1) // rounds):
                work.put(rng.randrange(len(calls)))
            workers = [threading.Thread(target=run) for _ in range(threads)]
            try:
                for worker in workers:
                    worker.start()
                while any(worker.is_alive() for worker in workers):
                    time.sleep(0.2)
                    bar.update(task, completed=len(outcomes))
            except KeyboardInterrupt:
                stop.set()
                raise
            finally:
                for worker in workers:
                    worker.join()
            free_memory()
            kept.sample(len(outcomes))
    return {
        "calls": count, "finished": len(outcomes), "outcomes": dict(Counter(outcomes)),
        "distinct": len(calls), "solo_runs_that_differ_from_generate": wrong,
        "seconds": round(time.perf_counter() - began, 1), "memory": kept.summary(),
    }  # fmt: skip


def free_memory() -> None:
    """Give back what is no longer used: without it, memory follows the allocator's habits."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def threads(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    engine = TIDE(model, config=TIDEConfig(mode=args.mode))
    prompts = short_prompts(tokenizer, 60, 64)
    calls = draw_calls(random.Random(0), prompts, args.distinct, args.new, tokenizer.pad_token_id)
    found = soak_threads(engine, calls, args.requests or 2000, args.callers or 8)
    report(
        "generate from threads at once", args, found, dtype="float32", mode=args.mode,
        callers=args.callers or 8, most_new_tokens=args.new,
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("what", choices=("threads", "serve"))
    options.add_argument("--requests", type=int, help="2000 for threads, 20000 for serve")
    options.add_argument("--distinct", type=int, default=60, help="requests that differ")
    options.add_argument("--callers", type=int, help="8 threads, or 24 clients")
    options.add_argument("--new", type=int, default=16, help="most new tokens of a request")
    options.add_argument("--eager", action="store_true", help="a server that compiles nothing")
    options.add_argument("--stock", action="store_true", help="vLLM's own server, to compare with")
    options.add_argument("--engines", type=int, default=1, help="data-parallel, of a server")
    options.add_argument("--mode", default="lossless", help="of the engine, for threads")
    args = options.parse_args()
    if args.what == "threads":
        threads(args)
    else:
        from soak_serve import serve

        serve(args)


if __name__ == "__main__":
    main()
