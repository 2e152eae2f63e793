"""The state of one sequence being decoded: its tokens, committed and drafted. No model inside."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tide.decode.tree import DraftTree
from tide.exits.ngrams import NGramIndex


@dataclass
class ExitRecord:
    """How a token exited.

    Attributes:
        layer: after which layer.
        token: the exit head's prediction of what follows it.
        score: the confidence with which it exited.
    """

    layer: int
    token: int
    score: float


@dataclass
class SequenceState:
    """One sequence of a batch. Its tokens change by the methods of `BatchState` only.

    Attributes:
        index: its place in the batch as given.
        context: its tokens as `generate` sees them, left padding included, `[room]`; a line of a
            tensor that all sequences share.
        padding: how many of those are padding.
        tokens: its tokens; the first `committed` are final, the rest are drafts.
        prompt: how many of them were given.
        draft_type: of the drafts that are open, or were committed in this step.
        drafted: how many there were.
        accepted: how many of them were accepted so far.
        exits: how tokens exited, by position; a draft's record counts if the draft is accepted.
        pending_audit: the exit head's prediction at a position, until full depth has made its own.
        differed: how often that was another token.
        tree: what the open drafts are, if they are a tree; then they are its nodes. It stays
            until the end of the step.
        finished: no more tokens.
        ngrams: where its n-grams occurred.
    """

    index: int
    context: Tensor
    padding: int
    tokens: list[int]
    prompt: int
    committed: int
    draft_type: str | None = None
    drafted: int = 0
    accepted: int = 0
    exits: dict[int, ExitRecord] = field(default_factory=dict)
    pending_audit: dict[int, int] = field(default_factory=dict)
    differed: int = 0
    tree: DraftTree | None = None
    finished: bool = False
    ngrams: NGramIndex = field(default_factory=NGramIndex)

    @property
    def open_drafts(self) -> int:
        """Tokens that are not committed."""
        return len(self.tokens) - self.committed

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return len(self.context) - self.padding - len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.prompt : self.committed]

    @property
    def loss(self) -> float:
        """Share of its new tokens that differ from full depth, where that was computed."""
        return self.differed / (self.committed - self.prompt)

    def path_to(self, position: int) -> list[int]:
        """Tokens of a tree's path to the node at a position; none if there is none."""
        if self.tree is None or position < self.committed:
            return []
        nodes = self.tree.path_to(position - self.committed)
        return [self.tree.tokens[node] for node in nodes]

    def before(self, position: int) -> int:
        """The token that the one at a position follows; -1 if there is none."""
        at = position - 1
        if self.tree is not None and position >= self.committed:
            at = self.committed + self.tree.parents[position - self.committed]
        return self.tokens[at] if at >= 0 else -1

    def append(self, token: int) -> None:
        """Add a token."""
        self.context[self.padding + len(self.tokens)] = token
        self.tokens.append(token)
