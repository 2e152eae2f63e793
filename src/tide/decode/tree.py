"""A draft tree: tokens that may follow, several of them after the same one. Knows no model.

A tree is run in one pass: each node attends to the text and to the nodes that it follows
(Miao et al., "SpecInfer", 2023). A chain is a tree in which each node follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# What stands behind a node: tokens of a match in the text, fifths of the table's chance, rank among
# recycled predictions after two tokens and after one, tokens of a match in earlier answers; each 0
# for nothing.
Origin = tuple[int, int, int, int, int]
NO_ORIGIN: Origin = (0, 0, 0, 0, 0)


@dataclass
class DraftTree:
    """Nodes, each after the one that it follows.

    Attributes:
        tokens: of the nodes.
        parents: which node each follows; -1 for the newest token of the text.
        origins: what stands behind each, by which its acceptance is counted.
        chances: that each is accepted, and with it all that it follows.
        path: the nodes that were accepted, in order, once that is decided.
        decided: whether it is; its nodes are no longer open then.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    decided: bool = False
    draft_type = "tree"

    def first(self, nodes: int) -> DraftTree:
        """The tree of the first nodes."""
        return DraftTree(
            self.tokens[:nodes], self.parents[:nodes], self.origins[:nodes], self.chances[:nodes]
        )

    def path_to(self, node: int) -> list[int]:
        """The nodes from the text to `node`; none for -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def decide(self, following: Sequence[int | None]) -> bool:
        """Find the path that is accepted, if what follows it is known; returns whether it is.

        Args:
            following: the token after the text, then after each node; None where it is not known.
        """
        nodes = dict(
            zip(zip(self.parents, self.tokens, strict=True), range(len(self.tokens)), strict=True)
        )
        path: list[int] = []
        node = -1
        while (token := following[1 + node]) is not None:
            if (found := nodes.get((node, token))) is None:
                self.path, self.decided = path, True
                return True
            path.append(found)
            node = found
        return False
