"""Policies: from states at a checkpoint to the tokens that exit there, and with which logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tide.exits.confidence import ConfidenceModel, gather_features
from tide.exits.ngrams import NGramPrediction
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds


@dataclass(frozen=True)
class TokenPosition:
    """Where a token stands: its sequence in the batch as given, and its position there."""

    sequence: int
    position: int


@dataclass(frozen=True)
class Candidates:
    """Tokens at a checkpoint that may exit there.

    Attributes:
        hidden: their states, `[n, hidden]`.
        positions: where they stand.
        read: logits of the exit head for some of them, by index, `[len(indices), v]`.
        predict: n-gram predictions for some of them, by index.
    """

    hidden: Tensor
    positions: Sequence[TokenPosition]
    read: Callable[[Sequence[int]], Tensor]
    predict: Callable[[Sequence[int]], list[NGramPrediction]]


@dataclass
class Decision:
    """Which candidates exit.

    Attributes:
        exits: indices of the candidates that exit, ascending.
        logits: of the exit head for them, `[len(exits), v]`; None if it was not read.
        tokens: index of the largest of those logits, `[len(exits)]`; None if not computed.
        scores: confidence of each candidate, for the record; NaN where none was computed.
    """

    exits: list[int]
    logits: Tensor | None
    tokens: Tensor | None
    scores: list[float]


class Policy(Protocol):
    """Decides, at each checkpoint, which tokens exit."""

    def decide(
        self, checkpoint: int, candidates: Candidates, *, with_logits: bool = True
    ) -> Decision:
        """Decide for candidates at the `checkpoint`-th checkpoint.

        Without `with_logits`, the head is read only where the decision needs it.
        """
        ...


class GatePolicy:
    """The gate in stages: a logit-free router first; the exit head only for tokens that pass it.

    Args:
        routers, confidence_models: one for each checkpoint; None where there is none.
        thresholds: of each checkpoint.
        tokens: token ids of indices into the exit head's logits, `[n]` to `[n]`.
    """

    def __init__(
        self,
        routers: Sequence[TokenRouter | None],
        thresholds: Sequence[Thresholds],
        confidence_models: Sequence[ConfidenceModel | None] | None = None,
        tokens: Callable[[Tensor], Tensor] = lambda index: index,
    ) -> None:
        self.routers, self.thresholds, self.tokens = routers, thresholds, tokens
        self.confidence_models = confidence_models or [None] * len(thresholds)
        for number, wanted in enumerate(thresholds):
            parts = {"router": routers[number], "confidence": self.confidence_models[number]}
            for name, part in parts.items():
                if part is None and getattr(wanted, name) is not None:
                    what = {"router": "router", "confidence": "confidence model"}[name]
                    raise ValueError(f"checkpoint {number} has a {name} threshold but no {what}")

    @torch.no_grad()
    def decide(
        self, checkpoint: int, candidates: Candidates, *, with_logits: bool = True
    ) -> Decision:
        """See `Policy.decide`."""
        router, wanted = self.routers[checkpoint], self.thresholds[checkpoint]
        model = self.confidence_models[checkpoint] if wanted.confidence is not None else None
        hidden = candidates.hidden
        scores = [float("nan")] * len(hidden)
        passing = list(range(len(hidden)))
        routed: Tensor | None = None  # the router's logits
        if router is not None and (wanted.router is not None or model is not None):
            routed = router.logit(hidden.to(router.up.weight))
        if routed is not None and wanted.router is not None:
            scores = routed.sigmoid().tolist()
            passing = [i for i in passing if scores[i] >= wanted.router]
        needs_head = wanted.top_probability is not None or model is not None
        if not passing or not (with_logits or needs_head):
            return Decision(passing, None, None, scores)
        logits = candidates.read(passing)
        top = logits.argmax(-1)
        sure = torch.ones(len(passing), dtype=torch.bool, device=logits.device)
        if wanted.top_probability is not None:
            sure &= logits.float().softmax(-1).amax(-1) >= wanted.top_probability
        if model is not None and wanted.confidence is not None:
            features = gather_features(
                model.features,
                logits,
                self.tokens(top).tolist(),
                None if routed is None else routed[passing],
                candidates.predict(passing),
            )
            confidence = model(features.to(model.mean)).to(logits.device)
            for i, score in zip(passing, confidence.tolist(), strict=True):
                scores[i] = score
            sure &= confidence >= wanted.confidence
        kept = sure.nonzero().squeeze(1).tolist()
        if not kept:
            return Decision([], None, None, scores)
        return Decision([passing[k] for k in kept], logits[kept], top[kept], scores)


class ScriptedPolicy:
    """Exits where a script decides: for tests and benchmarks, which need known decisions.

    Args:
        script: given the position of a token and the number of the checkpoint, whether it exits.
    """

    def __init__(self, script: Callable[[TokenPosition, int], bool]) -> None:
        self.script = script

    def decide(
        self, checkpoint: int, candidates: Candidates, *, with_logits: bool = True
    ) -> Decision:
        """See `Policy.decide`."""
        positions = candidates.positions
        exits = [i for i, position in enumerate(positions) if self.script(position, checkpoint)]
        scores = [float(i in exits) for i in range(len(positions))]
        if not exits or not with_logits:
            return Decision(exits, None, None, scores)
        logits = candidates.read(exits)
        return Decision(exits, logits, logits.argmax(-1), scores)

    @classmethod
    def share(cls, share: float, checkpoint: int = 0, seed: int = 0) -> ScriptedPolicy:
        """Let a share of the tokens, drawn by position and `seed`, exit at one checkpoint."""

        def script(at: TokenPosition, number: int) -> bool:
            draw = random.Random(f"{seed} {at.sequence} {at.position}").random()
            return number == checkpoint and draw < share

        return cls(script)
