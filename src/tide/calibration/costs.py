"""Gives what layers, heads and routers cost on this device, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tide.exits.blend import Blend, gather_opinions
from tide.exits.heads import ExitHead, Readout
from tide.exits.hints import Hint
from tide.exits.routers import TokenRouter
from tide.models.depth import DepthRunner


@dataclass(frozen=True)
class Costs:
    """Seconds for one token at batch 1.

    Attributes:
        layer: one layer.
        start: what a pass costs beside its layers, however deep it goes.
        head: final norm and the whole head.
        exit_head: an exit head as it is asked: affine map, norm, the vocabulary read, the blend.
        router: one router, its answer read.
    """

    layer: float
    start: float
    head: float
    exit_head: float
    router: float

    def to_dict(self) -> dict[str, float]:
        """As plain JSON."""
        return asdict(self)


@torch.no_grad()
def measure_costs(
    runner: DepthRunner,
    exit_readout: Readout,
    head: ExitHead,
    router: TokenRouter,
    *,
    context: int = 128,
) -> Costs:
    """Measure in turns, after a prompt of at most `context` tokens, and take medians."""
    n = runner.n_layers
    context = min(context, runner.config.max_position_embeddings - 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.config.vocab_size, (1, context + 1), generator=generator)
    ids = ids.to(runner.input_device)
    head, router = head.to(exit_readout.device, exit_readout.dtype), router.to(exit_readout.device)
    blend, hint = Blend().to(exit_readout.device), [Hint()]
    with runner:
        cache = runner.new_cache(1)
        runner.run(ids[:, :context], 0, n, cache=cache)
        state = runner.run(ids[:, context:], 0, n, cache=cache)[0]
        part = max(1, n // 2)

        def layers(hi: int) -> Callable[[], Any]:
            def run() -> None:
                cache.fall_back([context])
                runner.run(ids[:, context:], 0, hi, cache=cache)

            return run

        def exit_head() -> None:
            logits = exit_readout(head.lift(state.to(exit_readout.device)))
            said = exit_readout.tokens(logits.argmax(-1)).tolist()
            blend(gather_opinions(blend.features, logits, said, None, hint)).item()

        sides: dict[str, Callable[[], Any]] = {
            "all": layers(n),
            "part": layers(part),
            "head": lambda: runner.logits(state).argmax(-1).item(),
            "exit_head": exit_head,
            "router": lambda: router(state.to(router.up.weight)).item(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(12):
            for name, run in sides.items():
                _wait()
                began = time.perf_counter()
                run()
                _wait()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    layer = (median["all"] - median["part"]) / max(n - part, 1)
    if layer <= 0:  # one layer only, or a machine too busy to tell half depth from whole depth
        layer = median["all"] / n
    start = max(median["all"] - n * layer, 0.0)
    return Costs(layer, start, median["head"], median["exit_head"], median["router"])


def _wait() -> None:
    """Let an accelerator finish what it was given, so that it is timed where it belongs."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
