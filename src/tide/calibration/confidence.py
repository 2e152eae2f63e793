"""The fitting of confidence models: the probability that an exit is correct, from its features."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tide.calibration.scores import Scores
from tide.exits.confidence import WITH_HEAD, ConfidenceModel


def fit_confidence_model(scores: Scores, *, seed: int = 0) -> ConfidenceModel:
    """Fit the confidence model of one checkpoint, and set `scores.confidence`.

    Uses the documents for fitting only.
    """
    part = scores.part("fit")
    model = _fit(WITH_HEAD, part.features, part.correct, seed)
    scores.confidence = model(scores.features).numpy()
    return model


def fit_prefilter(scores: Scores, *, seed: int = 0) -> ConfidenceModel | None:
    """The same for its prefilter, and set `scores.prefilter`; None if it has no candidates."""
    part = scores.part("fit")
    if scores.candidate_features is None or part.candidate_features is None:
        return None
    model = _fit(("candidates",), part.candidate_features, part.correct, seed)
    scores.prefilter = model(scores.candidate_features).numpy()
    return model


def _fit(
    names: tuple[str, ...], features: Tensor, labels: np.ndarray, seed: int, steps: int = 600
) -> ConfidenceModel:
    """A model from features, `[n, size]`, to whether exits are correct, `[n]`, by log loss."""
    torch.manual_seed(seed)
    model, correct = ConfidenceModel(names), torch.from_numpy(labels).float()
    model.mean.copy_(features.mean(0))
    if len(correct) > 1:
        model.spread.copy_(features.std(0).clamp_min(1e-3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(0, len(correct), (min(1024, len(correct)),))
        optimizer.zero_grad(set_to_none=True)
        nn.functional.binary_cross_entropy_with_logits(
            model.logit(features[some]), correct[some]
        ).backward()
        optimizer.step()
        schedule.step()
    return model.requires_grad_(False)
