"""The fitted components of an artifact: reduced vocabulary, draft table, exit heads, routers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tide.calibration.collect import Collection
from tide.calibration.fit import (
    HeadFit,
    RouterFit,
    as_served,
    choose_vocabulary,
    fit_heads,
    fit_router,
    router_labels,
)
from tide.calibration.scores import Scores, in_part, observe, tuning_documents
from tide.calibration.table import build_table
from tide.exits.candidates import candidate_readout
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.models.runner import DepthRunner
from tide.progress import Stages, Tick


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """What is fitted.

    Attributes:
        vocabulary: tokens that exit heads read; 0 for all.
        candidates: of these, the most likely ones, which prefilters read; 0 for no prefilters.
        table_bytes: most bytes of the draft table.
        strategy: of the exit heads.
        heads: how exit heads are fitted.
        routers: how routers are fitted.
    """

    vocabulary: int
    candidates: int
    table_bytes: int
    strategy: str
    heads: HeadFit
    routers: RouterFit


@dataclass(kw_only=True)
class Components:
    """What was fitted; one head and one router per checkpoint of the collection.

    Attributes:
        vocabulary: token ids that the exit heads read, `[v]`; None for all.
        readout: over that vocabulary.
        candidates: token ids that prefilters read, `[c]`; None if there are none.
        table: tensors of the draft table.
        heads: the exit heads.
        routers: the routers.
    """

    vocabulary: Tensor | None
    readout: Readout
    candidates: Tensor | None
    table: dict[str, Tensor]
    heads: list[ExitHead]
    routers: list[TokenRouter]

    def scores(self, collection: Collection, heads: list[ExitHead] | None = None) -> list[Scores]:
        """The scores of every checkpoint on the tuning split.

        Args:
            heads: exit heads to score in place of the fitted ones; the routers stay the same.
        """
        served = as_served(heads or self.heads, self.readout)
        table = ContinuationTable(self.table)
        candidates = candidate_readout(self.readout, self.candidates)
        return observe(collection, self.readout, served, self.routers, table, candidates)


def fit_components(
    collection: Collection,
    runner: DepthRunner,
    plan: FitPlan,
    stages: Stages,
    bar: Callable[[str], Tick],
) -> Components:
    """Fit all components from a collection.

    Args:
        stages: takes the time of each step.
        bar: makes a progress bar by name.
    """
    parts, text, layers = runner.parts, runner.config, collection.plan.layers
    with stages.stage("vocabulary and table"):
        vocabulary = None
        if plan.vocabulary:
            vocabulary = choose_vocabulary(collection, plan.vocabulary, text.vocab_size)
        readout = Readout(parts.norm, parts.head, text, vocabulary)
        candidates = None
        if plan.candidates and readout.linear_head()[0] is not None:
            candidates = choose_vocabulary(collection, plan.candidates, text.vocab_size)
        answers = collection.answers("fit")
        table = build_table(answers, text.vocab_size, budget=plan.table_bytes)
    with stages.stage("heads"):
        heads = [ExitHead(plan.strategy, text.hidden_size) for _ in layers]
        fit_heads(heads, collection, readout, plan.heads, bar("Exit heads"))
    with stages.stage("routers"):
        tick, routers = bar("Routers"), []
        document = tuning_documents(collection)
        to_fit = torch.from_numpy(in_part(np.concatenate(document), "fit"))
        stop_on = to_fit.split([len(unit) for unit in document])
        for i, head in enumerate(as_served(heads, readout)):
            tick(i, len(layers))
            labels = router_labels(collection, readout, head, i, plan.routers)
            routers.append(fit_router(collection, i, labels, stop_on, plan.routers))
        tick(len(layers), len(layers))
    return Components(
        vocabulary=vocabulary, readout=readout, candidates=candidates, table=table, heads=heads,
        routers=routers,
    )  # fmt: skip
