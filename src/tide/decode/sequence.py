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
        tree: what the drafts of this step are, if they are a tree: until it is decided, its nodes;
            then its path.
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

    @property
    def open_tree(self) -> DraftTree | None:
        """The tree whose nodes are its open drafts."""
        return None if self.tree is None or self.tree.decided else self.tree

    def path_to(self, position: int) -> list[int]:
        """Tokens of a tree's path to the node at a position; none if there is none."""
        tree = self.open_tree
        if tree is None or position < self.committed:
            return []
        return [tree.tokens[node] for node in tree.path_to(position - self.committed)]

    def possible(self) -> list[int]:
        """Positions whose successor may still be committed, the newest committed token's first.

        Of a tree, all but nodes that contradict a token that has exited.
        """
        tree, root = self.open_tree, self.committed - 1
        if tree is None:
            return list(range(root, len(self.tokens)))
        found = {-1: root}
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            exited = self.exits.get(self.committed + parent)
            if parent in found and (exited is None or exited.token == token):
                found[node] = self.committed + node
        return list(found.values())

    def place(self, position: int) -> int:
        """Where a token stands in its text: a node, by its depth in the tree."""
        path = self.path_to(position)
        return self.committed - 1 + len(path) if path else position

    def drafts_to(self, position: int) -> list[int]:
        """The drafts that stand between what is committed and what follows a position."""
        return self.path_to(position) or self.tokens[self.committed : position + 1]

    def before(self, position: int) -> int:
        """The token that the one at a position follows; -1 if there is none."""
        at, tree = position - 1, self.open_tree
        if tree is not None and position >= self.committed:
            at = self.committed + tree.parents[position - self.committed]
        return self.tokens[at] if at >= 0 else -1

    def append(self, token: int) -> None:
        """Add a token."""
        self.context[self.padding + len(self.tokens)] = token
        self.tokens.append(token)
