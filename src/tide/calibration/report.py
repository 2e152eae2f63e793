"""The tables that calibration reports: its data, heads, gates, and the exits chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tide.calibration.choose import Choice, best, follow, one_scorer
from tide.calibration.collect import Collection
from tide.calibration.costs import Costs
from tide.calibration.fit import coverage
from tide.calibration.scores import Scores

RISKS = (0.01, 0.02, 0.05)


@dataclass(frozen=True)
class Scorer:
    """A gate of the table.

    Attributes:
        name: of the gate.
        score: the field of `Scores` that decides.
        first_stage: what rejects tokens first, if anything.
    """

    name: str
    score: str
    first_stage: str | None = None


SCORERS = (
    Scorer("router", "router"),
    Scorer("top probability", "top_probability"),
    Scorer("two stages", "top_probability", "router"),
    Scorer("confidence model", "confidence"),
    Scorer("router, then confidence model", "confidence", "router"),
    Scorer("candidates", "prefilter"),
    Scorer("candidates, then confidence model", "confidence", "prefilter"),
)
# Routers and confidence models are fitted to the trained heads, so only this one is fair to others.
UNTRAINED = SCORERS[1:2]


def data_record(collection: Collection) -> dict[str, Any]:
    """The sizes of the splits, in texts and tokens, and the documents used."""
    documents = collection.documents
    return {
        "documents": {
            "fit": len(documents.fit),
            "tuning": len(documents.tuning),
            "certify": len(documents.certify),
            "fingerprint": documents.fingerprint,
        },
        "tokens": {split: sum(map(len, collection.answers(split))) for split in ("fit", "tuning")},
        "used": list(documents.used),
    }


def head_table(
    scores: Sequence[Scores],
    untrained: Sequence[Scores],
    collection: Collection,
    vocabulary: Tensor | None,
) -> dict[str, Any]:
    """How often exit heads agree with full depth, trained and untrained, by checkpoint."""
    return {
        "layers": [at.layer for at in scores],
        "agreement": [float(at.correct.mean()) for at in scores],
        "identity": [float(at.correct.mean()) for at in untrained],
        "coverage": 1.0 if vocabulary is None else coverage(collection, "tuning", vocabulary),
    }


def gate_table(
    head: str, scores: Sequence[Scores], scorers: Sequence[Scorer], costs: Costs, n_layers: int
) -> list[dict[str, Any]]:
    """Each scorer alone at each checkpoint: its AUC, and its exits at a few risks, held out."""
    table = []
    for at in scores:
        to_choose, to_report = at.part("choose"), at.part("report")
        for scorer in scorers:
            entry: dict[str, Any] = {
                "layer": at.layer,
                "head": head,
                "gate": scorer.name,
                "auc": to_report.auc(scorer.score),
            }
            for risk in RISKS:
                chosen = one_scorer(
                    to_choose, scorer.score, risk, costs, n_layers, first_stage=scorer.first_stage
                )
                found = follow([to_report], chosen.thresholds, costs, n_layers)
                entry[str(risk)] = {
                    "exit_rate": found.exit_rate,
                    "read_rate": found.read_rate,
                    "error_rate": found.error_rate,
                    "depth_saved": found.depth_saved,
                    "speedup": found.speedup,
                }
            table.append(entry)
    return table


def exit_table(
    choices: Mapping[float, Sequence[Choice]],
    chosen: Choice,
    scores: Sequence[Scores],
    costs: Costs,
    n_layers: int,
) -> dict[str, list[dict[str, Any]]]:
    """Every choice by its risk, with its outcome on documents used neither to fit nor to choose.

    Args:
        chosen: the exits of the artifact; at other risks, those that would be fastest undrafted.
    """
    return {
        str(risk): [
            {**_held_out(choice, scores, costs, n_layers), "best": choice == picked}
            for choice in found
        ]
        for risk, found in choices.items()
        for picked in (chosen if chosen in found else best(found),)
    }


def _held_out(
    choice: Choice, scores: Sequence[Scores], costs: Costs, n_layers: int
) -> dict[str, Any]:
    held_out = [s.part("report") for s in scores if s.layer in choice.layers]
    found = follow(held_out, choice.thresholds, costs, n_layers).to_dict()
    return {**found, "error_rate_where_chosen": choice.error_rate}
