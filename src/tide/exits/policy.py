"""Gives policies: from states at a checkpoint to who leaves there, and with which logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tide.exits.routers import TokenRouter, head_features


@dataclass(frozen=True)
class Place:
    """Where a token stands: its row in the batch as given, and its position there."""

    row: int
    position: int


@dataclass
class Decision:
    """Who leaves at a checkpoint.

    Attributes:
        leaves: indices of the states that leave, ascending.
        logits: what the exit head says for them, `[len(leaves), v]`; None if it was not read.
        scores: confidence of each state asked, for the record; NaN where none was computed.
    """

    leaves: list[int]
    logits: Tensor | None
    scores: list[float]


# Logits of the exit head for some of the states that a policy was asked about.
ReadHead = Callable[[Sequence[int]], Tensor]


class Policy(Protocol):
    """Decides, at each checkpoint, which tokens leave."""

    def decide(
        self,
        checkpoint: int,
        hidden: Tensor,
        places: Sequence[Place],
        read: ReadHead,
        *,
        with_logits: bool = True,
    ) -> Decision:
        """Decide for states `hidden`, `[n, hidden]`, at the `checkpoint`-th checkpoint.

        Without `with_logits`, the head is read only where the decision needs it.
        """
        ...


@dataclass(frozen=True)
class Gate:
    """Thresholds of one checkpoint; a token leaves if it passes all that are set.

    Attributes:
        router: least confidence of the logit-free router; None if there is none.
        top_probability: least top probability of the exit head; None if it is not asked.
    """

    router: float | None = None
    top_probability: float | None = None


class GatePolicy:
    """The two-stage gate: a logit-free router first; the exit head only for those it lets pass.

    A router fitted with head features is asked after the head, since it needs it.

    Args:
        routers: one for each checkpoint; None where there is none.
        gates: thresholds of each checkpoint.
    """

    def __init__(self, routers: Sequence[TokenRouter | None], gates: Sequence[Gate]) -> None:
        for number, (router, gate) in enumerate(zip(routers, gates, strict=True)):
            if router is None and gate.router is not None:
                raise ValueError(f"checkpoint {number} has a router threshold but no router")
        self.routers, self.gates = routers, gates
        # What the head of the checkpoint above said, for routers that ask whether heads agree.
        self._said: dict[Place, int] = {}

    @torch.no_grad()
    def decide(
        self,
        checkpoint: int,
        hidden: Tensor,
        places: Sequence[Place],
        read: ReadHead,
        *,
        with_logits: bool = True,
    ) -> Decision:
        """See `Policy.decide`."""
        router, gate = self.routers[checkpoint], self.gates[checkpoint]
        scores = [float("nan")] * len(hidden)
        leaves = list(range(len(hidden)))
        first = router is not None and not router.features and gate.router is not None
        if router is not None and first:
            scores = router(hidden.to(router.up.weight.dtype)).tolist()
            leaves = [i for i in leaves if scores[i] >= gate.router]
        asks_head = gate.top_probability is not None or (router is not None and router.features)
        if not leaves or not (with_logits or asks_head):
            return Decision(leaves, None, scores)
        logits = read(leaves)
        passed = torch.ones(len(leaves), dtype=torch.bool, device=logits.device)
        if gate.top_probability is not None:
            passed &= logits.float().softmax(-1).amax(-1) >= gate.top_probability
        if router is not None and router.features and gate.router is not None:
            previous = [self._said.get(places[i], -1) for i in leaves] if checkpoint else None
            features = head_features(router.features, logits, previous)
            confidence = router(hidden[leaves].to(router.up.weight.dtype), features)
            for i, score in zip(leaves, confidence.tolist(), strict=True):
                scores[i] = score
            passed &= confidence >= gate.router
            said = logits.argmax(-1).tolist()
            self._said = {places[i]: token for i, token in zip(leaves, said, strict=True)}
        kept = passed.nonzero().squeeze(1).tolist()
        if not kept:
            return Decision([], None, scores)
        return Decision([leaves[k] for k in kept], logits[kept], scores)


class ScriptedPolicy:
    """Leaves where a script says so: for tests and benchmarks, which need known decisions.

    Args:
        script: given the place of a token and the number of the checkpoint, whether it leaves.
    """

    def __init__(self, script: Callable[[Place, int], bool]) -> None:
        self.script = script

    def decide(
        self,
        checkpoint: int,
        hidden: Tensor,
        places: Sequence[Place],
        read: ReadHead,
        *,
        with_logits: bool = True,
    ) -> Decision:
        """See `Policy.decide`."""
        leaves = [i for i, place in enumerate(places) if self.script(place, checkpoint)]
        scores = [float(i in leaves) for i in range(len(places))]
        return Decision(leaves, read(leaves) if leaves and with_logits else None, scores)

    @classmethod
    def share(cls, share: float, checkpoint: int = 0, seed: int = 0) -> ScriptedPolicy:
        """Let a share of the tokens, drawn by place and `seed`, leave at one checkpoint."""

        def script(place: Place, at: int) -> bool:
            draw = random.Random(f"{seed} {place.row} {place.position}").random()
            return at == checkpoint and draw < share

        return cls(script)
