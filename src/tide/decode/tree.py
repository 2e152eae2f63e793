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
        path: the nodes that were accepted, in order, as far as that is known.
        decided: whether all of it is known; its nodes are no longer open then.
        drafted: the tree as it was drafted, if this is the rest of it.
        names: the numbers of its nodes in that tree.
        taken: the nodes of that tree that were accepted before.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    decided: bool = False
    drafted: DraftTree | None = None
    names: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
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

    def decide(self, following: Sequence[int | None]) -> None:
        """Find the path that is accepted, as far as it is known.

        It ends where a token follows that is no node; then all is decided.

        Args:
            following: the token after the text, then after each node; None where it is not known.
        """
        nodes = dict(
            zip(zip(self.parents, self.tokens, strict=True), range(len(self.tokens)), strict=True)
        )
        self.path, node = [], -1
        while (token := following[1 + node]) is not None:
            if (found := nodes.get((node, token))) is None:
                self.decided = True
                break
            self.path.append(found)
            node = found
        if self.drafted is not None:
            self.drafted.path = [*self.taken, *(self.names[node] for node in self.path)]

    def rest(self) -> tuple[list[int], DraftTree]:
        """The nodes that may still follow a path that has not ended, and the tree of them."""
        numbers = {self.path[-1]: -1}
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent in numbers:
                numbers[node] = len(nodes)
                nodes.append(node)
        drafted = self.drafted or self
        rest = DraftTree(
            [self.tokens[node] for node in nodes],
            [numbers[self.parents[node]] for node in nodes],
            [self.origins[node] for node in nodes],
            [self.chances[node] for node in nodes],
            drafted=drafted,
            names=[self.names[node] for node in nodes] if self.drafted else nodes,
            taken=drafted.path,
        )
        return nodes, rest
