"""The cost of layers, heads and routers on this device, measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tide.calibration.unit import read_note
from tide.config import TIDEConfig
from tide.decode.machinery import tree_lengths
from tide.errors import DataError
from tide.exits.candidates import CandidateReadout, Prefilter
from tide.exits.confidence import ConfidenceModel
from tide.exits.files import reason, write_whole
from tide.exits.gate import ExitGate, note
from tide.exits.heads import ExitHead, Readout, TargetHead
from tide.exits.ngrams import NGramPrediction
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.costs import LENGTHS, LoopCosts, measure_loop, measure_passes, medians
from tide.models.runner import DepthRunner
from tide.strangers import listed, mapping, number, require_keys, whole

_SECONDS = 60.0  # for passes of the loop: exits are chosen by them, and calibration takes longer
CANDIDATES = 128  # tokens that prefilters read: more cost more, and add little (bench/gates.py)


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
        prefilter: a gate that rejects the token by its candidates, so that the head is not read.
    """

    layer: float
    start: float
    head: float
    exit_head: float
    router: float
    prefilter: float

    def to_dict(self) -> dict[str, float]:
        """As JSON."""
        return asdict(self)


def load_or_measure(
    path: Path, runner: DepthRunner, vocabulary: int, config: TIDEConfig, batch: int
) -> tuple[Costs, list[LoopCosts]]:
    """The costs noted in `path`; measured and noted there if it holds none for these settings.

    Measured once, so that an interrupted calibration resumes with the same costs.

    Args:
        batch: sequences for which passes of the loop are measured, beside one.

    Returns:
        The costs of parts, and of passes by sequences of a batch, from 1 on.
    """
    settings = {
        "vocabulary": vocabulary,
        "bottleneck": config.router_bottleneck_dim,
        "strategy": config.exit_strategy,
        "batch": batch,
        "nodes": config.max_tree,
        "lengths": [*LENGTHS, *tree_lengths(config.max_tree, 1)],
        # What was measured elsewhere does not count here.
        "device": str(runner.input_device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if path.exists():
        known = read_note(path)
        try:
            if mapping(known, "it").get("settings") == settings:
                return _costs(known)
        except (KeyError, ValueError) as error:
            raise DataError(
                f"{path} does not hold the costs that were measured ({reason(error)}). Remove it, "
                "and run again: they are then measured anew."
            ) from error
    text, parts = runner.config, runner.parts
    reduced = torch.arange(min(vocabulary, text.vocab_size)) if vocabulary else None
    readout = Readout(parts.norm, parts.head, text, reduced)
    head = ExitHead(config.exit_strategy, text.hidden_size)
    router = TokenRouter(text.hidden_size, config.router_bottleneck_dim)
    found = measure_costs(runner, readout, head, router)
    loops = measure_loops(
        runner, readout, rejecting_gate(readout, head, router), batch, config.max_tree
    )
    note = json.dumps(
        {
            "settings": settings,
            "costs": found.to_dict(),
            "loops": [at.to_dict() for at in loops],
        }
    )
    write_whole(path, lambda scratch: scratch.write_text(note))
    return found, [LoopCosts.from_dict(at) for at in json.loads(note)["loops"]]


def _costs(known: dict[str, Any]) -> tuple[Costs, list[LoopCosts]]:
    """Costs from JSON values."""
    require_keys(known["costs"], {field.name for field in fields(Costs)}, "costs")
    mapping(known["costs"], "costs", _seconds)
    for at in listed(known["loops"], "loops"):
        parts = {field.name for field in fields(LoopCosts)}
        require_keys(at, parts, "a loop")
        whole(at["sequences"], "sequences", 1)
        for part in sorted(parts - {"sequences"}):
            by_length = mapping(at[part], part, _seconds)
            if not by_length or not all(n.isdecimal() for n in by_length):
                raise ValueError(f"{part} is not by numbers of tokens")
    return Costs(**known["costs"]), [LoopCosts.from_dict(at) for at in known["loops"]]


def _seconds(value: Any, what: str) -> float:
    return number(value, what, 0)


def measure_loops(
    runner: DepthRunner, readout: Readout, gate: ExitGate, batch: int, nodes: int
) -> list[LoopCosts]:
    """What passes of the loop cost, for one sequence and for a batch.

    Args:
        nodes: most nodes of a draft tree.
    """
    half, n = max(1, runner.n_layers // 2), runner.n_layers
    whole = Readout(runner.parts.norm, runner.parts.head, runner.config)
    stages = [((0, half), gate), ((half, n), TargetHead(whole))]
    gate.fuse()  # as when it is served
    whole.fuse()
    read, nodes = gate.head_timer(), nodes if runner.takes_trees else 0
    return [
        measure_loop(
            runner,
            stages,
            read,
            sequences,
            trees=tree_lengths(nodes, sequences),
            seconds=_SECONDS,
        )
        for sequences in sorted({1, batch})
    ]


@torch.no_grad()
def measure_costs(
    runner: DepthRunner, exit_readout: Readout, head: ExitHead, router: TokenRouter
) -> Costs:
    """Time each part in turn, and take medians."""
    n = runner.n_layers
    head, router = head.to(exit_readout.device, exit_readout.dtype), router.to(exit_readout.device)
    gate = ExitGate(head, exit_readout, Thresholds(confidence=0.5), None, ConfidenceModel())
    gate, notes = gate.to(exit_readout.device), torch.tensor([note(NGramPrediction())])
    rejecting = rejecting_gate(exit_readout, head, router)
    for timed in (gate, rejecting):
        timed.fuse()
    state = torch.zeros(1, runner.config.hidden_size).to(exit_readout.device, exit_readout.dtype)
    # Two parts that differ in length tell the cost of a layer from the fixed cost of a pass.
    few = max(1, n // 4)
    parts = ((0, few), (few, n)) if n > few else ((0, n),)
    shorter, *longer = measure_passes(runner, [(part, None) for part in parts], lengths=[1])[1]
    layer = (sum(longer) - shorter) / (n - 2 * few) if n > 2 * few else 0.0
    if layer <= 0:  # too few layers, or a machine too busy to tell them apart
        layer = (shorter + sum(longer)) / n
    median = medians(
        {
            "head": lambda: runner.logits(state).argmax(-1).item(),
            "exit_head": lambda: gate(state, notes).tolist(),
            "router": lambda: router(state.to(router.up.weight)).item(),
            "prefilter": lambda: rejecting(state, notes).tolist(),
        }
    )
    return Costs(layer=layer, start=max(shorter - few * layer, 0.0), **median)


def rejecting_gate(readout: Readout, head: ExitHead, router: TokenRouter) -> ExitGate:
    """A gate whose first stage lets no token pass."""
    if readout.linear_head()[0] is None:
        return ExitGate(head, readout, Thresholds(router=2.0), router)
    known = readout.vocabulary if readout.vocabulary is not None else torch.arange(readout.size)
    prefilter = Prefilter(
        ConfidenceModel(("candidates",)), CandidateReadout(readout, known[:CANDIDATES])
    )
    wanted = Thresholds(confidence=0.5, prefilter=2.0)
    gate = ExitGate(head, readout, wanted, router, ConfidenceModel(), prefilter)
    return gate.to(readout.device)
