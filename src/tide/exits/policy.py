"""Gives policies: from states at a checkpoint to who leaves there, and with which logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tide.exits.blend import Blend, gather_opinions
from tide.exits.hints import Hint
from tide.exits.routers import TokenRouter


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


# Logits of the exit head, `[n, v]`, and hints, for some of the states asked about.
ReadHead = Callable[[Sequence[int]], Tensor]
GetHints = Callable[[Sequence[int]], list[Hint]]


class Policy(Protocol):
    """Decides, at each checkpoint, which tokens leave."""

    def decide(
        self,
        checkpoint: int,
        hidden: Tensor,
        places: Sequence[Place],
        read: ReadHead,
        hints: GetHints,
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
        router: least confidence of the router, which is asked first and needs no logits.
        top_probability: least top probability of the exit head.
        blend: least chance that the blend gives the token.
    """

    router: float | None = None
    top_probability: float | None = None
    blend: float | None = None

    def at(self, boldness: float) -> Gate:
        """The gate made bolder or safer: the chance of being wrong that is taken, times `boldness`.

        All checkpoints move together, so thresholds are on one path: 1 is as calibrated, 0 lets
        nobody leave who is not certain.
        """

        def moved(threshold: float | None) -> float | None:
            return None if threshold is None else 1 - (1 - threshold) * boldness

        return replace(self, top_probability=moved(self.top_probability), blend=moved(self.blend))

    @property
    def shut(self) -> bool:
        """Whether nobody can pass: it asks for more than certainty."""
        return any(t is not None and t > 1 for t in asdict(self).values())


class GatePolicy:
    """The gate in stages: a logit-free router first; the exit head only for those it lets pass.

    Args:
        routers, blends: one for each checkpoint; None where there is none.
        gates: thresholds of each checkpoint.
        tokens: token ids of indices into the exit head's logits, `[n]` to `[n]`.
    """

    def __init__(
        self,
        routers: Sequence[TokenRouter | None],
        gates: Sequence[Gate],
        blends: Sequence[Blend | None] | None = None,
        tokens: Callable[[Tensor], Tensor] = lambda index: index,
    ) -> None:
        self.routers, self.gates, self.tokens = routers, gates, tokens
        self.blends = blends or [None] * len(gates)
        for number, gate in enumerate(gates):
            for name, there in (("router", routers[number]), ("blend", self.blends[number])):
                if there is None and getattr(gate, name) is not None:
                    raise ValueError(f"checkpoint {number} has a {name} threshold but no {name}")

    @torch.no_grad()
    def decide(
        self,
        checkpoint: int,
        hidden: Tensor,
        places: Sequence[Place],
        read: ReadHead,
        hints: GetHints,
        *,
        with_logits: bool = True,
    ) -> Decision:
        """See `Policy.decide`."""
        router, gate = self.routers[checkpoint], self.gates[checkpoint]
        blend = self.blends[checkpoint] if gate.blend is not None else None
        scores = [float("nan")] * len(hidden)
        leaves = list(range(len(hidden)))
        sure: Tensor | None = None  # the router's logits
        if router is not None and (gate.router is not None or blend is not None):
            sure = router.logit(hidden.to(router.up.weight))
        if sure is not None and gate.router is not None:
            scores = sure.sigmoid().tolist()
            leaves = [i for i in leaves if scores[i] >= gate.router]
        asks_head = gate.top_probability is not None or blend is not None
        if not leaves or not (with_logits or asks_head):
            return Decision(leaves, None, scores)
        logits = read(leaves)
        passed = torch.ones(len(leaves), dtype=torch.bool, device=logits.device)
        if gate.top_probability is not None:
            passed &= logits.float().softmax(-1).amax(-1) >= gate.top_probability
        if blend is not None and gate.blend is not None:
            said = self.tokens(logits.argmax(-1)).tolist()
            judged = None if sure is None else sure[leaves]
            opinions = gather_opinions(blend.features, logits, said, judged, hints(leaves))
            chances = blend(opinions.to(blend.mean)).to(logits.device)
            for i, chance in zip(leaves, chances.tolist(), strict=True):
                scores[i] = chance
            passed &= chances >= gate.blend
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
        hints: GetHints,
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
