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
import random
import statistics
import time
from typing import Any

from measure import chat, parser, report, rows_of, shuffled
from rich.progress import track
from server import Outcome, Request, Server
from transformers import AutoTokenizer

OURS, STOCK = "tide serve", "vLLM"


def plans_of(args: Any, rate: float, prompts: list[list[int]]) -> list[Request]:
    draw, at, plans = random.Random(rate), 0.0, []
    for number in range(args.requests):
        at += draw.expovariate(rate)
        patience = draw.uniform(0.1, 4.0) if draw.random() < args.aborted else None
        plans.append(
            Request(
                f"r{rate:g}-{number}", draw.choice(prompts), draw.randint(8, args.new), at, patience
            )
        )
    return plans


def summarise(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    for one in outcomes:
        one.errors += ["refused"] * (one.refused is not None)
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
    given = ["--dtype", args.dtype, "--max-model-len", "1024", "--max-num-seqs", "32"]
    servers = {
        name: Server(args.model, given, ours=name == OURS, threads=args.threads)
        for name in (STOCK, OURS)
    }
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
