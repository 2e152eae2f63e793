"""The fitting of confidence models: the probability that an exit is correct, from its features."""

from __future__ import annotations

import torch
from torch import nn

from tide.calibration.scores import Scores
from tide.exits.confidence import ConfidenceModel


def fit_confidence_model(scores: Scores, *, seed: int = 0, steps: int = 600) -> ConfidenceModel:
    """Fit the confidence model of one checkpoint by log loss, and set `scores.confidence`.

    Uses the documents for fitting only.
    """
    torch.manual_seed(seed)
    part = scores.part("fit")
    correct = torch.from_numpy(part.correct).float()
    model = ConfidenceModel()
    model.mean.copy_(part.features.mean(0))
    if len(correct) > 1:
        model.spread.copy_(part.features.std(0).clamp_min(1e-3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(0, len(correct), (min(1024, len(correct)),))
        optimizer.zero_grad(set_to_none=True)
        nn.functional.binary_cross_entropy_with_logits(
            model.logit(part.features[some]), correct[some]
        ).backward()
        optimizer.step()
        schedule.step()
    model.requires_grad_(False)
    scores.confidence = model(scores.features).numpy()
    return model
