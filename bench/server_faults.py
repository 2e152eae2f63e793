"""Faults of a server: its processes are killed under requests, and it is told to end.

`server` kills `tide serve` and vLLM's API server in turn, `worker` the engine and its worker. After
each kill, every request that was under way has its whole answer or an error, no process is left,
and a restart at the same address gives the same answers as before. Nothing is compiled, so that
restarts are quick.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from measure import report, short_prompts
from rich.progress import track
from server import Outcome, Request, Server
from transformers import AutoTokenizer

LIMIT = 256  # tokens of a request, with its prompt
SILENT = {"lost", "wrong length"}  # errors that the client finds, and nobody has told it
SOON = 0.5  # seconds after which a server with requests is told to end
DRAIN = 120  # seconds that requests may take after SIGTERM


def _titled(part: str) -> Callable[[Server], psutil.Process]:
    """The process of the server's with this in its title."""

    def find(server: Server) -> psutil.Process:
        titles = {" ".join(one.cmdline()): one for one in server.processes()}
        found = [one for title, one in titles.items() if part in title]
        if not found:
            raise SystemExit(f"No process of the server is called {part}: {sorted(titles)}")
        return found[0]

    return find


# What each command kills, in turn.
TARGETS: dict[str, dict[str, Callable[[Server], psutil.Process]]] = {
    "server": {
        "tide serve": lambda server: server.processes()[0],
        "vLLM's API server": lambda server: server.processes()[0].children()[0],
    },
    "worker": {"engine": _titled("EngineCore"), "worker": _titled("Worker")},
}


class Expected:
    """The answers of an undisturbed server, each to a prompt alone."""

    def __init__(self, server: Server, prompts: Sequence[list[int]], new: int) -> None:
        self.prompts, self.new = prompts, new
        self.answers = asyncio.run(server.alone(prompts, new))

    def check(self, server: Server) -> bool:
        """Whether a server gives them."""
        return asyncio.run(server.alone(self.prompts, self.new)) == self.answers

    def requests(self) -> list[Request]:
        """All of them at once."""
        return [Request(f"r-{k}-", prompt, self.new) for k, prompt in enumerate(self.prompts)]

    def judge(self, outcomes: Sequence[Outcome], moment: float) -> Counter[str]:
        """How many of the requests under way at a moment had a whole answer, an error, or neither.

        Args:
            outcomes: of all requests.
            moment: in seconds after they were sent.
        """
        found = Counter[str]()
        for outcome, answer in zip(outcomes, self.answers, strict=True):
            whole, begun = outcome.ids == answer, outcome.ids == answer[: len(outcome.ids)]
            if whole and not outcome.errors and outcome.last < moment:
                found["answered before"] += 1
            elif SILENT & set(outcome.errors) or not (whole or outcome.errors):
                found["cut, without an error"] += 1
            elif outcome.errors:
                found["error" if begun else "error after other tokens"] += 1
            else:
                found["whole"] += 1
        return found


async def _under_load(
    server: Server, requests: Sequence[Request], after: float, act: Callable[[], Any]
) -> list[Outcome]:
    """Send requests, and act while they are under way."""
    running = asyncio.create_task(server.load(requests))
    await asyncio.sleep(after)
    act()
    return await running


def kills(
    what: str, count: int, server: Server, expected: Expected, rng: random.Random
) -> dict[str, Any]:
    """Kill processes of a server some times, and start it again."""
    targets, total = list(TARGETS[what].items()), Counter[str]()
    began = time.perf_counter()
    asyncio.run(server.load(expected.requests()))
    seconds = time.perf_counter() - began
    by_target: dict[str, Any] = {
        name: {"kills": 0, "exit_codes": Counter[str](), "same_answers_after": 0, "left": 0}
        for name, _ in targets
    }
    for number in track(range(count), description="kills"):
        name, find = targets[number % len(targets)]
        row, tree, moment = by_target[name], server.processes(), rng.uniform(0.02, 0.9) * seconds
        outcomes = asyncio.run(_under_load(server, expected.requests(), moment, find(server).kill))
        total += expected.judge(outcomes, moment)
        row["exit_codes"][str(server.process.wait(300))] += 1
        _, alive = psutil.wait_procs(tree, timeout=60)
        row["left"] += len(alive)
        for process in alive:
            process.kill()
        server.start()
        row["same_answers_after"] += expected.check(server)
        row["kills"] += 1
    return {"requests_under_way": dict(total), "killed": by_target}


def drain(server: Server, expected: Expected) -> dict[str, Any]:
    """Tell a server to end while requests are under way."""
    tree = server.processes()
    tell = server.process.send_signal
    outcomes = asyncio.run(
        _under_load(server, expected.requests(), SOON, lambda: tell(signal.SIGTERM))
    )
    code = server.process.wait(DRAIN + 60)
    _, alive = psutil.wait_procs(tree, timeout=60)
    found = expected.judge(outcomes, SOON)
    return {"requests": dict(found), "exit_code": code, "left": len(alive)}


def run(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    given = [
        "--dtype", "float32", "--max-model-len", str(LIMIT), "--max-num-seqs", "16",
        "--enforce-eager", "--shutdown-timeout", str(DRAIN),
    ]  # fmt: skip
    server = Server(args.model, given, threads=args.threads)
    try:
        expected = Expected(server, short_prompts(tokenizer, 12, 48), 24)
        found = kills(args.what, args.kills, server, expected, random.Random(args.seed))
        found["told_to_end"] = drain(server, expected)
    finally:
        if server.process.poll() is None:
            server.stop(DRAIN + 60)
    report(
        f"processes of a server killed under requests: {args.what}", args, found,
        dtype="float32", kills=args.kills, requests_at_once=len(expected.prompts),
        new_tokens=expected.new, seed=args.seed,
    )  # fmt: skip
