"""Soak of `tide serve`: clients that stream, disconnect, read slowly or send nonsense.

Each answer is compared with that of the same server to this prompt alone, token by token; the
answer to fewer tokens is the beginning of it. Each invalid request must be refused with a message.
In the end the server's metrics must fit what the clients counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from measure import MemorySlope, report, short_prompts
from rich.progress import Progress
from server import Outcome, Request, Server, session
from transformers import AutoTokenizer

LIMIT = 256  # tokens of a request, with its prompt
NEAR = 1e-3  # difference of two log-probabilities that rounding may turn around

# Fields of invalid requests.
INVALID: dict[str, dict[str, Any]] = {
    "no tokens wanted": {"max_tokens": -1},
    "a temperature that is a word": {"temperature": "hot"},
    "top_p of 3": {"top_p": 3.0},
    "an empty prompt": {"prompt": []},
    "a prompt over the limit": {"prompt": [5] * (LIMIT + 1)},
    "an id out of the vocabulary": {"prompt": [5, 10**6]},
    "a negative id": {"prompt": [5, -3]},
    "a prompt that is a number": {"prompt": 1.5},
    "no such model": {"model": "nobody/nothing"},
    "a penalty of 9": {"frequency_penalty": 9.0},
}


def draw_requests(
    rng: random.Random, prompts: Sequence[list[int]], count: int, new: int
) -> Iterator[Request]:
    """Requests: one in ten is aborted, one in ten read slowly, one in twenty invalid."""
    names = list(INVALID)
    for number in range(count):
        request = Request(f"soak-{number}-", rng.choice(prompts), 1 + int(new * rng.random() ** 2))
        kind = rng.random()
        if kind < 0.1:
            request.patience = rng.uniform(0.01, 2.0)
        elif kind < 0.2:
            request.pause = rng.uniform(0.05, 0.3)
        elif kind < 0.25:
            request.name += (kind_of := names[number % len(names)]).replace(" ", "_")
            request.changes = INVALID[kind_of]
        yield request


class Soak:
    """Requests to a server, and what became of them.

    Args:
        server: to send them to.
        prompts: of the requests.
        new: most new tokens.
    """

    def __init__(self, server: Server, prompts: Sequence[list[int]], new: int) -> None:
        self.server, self.prompts, self.new = server, prompts, new
        self.outcomes = Counter[str]()
        self.counts = Counter[str]()
        self.different: list[dict[str, Any]] = []
        self.alone: dict[tuple[int, ...], list[int]] = {}
        self.memory = MemorySlope(server.processes)
        self.before: dict[str, float] = {}

    async def run(self, count: int, clients: int, seed: int = 0) -> None:
        """Send `count` requests from some clients at once, after all prompts alone."""
        requests = draw_requests(random.Random(seed), self.prompts, count, self.new)
        answers = await self.server.alone(self.prompts, self.new)
        self.alone = dict(zip(map(tuple, self.prompts), answers, strict=True))
        async with session() as client:
            self.before = self.server.metrics()
            with Progress() as bar:
                task = bar.add_task("requests", total=count)

                async def work() -> None:
                    for request in requests:  # shared: each is taken once
                        self._note(request, await self.server.send(client, request))
                        done = sum(self.outcomes.values())
                        bar.update(task, completed=done)
                        if done % max(1, count // 500) == 0:
                            self.memory.sample(done)

                await asyncio.gather(*(work() for _ in range(clients)))
            await self._look_at_differences(client)

    def _note(self, request: Request, found: Outcome) -> None:
        self.outcomes[self._what(request, found)] += 1
        if not (found.aborted or found.errors or found.refused):
            self.counts["prompt tokens"] += len(request.prompt)
            self.counts["tokens"] += found.tokens

    def _what(self, request: Request, found: Outcome) -> str:
        if request.changes:
            return "invalid, refused" if found.refused else f"not refused: {request.name}"
        if found.refused is not None:
            return f"refused: {found.refused}"
        if found.errors:
            return ", ".join(found.errors)
        expected = self.alone[tuple(request.prompt)][: request.new]
        if found.aborted:
            whole = found.ids == expected[: len(found.ids)]
            return "aborted by the client" if whole else "aborted, and different"
        if found.ids == expected:
            return "read slowly, same" if request.pause else "same"
        self.different.append({"request": request, "ids": found.ids, "expected": expected})
        return "different"

    async def _look_at_differences(self, client: Any) -> None:
        """Whether the first token that differs is nearly as likely as the expected one."""
        for one in self.different:
            pairs = zip(one["ids"], one["expected"], strict=False)
            at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
            one["first_at"] = at
            if at is None:
                continue
            body = {
                "model": self.server.model, "max_tokens": 1, "temperature": 0, "logprobs": 2,
                "prompt": [*one["request"].prompt, *one["expected"][:at]],
            }  # fmt: skip
            async with client.post(f"{self.server.address}/v1/completions", json=body) as got:
                (choice,) = (await got.json())["choices"]
            best, second = sorted(choice["logprobs"]["top_logprobs"][0].values())[-1:-3:-1]
            one["difference"] = best - second

    def summary(self) -> dict[str, Any]:
        """What was counted, by the clients and by the server."""
        return {
            "outcomes": dict(self.outcomes),
            "near_ties_among_different": sum(
                one.get("difference", 1.0) < NEAR for one in self.different
            ),
            "different": [
                {"first_at": one.get("first_at"), "difference": one.get("difference")}
                for one in self.different[:20]
            ],
            "server": self._metrics(),
            "memory": self.memory.summary(),
        }  # fmt: skip

    def _metrics(self) -> dict[str, Any]:
        """The server's counts since the first request, and whether they fit the clients'."""
        for _ in range(60):  # requests whose client has gone take a moment to end
            now = self.server.metrics()
            idle = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] == 0
            if idle:
                break
            time.sleep(0.5)
        names = {
            "finished": "vllm:request_success_total", "tokens": "vllm:generation_tokens_total",
            "prompt_tokens": "vllm:prompt_tokens_total",
            "drafted": "tide:drafted_tokens_total", "accepted": "tide:accepted_tokens_total",
        }  # fmt: skip
        found = {
            name: now.get(metric, 0.0) - self.before.get(metric, 0.0)
            for name, metric in names.items()
        }
        by_engine = [name for name in now if name.startswith("engine ")]
        answered = sum(
            n for what, n in self.outcomes.items() if "same" in what or what == "different"
        )
        aborted = sum(n for what, n in self.outcomes.items() if what.startswith("aborted"))
        fits = {
            "idle at the end": idle,
            "every engine": all(now[name] > self.before.get(name, 0.0) for name in by_engine),
            # An aborted request may have ended, have been aborted, or never have arrived.
            "finished requests": answered <= found["finished"] <= answered + aborted,
            "tokens": self.counts["tokens"] <= found["tokens"]
            <= self.counts["tokens"] + aborted * self.new,
            "prompt tokens": self.counts["prompt tokens"] <= found["prompt_tokens"],
            "drafts": not self.server.ours
            or 0 < found["accepted"] <= min(found["drafted"], found["tokens"]),
        }  # fmt: skip
        return {**found, "fits_the_clients_counts": fits}


def serve(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = short_prompts(tokenizer, args.distinct, 64)
    clients, count = args.callers or 24, args.requests or 20_000
    given = ["--dtype", "float32", "--max-model-len", str(LIMIT), "--max-num-seqs", "32"]
    given += ["--enforce-eager"] * args.eager
    given += ["--data-parallel-size", str(args.engines)] if args.engines > 1 else []
    server = Server(args.model, given, ours=not args.stock, threads=args.threads, gigabytes=2)
    try:
        soak, began = Soak(server, prompts, args.new), time.perf_counter()
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(soak.run(count, clients))
        found = soak.summary()
        found |= {"requests": count, "seconds": round(time.perf_counter() - began)}
    finally:
        code = server.stop()
    report(
        "a server, soaked", args, {**found, "exit_code_after_sigterm": code}, dtype="float32",
        clients=clients, distinct_prompts=len(prompts), most_new_tokens=args.new,
        compiled=not args.eager, engines=args.engines, stock=args.stock,
        seconds_to_start=round(server.seconds_to_start),
    )  # fmt: skip
