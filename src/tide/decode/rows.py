"""Gives the rows of a batch being decoded: their tokens, settled and guessed. No model inside."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Left:
    """How a token left early.

    Attributes:
        layer: after which layer.
        token: what the exit head says after it.
        score: the confidence with which it left.
    """

    layer: int
    token: int
    score: float


@dataclass
class Row:
    """One row.

    Attributes:
        index: its place in the batch as given.
        context: its tokens as `generate` sees them, left padding included, `[room]`; a row of a
            tensor that all rows share.
        padding: how many of those are padding.
        tokens: its tokens; the first `settled` are final, the rest are guesses.
        prompt: how many of them were given.
        depths: layers that each settled new token needed.
        scores: confidence with which each left; NaN at full depth.
        sources: who had guessed each, if anybody had.
        full: what full depth says in place of each, once it has looked.
        guessed_by: who made the guesses that are open, or were settled in this step.
        guessed: how many there were.
        accepted: how many of them were right so far.
        left: how tokens left early, by position; of those on top of guesses, if these prove right.
        early: what the exit head said at a position, until full depth has said its word.
        differed: how often that was another word.
        finished: no more tokens.
    """

    index: int
    context: Tensor
    padding: int
    tokens: list[int]
    prompt: int
    settled: int
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    full: list[int | None] = field(default_factory=list)
    guessed_by: str | None = None
    guessed: int = 0
    accepted: int = 0
    left: dict[int, Left] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)
    differed: int = 0
    finished: bool = False

    @property
    def guesses(self) -> int:
        """Tokens that are not settled."""
        return len(self.tokens) - self.settled

    @property
    def new_tokens(self) -> list[int]:
        """Settled tokens after the prompt."""
        return self.tokens[self.prompt : self.settled]

    @property
    def loss(self) -> float:
        """Share of its new tokens that full depth, where it has looked, would say otherwise."""
        return self.differed / len(self.new_tokens)

    def guess(self, token: int, source: str) -> None:
        """Add a guessed token."""
        self.guessed_by = source
        self.guessed += 1
        self.append(token)

    def append(self, token: int) -> None:
        """Add a token."""
        self.context[self.padding + len(self.tokens)] = token
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget the guesses from the `length`-th token on."""
        del self.tokens[length:]
        self.left = {at: left for at, left in self.left.items() if at < length}
