"""A server under load: `tide serve` beside vLLM's own, requests arriving at random.

    TIDE_DATA=... python bench/vllm_load.py $(python scripts/weights.py) \\
        --out bench/results/vllm_load.json

Both servers run; for each arrival rate they take turns. Requests are streamed and arrive as a
Poisson process; a share of them is aborted by the client. Every answer is checked: that it is the
answer to this request (by its id and the length of its prompt), complete, and that it ended where
the model ended it or after as many tokens as wanted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from measure import chat, parser, report, rows_of, shuffled
from rich.progress import track
from transformers import AutoTokenizer

OURS, STOCK = "tide serve", "vLLM"


@dataclass
class Plan:
    """A request: its prompt, how many tokens it wants, when it comes, when the client gives up."""

    name: str
    prompt: list[int]
    new: int
    at: float
    patience: float | None


@dataclass
class Outcome:
    """What became of a request; times in seconds from when it was sent.

    Attributes:
        first: until its first token.
        last: until its last token.
        tokens: that came.
        aborted: by the client.
        errors: what is wrong with the answer.
    """

    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    aborted: bool = False
    errors: list[str] = field(default_factory=list)


class Server:
    """A server in a process of its own."""

    def __init__(self, args: Any, ours: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        module = ["tide.cli", "serve", args.model] if ours else [
            "vllm.entrypoints.openai.api_server", "--model", args.model
        ]  # fmt: skip
        options = ["--dtype", args.dtype, "--max-model-len", "1024", "--max-num-seqs", "32",
                   "--port", str(port)]  # fmt: skip
        environment = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": str(args.threads),
            "HF_HUB_OFFLINE": "1", "KMP_BLOCKTIME": "1",
        }  # fmt: skip
        if not ours:
            environment["VLLM_PLUGINS"] = ""
        self.address, self.model = f"http://127.0.0.1:{port}", args.model
        self.process = subprocess.Popen(
            [sys.executable, "-m", *module, *options], env=environment, stdout=subprocess.DEVNULL
        )
        began = time.perf_counter()
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"The server ended with {self.process.returncode}.")
            try:
                urllib.request.urlopen(f"{self.address}/health")
                break
            except OSError:
                time.sleep(1)
        self.seconds_to_start = time.perf_counter() - began

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(60)

    async def load(self, plans: list[Plan]) -> list[Outcome]:
        """Send all requests, each at its time."""
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connections) as session:
            began = time.perf_counter()

            async def send(plan: Plan) -> Outcome:
                await asyncio.sleep(began + plan.at - time.perf_counter())
                return await self._send(session, plan)

            return await asyncio.gather(*map(send, plans))

    async def _send(self, session: aiohttp.ClientSession, plan: Plan) -> Outcome:
        body = {
            "model": self.model, "prompt": plan.prompt, "max_tokens": plan.new, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        found, usage, reason, began = Outcome(), None, None, time.perf_counter()
        limit = aiohttp.ClientTimeout(total=plan.patience or 3600)
        try:
            async with session.post(
                f"{self.address}/v1/completions", json=body, timeout=limit,
                headers={"X-Request-Id": plan.name},
            ) as got:  # fmt: skip
                if got.status != 200:
                    found.errors.append(f"status {got.status}")
                    return found
                async for line in got.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if plan.name not in chunk["id"]:
                        found.errors.append("crossed")
                    usage = chunk.get("usage") or usage
                    if chunk["choices"]:
                        found.last = time.perf_counter() - began
                        found.first = found.first or found.last
                        reason = chunk["choices"][0]["finish_reason"] or reason
        except asyncio.TimeoutError:
            found.aborted = True
            return found
        if usage is None:
            found.errors.append("lost")
        else:
            found.tokens = usage["completion_tokens"]
            complete = reason == "stop" or (reason, found.tokens) == ("length", plan.new)
            if usage["prompt_tokens"] != len(plan.prompt) or not complete:
                found.errors.append("wrong length")
        return found


def plans_of(args: Any, rate: float, prompts: list[list[int]]) -> list[Plan]:
    draw, at, plans = random.Random(rate), 0.0, []
    for number in range(args.requests):
        at += draw.expovariate(rate)
        patience = draw.uniform(0.1, 4.0) if draw.random() < args.aborted else None
        plans.append(
            Plan(
                f"r{rate:g}-{number}", draw.choice(prompts), draw.randint(8, args.new), at, patience
            )
        )
    return plans


def summarise(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    done = [one for one in outcomes if not one.aborted and not one.errors]
    first = [1e3 * one.first for one in done if one.first is not None]
    between = [1e3 * (one.last - (one.first or 0)) / max(one.tokens - 1, 1) for one in done]
    errors = [error for one in outcomes for error in one.errors]
    return {
        "requests": len(outcomes), "answered": len(done), "aborted_by_client": sum(
            one.aborted for one in outcomes
        ),
        "errors": {error: errors.count(error) for error in sorted(set(errors))},
        "tokens_per_second": round(sum(one.tokens for one in done) / seconds, 1),
        "first_token_ms_p50_p99": percentiles(first),
        "per_token_ms_p50_p99": percentiles(between),
    }  # fmt: skip


def percentiles(values: list[float]) -> list[float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return [round(cuts[49], 1), round(cuts[98], 1)]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0], help="a second")
    options.add_argument("--requests", type=int, default=2000, help="for each rate and server")
    options.add_argument("--new", type=int, default=48, help="most new tokens of a request")
    options.add_argument("--aborted", type=float, default=0.1, help="share of impatient clients")
    args = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = shuffled([row["turns"][0] for row in rows_of("spec_bench/question.jsonl")])
    prompts = [chat(tokenizer, [text])["input_ids"][0, -256:].tolist() for text in texts[:200]]
    servers = {STOCK: Server(args, ours=False), OURS: Server(args, ours=True)}
    results = []
    try:
        for server in servers.values():  # to warm up
            asyncio.run(server.load(plans_of(args, 7.7, prompts)[:64]))
        for rate in track(args.rates, description="arrival rates"):
            plans = plans_of(args, rate, prompts)
            for name, server in servers.items():
                began = time.perf_counter()
                outcomes = asyncio.run(server.load(plans))
                row = summarise(outcomes, time.perf_counter() - began)
                results.append({"requests_per_second": rate, "server": name, **row})
                print(results[-1], flush=True)
    finally:
        for server in servers.values():
            server.stop()
    report(
        "a server under load", args, results, dtype=args.dtype, most_new_tokens=args.new,
        aborting_clients=args.aborted,
        seconds_to_start={name: round(of.seconds_to_start) for name, of in servers.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
