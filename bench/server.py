"""A server in a process of its own, and a client that streams from it and checks the answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from tide.cli.serve import end_with_parent


@dataclass
class Request:
    """A request.

    Attributes:
        name: its id.
        prompt: token ids.
        new: most new tokens.
        at: seconds from the start at which it is sent.
        patience: seconds after which the client disconnects; None: it waits.
        pause: seconds that the client sleeps after every piece it reads.
        changes: fields of the body that are different, as those of an invalid request.
    """

    name: str
    prompt: list[int]
    new: int
    at: float = 0.0
    patience: float | None = None
    pause: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a request; times in seconds from when it was sent.

    Attributes:
        first: until its first token.
        last: until its last token.
        tokens: that came, as the server counts them.
        ids: their ids.
        aborted: by the client.
        refused: the message with which the server refused the request, as an error 4xx.
        errors: what is wrong with the answer.
    """

    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    aborted: bool = False
    refused: str | None = None
    errors: list[str] = field(default_factory=list)


class Server:
    """A server in a process of its own; restarts have the same address.

    Args:
        model: a model folder.
        ours: `tide serve`; otherwise vLLM's own server.
        options: of vLLM.
        threads: of the model.
        gigabytes: of KV.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str] = (),
        *,
        ours: bool = True,
        threads: int = 2,
        gigabytes: int = 1,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        module = ["tide.cli", "serve", model] if ours else [
            "vllm.entrypoints.openai.api_server", "--model", model
        ]  # fmt: skip
        self._command = [sys.executable, "-m", *module, *options, "--port", str(port)]
        self._environment = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": str(gigabytes),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "KMP_BLOCKTIME": "1",
        }  # fmt: skip
        if not ours:
            self._environment["VLLM_PLUGINS"] = ""
        self.address, self.model, self.ours = f"http://127.0.0.1:{port}", model, ours
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        # A session of its own: Ctrl-C stops the benchmark, which then reads the last metrics.
        self.process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip
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

    def stop(self, seconds: float = 60) -> int:
        """End the process by SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def processes(self) -> list[psutil.Process]:
        """The process and all that it has started, the outermost first."""
        outer = psutil.Process(self.process.pid)
        return [outer, *outer.children(recursive=True)]

    def metrics(self) -> dict[str, float]:
        """The values of `/metrics`, by name, added up over their labels.

        And the tokens of each engine, under "engine NUMBER".
        """
        text = urllib.request.urlopen(f"{self.address}/metrics").read().decode()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^([\w:]+)(\{.*\})? (\S+)$", text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
            if name == "vllm:generation_tokens_total":
                engine = re.search(r'engine="(\d+)"', labels)
                found[f"engine {engine[1] if engine else 0}"] = float(value)
        return found

    async def load(self, requests: Sequence[Request]) -> list[Outcome]:
        """Send all requests, each at its time."""
        async with session() as client:
            began = time.perf_counter()

            async def send(request: Request) -> Outcome:
                await asyncio.sleep(began + request.at - time.perf_counter())
                return await self.send(client, request)

            return await asyncio.gather(*map(send, requests))

    async def alone(self, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
        """The answers to prompts, sent one after the other."""
        found = []
        async with session() as client:
            for number, prompt in enumerate(prompts):
                outcome = await self.send(client, Request(f"one-{number}-", prompt, new))
                if outcome.errors or outcome.refused is not None:
                    raise SystemExit(f"A request alone failed: {outcome}")
                found.append(outcome.ids)
        return found

    async def send(self, client: aiohttp.ClientSession, request: Request) -> Outcome:
        """Send a request and read its answer, which is checked to be whole and its own."""
        body = {
            "model": self.model, "prompt": request.prompt, "max_tokens": request.new,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, **request.changes,
        }  # fmt: skip
        limit = aiohttp.ClientTimeout(total=request.patience or 3600)
        found, began = Outcome(), time.perf_counter()
        try:
            async with client.post(
                f"{self.address}/v1/completions", json=body, timeout=limit,
                headers={"X-Request-Id": request.name},
            ) as got:  # fmt: skip
                if got.status == 200:
                    await _read(got, request, found, began)
                elif 400 <= got.status < 500:
                    found.refused = ((await got.json()).get("error") or {}).get("message", "")
                else:
                    found.errors.append(f"status {got.status}")
        except asyncio.TimeoutError:
            found.aborted = request.patience is not None
            found.errors += [] if found.aborted else ["no answer"]
        except aiohttp.ClientError as error:
            found.errors.append(type(error).__name__)
        return found


def session() -> aiohttp.ClientSession:
    """A client with as many connections as there are requests."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def _read(
    got: aiohttp.ClientResponse, request: Request, found: Outcome, began: float
) -> None:
    usage, reason = None, None
    async for line in got.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:  # the stream had begun, so the status could not tell
            if 400 <= int(chunk["error"].get("code") or 500) < 500 and not found.ids:
                found.refused = chunk["error"].get("message", "")
            else:
                found.errors.append("error in the stream")
            return
        if request.name not in chunk["id"]:
            found.errors.append("crossed")
        usage = chunk.get("usage") or usage
        if chunk["choices"]:
            (choice,) = chunk["choices"]
            found.last = time.perf_counter() - began
            found.first = found.first or found.last
            found.ids += choice.get("token_ids") or []
            reason = choice["finish_reason"] or reason
        if request.pause:
            await asyncio.sleep(request.pause)
    if usage is None:
        found.errors.append("lost")
        return
    found.tokens = usage["completion_tokens"]
    complete = reason == "stop" or (reason, found.tokens) == ("length", request.new)
    counted = usage["prompt_tokens"] == len(request.prompt) and found.tokens == len(found.ids)
    if not complete or not counted:
        found.errors.append("wrong length")
