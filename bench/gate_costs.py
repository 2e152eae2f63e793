"""What a gate costs in layers, for one token: uncompiled, and as part of a compiled segment.

    python bench/gate_costs.py MODEL --out bench/results/gate_costs_smollm2.json

The model is cut to its first layers. Passes are timed in turn: to the gate, to the same depth
without one, and some layers further. What a gate costs is how much longer a pass takes with it.
Equal passes differ by some percent with where their memory lies, so each is built several times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measure import interleave, parser, report
from torch import Tensor
from transformers import AutoModelForCausalLM

from tide.calibration.costs import CANDIDATES, rejecting_gate
from tide.config import TIDEConfig
from tide.exits.gate import ExitGate, note
from tide.exits.heads import ExitHead, Readout, TargetHead
from tide.exits.ngrams import NGramPrediction
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.attach import attach
from tide.models.runner import DepthRunner, Then
from tide.models.tokens import TokenBatch

GATE, FURTHER, LAYERS = 2, 5, 6  # layers of a pass to the gate, of the longer one, of all
CONTEXT = 64


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--vocabulary", type=int, default=8192, help="tokens of the exit head")
    options.add_argument("--repeats", type=int, default=300)
    options.add_argument("--builds", type=int, default=5, help="the median of them is reported")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    with torch.no_grad():
        results = {
            way: several(model, compiled, args)
            for way, compiled in (("uncompiled", False), ("compiled", True))
        }
    report(
        "gates, in layers", args, results, dtype=args.dtype, vocabulary=args.vocabulary,
        candidates=CANDIDATES, repeats=args.repeats, builds=args.builds,
    )  # fmt: skip


def several(model: Any, compiled: bool, args: Any) -> dict[str, Any]:
    """What `measure` finds, by the median of several builds, and from where to where a no goes."""
    found = [measure(model, compiled, args.vocabulary, args.repeats) for _ in range(args.builds)]
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    every_no = [each["no"] for each in found]
    return {**medians, "no_range": [min(every_no), max(every_no)]}


def measure(model: Any, compiled: bool, vocabulary: int, repeats: int) -> dict[str, float]:
    """Seconds of a layer, and what a gate's no and yes cost in layers."""
    runner = attach(model, check=False)
    no, yes = (make_gate(runner, vocabulary, passes) for passes in (False, True))
    for gate in (no, yes):
        gate.fuse(compiled=compiled)
    ways = {
        "none": one_pass(model, GATE, no_gate, compiled),
        "further": one_pass(model, FURTHER, no_gate, compiled),
        "no": one_pass(model, GATE, no, compiled),
        "yes": one_pass(model, GATE, yes, compiled),
    }
    seconds = interleave(ways, repeats, "compiled" if compiled else "uncompiled")

    def longer(way: str) -> float:
        """By how much a way takes longer: within each turn, in which the load is the same."""
        pairs = zip(seconds[way], seconds["none"], strict=True)
        return statistics.median(a - b for a, b in pairs)

    layer = longer("further") / (FURTHER - GATE)
    return {"layer_seconds": layer, "no": longer("no") / layer, "yes": longer("yes") / layer}


def make_gate(runner: DepthRunner, vocabulary: int, passes: bool) -> ExitGate:
    """A gate that rejects every token by its candidates, or lets it exit after reading the head."""
    parts, config = runner.parts, runner.config
    readout = Readout(parts.norm, parts.head, config, torch.arange(vocabulary))
    head = ExitHead("affine", config.hidden_size).to(dtype=readout.dtype)
    router = TokenRouter(config.hidden_size, TIDEConfig().router_bottleneck_dim)
    made = rejecting_gate(readout, head, router)
    if passes:
        made.thresholds = Thresholds(confidence=0.0, prefilter=-1.0)
    return made.requires_grad_(False)


def no_gate(states: Tensor, notes: Tensor) -> Tensor:
    """What follows a pass without a gate: no token exits."""
    return torch.zeros_like(states[..., :3], dtype=torch.float32)


def one_pass(model: Any, layers: int, gate: Then, compiled: bool) -> Callable[[], Any]:
    """A pass of one token through the first layers, and what the gate decides, on the host."""
    runner = attach(model, check=False, compile=compiled)
    readout = Readout(runner.parts.norm, runner.parts.head, runner.config)
    for _ in runner.prepare([((0, layers), gate), ((layers, LAYERS), TargetHead(readout))], 1):
        pass
    assert runner.name.startswith("compiled") == compiled, runner.name
    ids = torch.randint(0, runner.config.vocab_size, (1, CONTEXT + 1))
    cache = runner.new_cache(1)
    runner.run(TokenBatch(ids[:, :CONTEXT]), 0, LAYERS, cache=cache)
    notes = np.array([[note(NGramPrediction(5, 3, 7, 0.5))]], np.int64)
    token = TokenBatch(ids[:, CONTEXT:], notes=notes)

    def run() -> Any:
        cache.rollback([CONTEXT])
        return runner.run_then(gate, token, (0, layers), cache=cache)[1].tolist()

    return run


if __name__ == "__main__":
    main()
