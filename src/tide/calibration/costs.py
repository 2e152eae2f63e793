"""The cost of layers, heads and routers on this device, measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tide.config import TIDEConfig
from tide.exits.confidence import ConfidenceModel
from tide.exits.files import write_whole
from tide.exits.gate import ExitGate, note
from tide.exits.heads import ExitHead, Readout
from tide.exits.ngrams import NGramPrediction
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.costs import medians
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch


@dataclass(frozen=True)
class Costs:
    """Seconds for one token at batch 1.

    Attributes:
        layer: one layer.
        start: the fixed cost of a pass, independent of its depth.
        head: the final norm and the LM head.
        exit_head: an exit head as it is served: affine map, norm, reduced vocabulary, confidence
            model.
        router: one router, including the transfer of its output to the host.
    """

    layer: float
    start: float
    head: float
    exit_head: float
    router: float

    def to_dict(self) -> dict[str, float]:
        """As JSON."""
        return asdict(self)


def load_or_measure(path: Path, runner: DepthRunner, vocabulary: int, config: TIDEConfig) -> Costs:
    """The costs noted in `path`; measured and noted there if it holds none for these settings.

    Measured once, so that an interrupted calibration resumes with the same costs.
    """
    settings = {
        "vocabulary": vocabulary,
        "bottleneck": config.router_bottleneck_dim,
        "strategy": config.exit_strategy,
    }
    if path.exists():
        known = json.loads(path.read_text())
        if known.get("settings") == settings:
            return Costs(**known["costs"])
    text, parts = runner.config, runner.parts
    reduced = torch.arange(min(vocabulary, text.vocab_size)) if vocabulary else None
    found = measure_costs(
        runner,
        Readout(parts.norm, parts.head, text, reduced),
        ExitHead(config.exit_strategy, text.hidden_size),
        TokenRouter(text.hidden_size, config.router_bottleneck_dim),
    )
    note = json.dumps({"settings": settings, "costs": found.to_dict()})
    write_whole(path, lambda scratch: scratch.write_text(note))
    return found


@torch.no_grad()
def measure_costs(
    runner: DepthRunner,
    exit_readout: Readout,
    head: ExitHead,
    router: TokenRouter,
    *,
    context: int = 128,
) -> Costs:
    """Time each part in turn, after a prompt of at most `context` tokens, and take medians."""
    n = runner.n_layers
    context = min(context, runner.config.max_position_embeddings - 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.config.vocab_size, (1, context + 1), generator=generator)
    ids = ids.to(runner.input_device)
    prompt, token = TokenBatch(ids[:, :context]), TokenBatch(ids[:, context:])
    head, router = head.to(exit_readout.device, exit_readout.dtype), router.to(exit_readout.device)
    gate = ExitGate(head, exit_readout, Thresholds(confidence=0.5), None, ConfidenceModel())
    gate, notes = gate.to(exit_readout.device), torch.tensor([note(NGramPrediction())])
    cache = runner.new_cache(1)
    runner.run(prompt, 0, n, cache=cache)
    state = runner.run(token, 0, n, cache=cache)[0]  # [1, hidden]
    half = max(1, n // 2)

    def layers(hi: int) -> Callable[[], Any]:
        def run() -> None:
            cache.rollback([context])
            runner.run(token, 0, hi, cache=cache)

        return run

    median = medians(
        {
            "all": layers(n),
            "half": layers(half),
            "head": lambda: runner.logits(state).argmax(-1).item(),
            "exit_head": lambda: gate(state.to(exit_readout.device), notes).tolist(),
            "router": lambda: router(state.to(router.up.weight)).item(),
        }
    )
    layer = (median["all"] - median["half"]) / max(n - half, 1)
    if layer <= 0:  # one layer only, or a machine too busy to tell half depth from full depth
        layer = median["all"] / n
    return Costs(
        layer=layer,
        start=max(median["all"] - n * layer, 0.0),
        head=median["head"],
        exit_head=median["exit_head"],
        router=median["router"],
    )
