"""Gives the choice of gates: which checkpoint, and which thresholds, save most at a given risk.

Decided on the gate split, token by token along the model's own answers. This is a choice, not a
promise: `tide.certify` makes the promise, on documents that were not used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tide.calibration.collect import Collection
from tide.calibration.costs import Costs
from tide.exits.heads import ExitHead, Readout
from tide.exits.policy import Gate
from tide.exits.routers import TokenRouter, head_features


@dataclass
class Scores:
    """What the gate of one checkpoint sees, and whether the exit is right, `[tokens]` each."""

    layer: int
    router: np.ndarray
    top_probability: np.ndarray
    right: np.ndarray

    @property
    def auc(self) -> dict[str, float]:
        """How well each signal alone tells right exits from wrong ones: area under the ROC."""
        return {
            "router": auc(self.router, self.right),
            "top_probability": auc(self.top_probability, self.right),
        }


@dataclass(frozen=True)
class Choice:
    """One way to leave at one checkpoint.

    Attributes:
        layer: the checkpoint.
        gate: its thresholds.
        leave: share of tokens that leave.
        wrong: share of all tokens that leave with another token than full depth's.
        speedup: expected, at batch 1, from the measured costs.
    """

    layer: int
    gate: Gate
    leave: float
    wrong: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@torch.no_grad()
def score(
    collection: Collection,
    split: str,
    readout: Readout,
    heads: Sequence[ExitHead],
    routers: Sequence[TokenRouter],
) -> list[Scores]:
    """Scores of every checkpoint on a split."""
    layers = collection.plan.layers
    seen: list[dict[str, list[torch.Tensor]]] = [
        {"router": [], "top_probability": [], "right": []} for _ in layers
    ]
    for unit in collection.units(split):
        before: list[int] | None = None
        for i, (head, router) in enumerate(zip(heads, routers, strict=True)):
            states = unit.states[i].float()
            logits = readout(head.lift(states).to(readout.dtype)).float()
            features = None
            if router.features:
                features = head_features(router.features, logits, before)
            best = logits.argmax(-1)
            before = best.tolist()
            seen[i]["router"].append(router(states, features))
            seen[i]["top_probability"].append(logits.softmax(-1).amax(-1))
            seen[i]["right"].append(readout.tokens(best) == unit.top_tokens[:, 0])
    return [
        Scores(layer, **{name: torch.cat(values).numpy() for name, values in columns.items()})
        for layer, columns in zip(layers, seen, strict=True)
    ]


def best_gate(scores: Scores, risk: float, costs: Costs, n_layers: int) -> Choice:
    """The two-stage gate that saves most with at most a share `risk` of wrong tokens."""
    total = len(scores.right)
    full = n_layers * costs.layer + costs.head
    shallow = (scores.layer + 1) * costs.layer + costs.router
    best = Choice(scores.layer, Gate(router=2.0), 0.0, 0.0, full / (full + costs.router))
    for quantile in np.linspace(0.0, 0.95, 20):
        veto = float(np.quantile(scores.router, quantile))
        passed = scores.router >= veto
        order = np.argsort(-scores.top_probability[passed], kind="stable")
        wrong = np.cumsum(~scores.right[passed][order])
        leave = int(np.searchsorted(wrong, risk * total, side="right"))
        if not leave:
            continue
        threshold = float(scores.top_probability[passed][order][leave - 1])
        leaves = passed & (scores.top_probability >= threshold)
        seconds = (
            shallow
            + passed.mean() * costs.exit_head
            + (1 - leaves.mean()) * (full - (scores.layer + 1) * costs.layer)
        )
        if full / seconds > best.speedup:
            best = Choice(
                scores.layer,
                Gate(router=veto, top_probability=threshold),
                float(leaves.mean()),
                float((leaves & ~scores.right).mean()),
                float(full / seconds),
            )
    return best


def auc(scores: np.ndarray, right: np.ndarray) -> float:
    """Chance that a right exit scores higher than a wrong one; ties count half."""
    from scipy.stats import rankdata

    good, bad = int(right.sum()), int((~right).sum())
    if not good or not bad:
        return float("nan")
    ranks = rankdata(scores)
    return float((ranks[right].sum() - good * (good + 1) / 2) / (good * bad))
