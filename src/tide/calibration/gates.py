"""Gives the choice of exits: which checkpoints, and which thresholds, save most at a given risk.

Decided on the gate split, token by token along the model's own answers. Its documents are used
once each: some to fit blends, some to choose, some to report. This is a choice, not a promise:
`tide.certify` makes the promise, on documents that were not used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tide.calibration.collect import Collection, Unit
from tide.calibration.costs import Costs
from tide.calibration.fit import read_out
from tide.errors import DataError
from tide.exits.blend import Blend, gather_opinions
from tide.exits.heads import ExitHead, Readout
from tide.exits.hints import Hint, RowHints
from tide.exits.policy import Gate
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable

# What each document of the gate split is for, in turn: to fit routers' ends and blends, to choose
# exits, to report what they do. In turn, since the first of them are greedy and later ones sampled.
PARTS = ("fit", "choose", "report", "fit", "choose", "report", "fit", "choose", "report", "fit")
_NEVER = Gate(router=2.0)  # asks the router and lets nobody leave
_VETOES = (0.0, 0.2, 0.4, 0.6, 0.75)  # shares of tokens that a router may send on unread
_PRICES = np.geomspace(1.02, 2000.0, 60)  # of a wrong token, in times a whole pass


@dataclass
class Scores:
    """What the judges at one checkpoint say, and whether the exit is right; `[tokens]` each.

    Attributes:
        layer: the checkpoint.
        router: the router's confidence.
        top_probability: of the exit head.
        blend: the chance that the blend gives; as `top_probability` until it is fitted.
        right: whether the exit head says what full depth says.
        opinions: what the blend looks at, `[tokens, size]`.
        document: which document each token is from.
    """

    layer: int
    router: np.ndarray
    top_probability: np.ndarray
    blend: np.ndarray
    right: np.ndarray
    opinions: Tensor
    document: np.ndarray

    def part(self, name: str) -> Scores:
        """The tokens of the documents that are for `name`, one of `PARTS`."""
        inside = in_part(self.document, name)
        arrays = ("router", "top_probability", "blend", "right", "document")
        return replace(
            self,
            opinions=self.opinions[torch.from_numpy(inside)],
            **{array: getattr(self, array)[inside] for array in arrays},
        )

    def auc(self, judge: str) -> float | None:
        """How well a judge tells right exits from wrong ones: area under the ROC.

        None if all exits are right, or none is.
        """
        return auc(getattr(self, judge), self.right)


def in_part(document: np.ndarray, name: str) -> np.ndarray:
    """Where a document of the gate split is for `name`, one of `PARTS`."""
    if int(document.max(initial=-1)) + 1 < len(set(PARTS)):
        raise DataError(
            f"The gate split has {int(document.max(initial=-1)) + 1} documents; it needs "
            f"{len(set(PARTS))}, which takes about 15 texts, and a useful calibration takes some "
            "hundreds."
        )
    return (np.array(PARTS) == name)[document % len(PARTS)]


def gate_documents(collection: Collection) -> list[np.ndarray]:
    """For each unit of the gate split, which document each of its positions is from."""
    found, first = [], 0
    for answers in collection.answers_by_unit("gate"):
        numbers = np.arange(first, first + len(answers))
        found.append(np.repeat(numbers, [len(answer) for answer in answers]))
        first += len(answers)
    return found


@torch.no_grad()
def observe(
    collection: Collection,
    readout: Readout,
    heads: Sequence[ExitHead],
    routers: Sequence[TokenRouter],
    table: ContinuationTable | None,
) -> list[Scores]:
    """What the judges of every checkpoint say on the gate split.

    Args:
        heads: as they are served.
    """
    columns: list[dict[str, list[Tensor]]] = [{} for _ in heads]
    for unit in collection.units("gate"):
        hints = list(_hints(unit, table))
        for i, (head, router) in enumerate(zip(heads, routers, strict=True)):
            done = 0
            for logits in read_out(readout, head, unit.states[i]):
                here = slice(done, done + len(logits))
                done += len(logits)
                said = readout.tokens(logits.argmax(-1)).cpu()
                sure = router.logit(unit.states[i, here].float())
                for name, column in (
                    ("router", sure.sigmoid()),
                    ("top_probability", logits.softmax(-1).amax(-1)),
                    ("right", said == unit.top_tokens[here, 0]),
                    ("opinions", gather_opinions(
                        Blend().features, logits, said.tolist(), sure, hints[here])),
                ):  # fmt: skip
                    columns[i].setdefault(name, []).append(column.cpu())
    document = np.concatenate(gate_documents(collection))
    found = []
    for layer, of in zip(collection.plan.layers, columns, strict=True):
        whole = {name: torch.cat(pieces) for name, pieces in of.items()}
        top, right = whole["top_probability"].numpy(), whole["right"].numpy()
        found.append(
            Scores(layer, whole["router"].numpy(), top, top, right, whole["opinions"], document)
        )
    return found


def _hints(unit: Unit, table: ContinuationTable | None) -> Iterator[Hint]:
    for tokens, prompt in unit.documents():
        row = RowHints(table)
        yield from (row.at(tokens, p, p + 1) for p in range(prompt - 1, len(tokens) - 1))


def fit_blend(scores: Scores, *, seed: int = 0, steps: int = 600) -> Blend:
    """Fit the blend of one checkpoint on the part for fitting, by log loss."""
    torch.manual_seed(seed)
    part = scores.part("fit")
    right = torch.from_numpy(part.right).float()
    blend = Blend()
    blend.mean.copy_(part.opinions.mean(0))
    if len(right) > 1:
        blend.spread.copy_(part.opinions.std(0).clamp_min(1e-3))
    optimizer = torch.optim.AdamW(blend.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(0, len(right), (min(1024, len(right)),))
        optimizer.zero_grad(set_to_none=True)
        nn.functional.binary_cross_entropy_with_logits(
            blend.logit(part.opinions[rows]), right[rows]
        ).backward()
        optimizer.step()
        schedule.step()
    blend.requires_grad_(False)
    scores.blend = blend(scores.opinions).numpy()
    return blend


@dataclass(frozen=True)
class Choice:
    """One way to leave: checkpoints and their gates, and what they would do.

    Attributes:
        layers: the checkpoints, by depth.
        gates: their thresholds.
        leave: share of tokens that leave early.
        wrong: share of all tokens that leave with another token than full depth's.
        depth_saved: share of the layers that need not run for them.
        speedup: expected, at batch 1, from the measured costs.
    """

    layers: tuple[int, ...]
    gates: tuple[Gate, ...]
    leave: float
    wrong: float
    depth_saved: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            **asdict(self),
            "layers": list(self.layers),
            "gates": [asdict(g) for g in self.gates],
        }


def follow(scores: Sequence[Scores], gates: Sequence[Gate], costs: Costs, n_layers: int) -> Choice:
    """What gates at some checkpoints, by depth, do on some tokens."""
    tokens = len(scores[0].right)
    full = costs.start + n_layers * costs.layer + costs.head
    waiting = np.ones(tokens, bool)
    seconds, wrong, saved = full * tokens, 0, 0
    for at, gate in zip(scores, gates, strict=True):
        asked = waiting.copy()
        if gate.router is not None:
            asked &= at.router >= gate.router
        leaves = asked.copy()
        if gate.top_probability is not None:
            leaves &= at.top_probability >= gate.top_probability
        if gate.blend is not None:
            leaves &= at.blend >= gate.blend
        gone, above = int(leaves.sum()), n_layers - at.layer - 1
        asks_router = gate.router is not None or gate.blend is not None
        seconds += waiting.sum() * costs.router * asks_router + asked.sum() * costs.exit_head
        seconds -= gone * (above * costs.layer + costs.head)
        wrong += int((leaves & ~at.right).sum())
        saved += gone * above
        waiting &= ~leaves
        seconds += waiting.sum() * costs.start  # who stays takes another pass
    return Choice(
        tuple(at.layer for at in scores),
        tuple(gates),
        float(1 - waiting.mean()),
        wrong / tokens,
        saved / (tokens * n_layers),
        float(full * tokens / seconds),
    )


def one_judge(
    scores: Scores, judge: str, risk: float, costs: Costs, n_layers: int, *, veto: bool = False
) -> Choice:
    """The gate that lets most leave at one checkpoint by one judge, with at most `risk` wrong.

    Args:
        judge: "router", "top_probability" or "blend".
        veto: let the router, at the share that saves most time, go first: the two-stage gate.
    """
    best: Choice | None = None
    for share in _VETOES if veto else (0.0,):
        first = float(np.quantile(scores.router, share)) if share else None
        asked = scores.router >= first if first is not None else np.ones(len(scores.right), bool)
        value = getattr(scores, judge)[asked]
        order = np.argsort(-value, kind="stable")
        wrong = np.cumsum(~scores.right[asked][order])
        # At equal values all leave or none.
        last = np.flatnonzero(np.diff(value[order], append=-np.inf))
        fits = last[wrong[last] <= risk * len(scores.right)]
        gate = _NEVER
        if len(fits):
            gate = replace(Gate(router=first), **{judge: float(value[order][fits[-1]])})
        found = follow([scores], [gate], costs, n_layers)
        if best is None or found.speedup > best.speedup:
            best = found
    assert best is not None
    return best


def choose(
    scores: Sequence[Scores], risk: float, costs: Costs, n_layers: int, *, most: int = 3
) -> list[Choice]:
    """For each number of exits up to `most`, the checkpoints and gates with the least time.

    Thresholds of several checkpoints move together: a token leaves where the time that it saves is
    worth the chance of being wrong, at one price of a wrong token for all of them. The price is the
    least that keeps the risk. Where nothing that keeps it saves time, nobody leaves.
    """
    found = []
    for count in range(1, min(most, len(scores)) + 1):
        options = [
            _priced(list(some), risk, costs, n_layers) for some in combinations(scores, count)
        ]
        found.append(max(options, key=lambda choice: choice.speedup))
    return found


def _priced(scores: list[Scores], risk: float, costs: Costs, n_layers: int) -> Choice:
    """The best choice at some checkpoints: a price for all, then a veto for each."""
    full = costs.start + n_layers * costs.layer + costs.head
    saves = [((n_layers - s.layer - 1) * costs.layer + costs.head) / full for s in scores]
    best = follow(scores, [_NEVER] * len(scores), costs, n_layers)

    def cheapest(vetoes: Sequence[float | None]) -> Choice | None:
        for price in _PRICES:  # from the boldest to the safest
            gates = [
                Gate(router=veto, blend=1 - save / price)
                for veto, save in zip(vetoes, saves, strict=True)
            ]
            found = follow(scores, gates, costs, n_layers)
            if found.wrong <= risk:
                return found
        return None

    vetoes: list[float | None] = [None] * len(scores)
    for k, at in enumerate(scores):
        for share in _VETOES if k == 0 else _VETOES[1:]:
            tried = [*vetoes]
            tried[k] = float(np.quantile(at.router, share)) if share else None
            found = cheapest(tried)
            if found is not None and found.speedup > best.speedup:
                best, vetoes = found, tried
    return best


def auc(scores: np.ndarray, right: np.ndarray) -> float | None:
    """Chance that a right exit scores higher than a wrong one; ties count half."""
    from scipy.stats import rankdata

    good, bad = int(right.sum()), int((~right).sum())
    if not good or not bad:
        return None
    ranks = rankdata(scores)
    return float((ranks[right].sum() - good * (good + 1) / 2) / (good * bad))
