"""The gate of a checkpoint, on the device: which tokens exit there, as what, and how sure.

All of it runs where the states are, so that the host waits once, for one small tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, cond, nn
from torch.compiler import is_compiling

from tide.exits.candidates import CandidateReadout, Prefilter
from tide.exits.checkpoint import Checkpoint
from tide.exits.confidence import ConfidenceModel, gather_features
from tide.exits.fused import FusedGate, fuse
from tide.exits.heads import ExitHead, Readout
from tide.exits.ngrams import NGramPrediction
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models.tokens import NOTES

_log = logging.getLogger(__name__)


def note(predicted: NGramPrediction) -> tuple[int, ...]:
    """What a gate is told of a token that may exit, `NOTES` numbers; of others, zeros."""
    chance = round(255 * predicted.chance)
    return 1, predicted.context, predicted.matched, predicted.table, chance


class DecisionBatch(NamedTuple):
    """What a gate decides for tokens, `[...]` each.

    Attributes:
        exits: whether a token exits.
        tokens: what the exit head predicts, as token ids; undefined for tokens that do not exit.
        scores: the confidence, for the record; NaN where none was computed.
    """

    exits: Tensor
    tokens: Tensor
    scores: Tensor

    def pack(self) -> Tensor:
        """As one tensor, `[..., 3]`: the host is to wait for one copy only."""
        # Token ids are whole numbers below 2 ** 24, which float32 holds exactly.
        return torch.stack([self.exits.float(), self.tokens.float(), self.scores.float()], -1)


class ExitGate(nn.Module):
    """The gate in stages: what is cheap first, and the exit head only for tokens that pass it.

    Args:
        head: of the checkpoint.
        readout: from its states to tokens; None if nobody wants to know the tokens.
        thresholds: a token exits if it passes all that are set.
        router, confidence_model, prefilter: None where there is none.
    """

    def __init__(
        self,
        head: ExitHead,
        readout: Readout | None,
        thresholds: Thresholds,
        router: TokenRouter | None = None,
        confidence_model: ConfidenceModel | None = None,
        prefilter: Prefilter | None = None,
    ) -> None:
        super().__init__()
        for part, what, module in (
            ("router", "router", router),
            ("confidence", "confidence model", confidence_model),
            ("prefilter", "prefilter", prefilter),
        ):
            if module is None and getattr(thresholds, part) is not None:
                raise ValueError(f"there is a {part} threshold but no {what}")
        self.head, self.readout, self.thresholds = head, readout, thresholds
        self.confidence_model = confidence_model if thresholds.confidence is not None else None
        self.prefilter = prefilter if thresholds.prefilter is not None else None
        wants_router = thresholds.router is not None or self.confidence_model is not None
        self.router = router if wants_router else None
        self.fused: FusedGate | None = None

    def fuse(self, *, compiled: bool = False) -> None:
        """Decide by fused operations, where kernels run; to be called once all is in its place.

        Args:
            compiled: whether it is to be part of graphs.
        """
        self.fused = None
        if self.readout is not None:
            self.readout.fuse(compiled=compiled)
            self.fused = fuse(self.readout, self.thresholds, *self._parts)
            if self.fused is not None and self.fused.native and not self._agrees(self.readout):
                self.fused = None

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.head, self.router, self.confidence_model, self.prefilter

    @torch.no_grad()
    def _agrees(self, readout: Readout) -> bool:
        """Whether our operator, compiled on this machine, decides as its reference does.

        Compared where all tokens pass and where none does.
        """
        size = next(readout.norm.parameters()).shape[-1]
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(4, size, generator=generator).to(readout.dtype)
        told, nothing = note(NGramPrediction(1, 2, 3, 0.5)), (0,) * NOTES
        notes = torch.tensor([told, told, told, nothing])
        for level in (0.0, 2.0):
            given = {k: None if v is None else level for k, v in asdict(self.thresholds).items()}
            if level and self.prefilter is not None:
                given["router"] = None  # which the reference reads for rejected tokens too
            operator = fuse(readout, Thresholds(**given), *self._parts)
            assert operator is not None
            expected, got = operator.by_reference(states, notes), operator(states, notes)
            for decided in (expected, got):
                decided[:, 1] *= decided[:, 0]  # undefined of tokens that do not exit
                decided[3, 2] = 0.0  # and this of those that may not
            decisions = got[:, :2].equal(expected[:, :2])
            if not decisions or not torch.allclose(
                got[:, 2], expected[:, 2], rtol=1e-3, atol=1e-3, equal_nan=True
            ):
                _log.warning("The operator of gates is not used: it decides otherwise here.")
                return False
        return True

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        readout: Readout,
        thresholds: Thresholds,
        candidates: CandidateReadout | None,
    ) -> ExitGate:
        """The gate of an artifact's checkpoint, with these thresholds."""
        c, prefilter = checkpoint, None
        if c.prefilter is not None and candidates is not None:
            prefilter = Prefilter(c.prefilter, candidates)
        return cls(c.head, readout, thresholds, c.router, c.confidence_model, prefilter)

    @property
    def wants_ngrams(self) -> bool:
        """Whether n-gram predictions count."""
        features = self.confidence_model.features if self.confidence_model is not None else ()
        return self.prefilter is not None or "context" in features or "table" in features

    @property
    def screens(self) -> bool:
        """Whether some tokens are rejected before the exit head is read."""
        return self.thresholds.prefilter is not None or self.thresholds.router is not None

    def note(self, predict: Callable[[], NGramPrediction]) -> tuple[int, ...]:
        """What this gate is to be told of a token that may exit; n-grams only if they count."""
        return note(predict() if self.wants_ngrams else NGramPrediction())

    def forward(self, states: Tensor, notes: Tensor) -> Tensor:
        """Decide for tokens.

        Args:
            states: at the checkpoint, `[..., hidden]`.
            notes: of each token, `[..., NOTES]`.

        Returns:
            A packed `DecisionBatch`, `[..., 3]`.
        """
        shape = states.shape[:-1]
        states, notes = states.flatten(0, -2), notes.flatten(0, -2).to(states.device)
        if self.fused is not None and self.fused.takes(states):
            return self.fused(states, notes).unflatten(0, shape)
        return self.decide(states, notes).pack().unflatten(0, shape)

    def decide(self, states: Tensor, notes: Tensor) -> DecisionBatch:
        """Decide for tokens, `[n, hidden]` and `[n, NOTES]`."""
        normed = self._normed(states)
        screened = self._screen(normed, notes)
        # On a CPU, a token that the prefilter rejects costs no more.
        if normed is None or self.thresholds.prefilter is None or states.device.type != "cpu":
            return self._confirm(states, normed, notes, screened)
        if is_compiling():
            given = states, normed, notes, *screened
            return DecisionBatch(*cond(screened.exits.any(), self._confirmed, _rejected, given))
        return self._confirm(states, normed, notes, screened) if screened.exits.any() else screened

    def head_timer(self) -> Callable[[int], Any] | None:
        """Reads the exit head for some tokens, to be timed; None where all are read anyway."""
        readout = self.readout
        if readout is None or readout.device.type != "cpu":
            return None
        size = next(readout.norm.parameters()).shape[-1]
        if self.fused is not None and self.fused.native:
            # A gate that is nothing else.
            alone = fuse(readout, Thresholds(), ExitHead("identity", size), None, None, None)
            assert alone is not None
            return lambda tokens: alone(
                torch.zeros(tokens, size, dtype=readout.dtype),
                torch.tensor([note(NGramPrediction())] * tokens),
            )

        def read(tokens: int) -> Any:
            normed = self._normed(torch.zeros(tokens, size, dtype=readout.dtype))
            assert normed is not None
            return readout.top_of_normed(normed, torch.ones(tokens, dtype=torch.bool))

        return read

    def _normed(self, states: Tensor) -> Tensor | None:
        """States as candidates and head take them, `[n, hidden]`; None if neither is read."""
        return None if self.readout is None else self.readout.norm(self.head.transform(states))

    def _screen(self, normed: Tensor | None, notes: Tensor) -> DecisionBatch:
        """What the prefilter lets pass; without one, all that may exit."""
        exits, tokens = notes[:, 0] != 0, torch.zeros_like(notes[:, 0])
        if self.thresholds.prefilter is None or normed is None:
            unknown = torch.full_like(tokens, torch.nan, dtype=torch.float32)
            return DecisionBatch(exits, tokens, unknown)
        assert self.prefilter is not None
        scores = self.prefilter(normed, notes[:, 1:]).float().to(notes.device)
        return DecisionBatch(exits & (scores >= self.thresholds.prefilter), tokens, scores)

    def _confirm(
        self, states: Tensor, normed: Tensor | None, notes: Tensor, screened: DecisionBatch
    ) -> DecisionBatch:
        """Decide for tokens that passed, by the router and by the exit head."""
        wanted, routed = self.thresholds, None
        exits, tokens, scores = screened
        if self.router is not None:
            routed = self.router.logit(states.to(self.router.up.weight)).float().to(exits.device)
            if wanted.router is not None:
                scores = routed.sigmoid()
                exits = exits & (scores >= wanted.router)
        if self.readout is None or normed is None:
            return DecisionBatch(exits, tokens, scores)
        tokens, tops = self.readout.top_of_normed(normed, exits)
        tokens, tops = tokens.to(exits.device), tops.to(exits.device)  # the head may be elsewhere
        if self.confidence_model is not None and wanted.confidence is not None:
            names, ngrams = self.confidence_model.features, notes[:, 1:]
            features = gather_features(names, tops, tokens, routed, ngrams)
            confidence = self.confidence_model(features.to(self.confidence_model.mean))
            scores = torch.where(exits, confidence.to(scores), scores)
            exits = exits & (scores >= wanted.confidence)
        if wanted.top_probability is not None:
            exits = exits & (tops[:, 0].exp() >= wanted.top_probability)
        return DecisionBatch(exits, tokens, scores)

    def _confirmed(
        self, states: Tensor, normed: Tensor, notes: Tensor, *screened: Tensor
    ) -> tuple[Tensor, ...]:
        """`_confirm` as a branch of a graph: tensors alone, and no result is an argument."""
        decision = self._confirm(states, normed, notes, DecisionBatch(*screened))
        return tuple(t.clone() for t in decision)


def _rejected(
    states: Tensor, normed: Tensor, notes: Tensor, *screened: Tensor
) -> tuple[Tensor, ...]:
    """The other branch, where no token has passed."""
    return tuple(t.clone() for t in screened)


class OpenGate(ExitGate):
    """Lets every token exit that may: who may is decided on the host."""

    def __init__(self, head: ExitHead, readout: Readout | None) -> None:
        super().__init__(head, readout, Thresholds())

    def fuse(self, *, compiled: bool = False) -> None:
        """Nothing: the host decides."""

    def decide(self, states: Tensor, notes: Tensor) -> DecisionBatch:
        """See `ExitGate.decide`."""
        decision = super().decide(states, notes)
        return decision._replace(scores=decision.exits.float())
