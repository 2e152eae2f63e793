"""The scores of every checkpoint on the tuning split, token by token along the model's answers.

Each document of the split is used once: to fit, to choose exits, or to report on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tide.calibration.collect import Collection, Unit
from tide.calibration.fit import read_out
from tide.errors import DataError
from tide.exits.candidates import CandidateReadout
from tide.exits.confidence import WITH_HEAD, gather_features
from tide.exits.gate import note
from tide.exits.heads import ExitHead, Readout
from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.kernels.arithmetic import top_of

# The use of each document of the tuning split, in turn: to stop routers and fit confidence models,
# to choose exits, to report on them. In turn, since the first units are greedy, later ones sampled.
PARTS = ("fit", "choose", "report", "fit", "choose", "report", "fit", "choose", "report", "fit")


@dataclass(kw_only=True)
class Scores:
    """The scores of one checkpoint, and whether the exit is correct; `[tokens]` each.

    Attributes:
        layer: the checkpoint.
        router: the router's probability.
        prefilter: of the prefilter; `router` where there is none, or until it is fitted.
        top_probability: of the exit head.
        confidence: of the confidence model; `top_probability` until the model is fitted.
        correct: whether the exit head predicts the target token.
        features: inputs of the confidence model, `[tokens, size]`.
        candidate_features: inputs of the prefilter, `[tokens, size]`; None if there is none.
        document: the document of each token, counted from 0.
    """

    layer: int
    router: np.ndarray
    prefilter: np.ndarray
    top_probability: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray
    features: Tensor
    candidate_features: Tensor | None
    document: np.ndarray

    @property
    def first_stage(self) -> str:
        """What may reject a token before the head is read: "prefilter", else "router"."""
        return "router" if self.candidate_features is None else "prefilter"

    def part(self, name: str) -> Scores:
        """The tokens of the documents for `name`, one of `PARTS`."""
        inside = in_part(self.document, name)
        arrays = ("router", "prefilter", "top_probability", "confidence", "correct", "document")
        some, of_candidates = torch.from_numpy(inside), self.candidate_features
        return replace(
            self,
            features=self.features[some],
            candidate_features=None if of_candidates is None else of_candidates[some],
            **{array: getattr(self, array)[inside] for array in arrays},
        )

    def auc(self, scorer: str) -> float | None:
        """How well a scorer separates correct exits from wrong ones: the area under the ROC.

        None if all exits are correct, or none is.
        """
        return auc(getattr(self, scorer), self.correct)


def in_part(document: np.ndarray, name: str) -> np.ndarray:
    """Whether each of some documents is for `name`, one of `PARTS`."""
    require_parts(document)
    return (np.array(PARTS) == name)[document % len(PARTS)]


def require_parts(document: np.ndarray) -> None:
    """Raise unless there are documents for each of the `PARTS`."""
    numbers = np.unique(document)
    if set(np.array(PARTS)[numbers % len(PARTS)]) != set(PARTS):
        raise DataError(
            f"The tuning split has {len(numbers)} documents; it needs {len(set(PARTS))}, which "
            "takes texts about some 15 documents, and a useful calibration takes some hundreds."
        )


def tuning_documents(collection: Collection) -> list[np.ndarray]:
    """For each unit of the tuning split, the document of each position, `[positions]`."""
    numbers, size = np.array(collection.documents.tuning_document), collection.plan.unit
    return [
        np.repeat(numbers[k * size :][: len(answers)], [len(answer) for answer in answers])
        for k, answers in enumerate(collection.answers_by_unit("tuning"))
    ]


@torch.no_grad()
def observe(
    collection: Collection,
    readout: Readout,
    heads: Sequence[ExitHead],
    routers: Sequence[TokenRouter],
    table: ContinuationTable | None,
    candidates: CandidateReadout | None = None,
) -> list[Scores]:
    """The scores of every checkpoint on the tuning split.

    Args:
        heads: as they are served.
        candidates: that prefilters read; None for no prefilters.
    """
    pieces: list[list[dict[str, Tensor]]] = [[] for _ in heads]
    for unit in collection.units("tuning"):
        predictions = torch.tensor([note(p)[1:] for p in _predictions(unit, table)])
        for i, (head, router) in enumerate(zip(heads, routers, strict=True)):
            done = 0
            for logits in read_out(readout, head, unit.states[i]):
                here = slice(done, done + len(logits))
                done += len(logits)
                index, tops = top_of(logits, scores=True)
                predicted = readout.tokens(index)
                router_logits = router.logit(unit.states[i, here].float()).to(logits.device)
                ngrams = predictions[here].to(logits.device)
                piece = {
                    "router": router_logits.sigmoid(),
                    "top_probability": tops[:, 0].exp(),
                    "correct": predicted.cpu() == unit.top_tokens[here, 0],
                    "features": gather_features(WITH_HEAD, tops, predicted, router_logits, ngrams),
                }
                if candidates is not None:
                    states = unit.states[i, here].to(readout.device, readout.dtype)
                    normed = readout.norm(head.transform(states))
                    piece["candidate_features"] = candidates.features(normed, ngrams)
                pieces[i].append({name: values.cpu() for name, values in piece.items()})
    document = np.concatenate(tuning_documents(collection))
    found = []
    for layer, some in zip(collection.plan.layers, pieces, strict=True):
        whole = {name: torch.cat([piece[name] for piece in some]) for name in some[0]}
        top = whole["top_probability"].numpy()
        found.append(
            Scores(
                layer=layer,
                router=whole["router"].numpy(),
                prefilter=whole["router"].numpy(),
                top_probability=top,
                confidence=top,
                correct=whole["correct"].numpy(),
                features=whole["features"],
                candidate_features=whole.get("candidate_features"),
                document=document,
            )
        )
    return found


def _predictions(unit: Unit, table: ContinuationTable | None) -> Iterator[NGramPrediction]:
    """The n-gram prediction at each position of a unit."""
    for tokens, prompt in unit.texts():
        predictor = NGramPredictor(table)
        yield from (predictor.at(tokens, p, p + 1) for p in range(prompt - 1, len(tokens) - 1))


def auc(scores: np.ndarray, correct: np.ndarray) -> float | None:
    """Probability that a correct exit scores higher than a wrong one; ties count half."""
    from scipy.stats import rankdata

    good, bad = int(correct.sum()), int((~correct).sum())
    if not good or not bad:
        return None
    ranks = rankdata(scores)
    return float((ranks[correct].sum() - good * (good + 1) / 2) / (good * bad))
