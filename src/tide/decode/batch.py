"""The state of a batch: sequences, waterlines, pending states and KV cache, kept in step.

Everything that changes one of them is here, so that nothing else has to know of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tide.decode.pack import pack_states
from tide.decode.pending import PendingStates
from tide.decode.sequence import SequenceState
from tide.decode.tree import DraftTree
from tide.decode.waterlines import Waterlines
from tide.models.cache import WaterlineCache
from tide.models.chunk import upload


class BatchState:
    """A batch being decoded.

    Args:
        sequences: prompts only.
        segments: the ranges `[lo, hi)` of layers into which the checkpoints cut the depth.
        cache: empty.
        max_pending: most tokens of a sequence that may wait for a deep pass at the end of a step.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        segments: Sequence[tuple[int, int]],
        cache: WaterlineCache,
        max_pending: int,
    ) -> None:
        self.sequences, self.segments, self.cache = list(sequences), list(segments), cache
        self._waterlines = Waterlines(len(sequences), len(segments), max_pending)
        self._pending = PendingStates(len(sequences), len(segments))

    # ---- what is known

    @property
    def last(self) -> int:
        """The deepest segment."""
        return len(self.segments) - 1

    @property
    def committed(self) -> int:
        """Committed tokens of all sequences."""
        return sum(sequence.committed for sequence in self.sequences)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    def passed(self, i: int, segment: int) -> int:
        """The waterline of a sequence at a segment."""
        return self._waterlines.passed[i][segment]

    def waiting(self, segment: int) -> list[range]:
        """For each sequence, the tokens that wait before `segment`."""
        return [
            self._waterlines.waiting(i, segment, len(sequence.tokens))
            for i, sequence in enumerate(self.sequences)
        ]

    def pending(self, i: int) -> int:
        """Tokens of a sequence that wait for a deep pass."""
        return self._waterlines.pending(i)

    def pending_room(self, i: int) -> int:
        """Tokens that may wait beside those that do and the newest one."""
        return self._waterlines.cap - self._waterlines.pending(i) - 1

    def full(self, i: int) -> bool:
        """Whether a sequence must go deep before another of its tokens may wait."""
        return self._waterlines.full(i)

    # ---- passes

    def take(self, segment: int, spans: Sequence[range]) -> Tensor | None:
        """Remove the states that wait before a segment for a pass, packed; None before the first.

        Also brings the cache down to the waterlines, since rolled-back tokens must not be read.
        """
        known = [passed[0] for passed in self._waterlines.passed]
        if any(map(int.__gt__, self.cache.lengths(0), known)):
            self.cache.rollback(known)
        if segment == 0:
            return None
        return pack_states(
            [self._pending.take(i, segment, len(span)) if span else None for i, span in
             enumerate(spans)]
        )  # fmt: skip

    def advance(
        self, first: int, last: int, spans: Sequence[range], states: Tensor | None = None
    ) -> None:
        """Note that tokens have passed segments `first` to `last`.

        Args:
            states: their states after `last`, `[sequences, tokens, hidden]`, which wait before the
                next segment; None if they wait for nothing.
        """
        counts = [len(span) for span in spans]
        for segment in range(first, last + 1):
            self._waterlines.advance(segment, counts)
        if states is not None and last < self.last:
            for i, count in enumerate(counts):
                if count:
                    self._pending.put(i, last + 1, states[i, :count])

    # ---- tokens

    def draft(self, i: int, tokens: Sequence[int], draft_type: str) -> None:
        """Add drafted tokens to a sequence."""
        sequence = self.sequences[i]
        sequence.draft_type = draft_type
        sequence.drafted += len(tokens)
        for token in tokens:
            sequence.append(token)

    def draft_tree(self, i: int, tree: DraftTree) -> None:
        """Add the nodes of a tree to a sequence, as drafts that are not yet a text."""
        sequence = self.sequences[i]
        sequence.tree, sequence.draft_type = tree, tree.draft_type
        sequence.drafted = len(tree.tokens)
        sequence.tokens += tree.tokens

    def keep_paths(self, indices: Sequence[int]) -> None:
        """Let the path of sequences' trees be their drafts, one after the other.

        Where a path has not ended, the rest of the tree follows it.
        """
        moved: dict[int, tuple[int, Sequence[int]]] = {}
        for i in indices:
            sequence = self.sequences[i]
            tree, start = sequence.tree, sequence.committed
            assert tree is not None
            path, nodes = tree.path, list(tree.path)
            if not tree.decided:
                after, sequence.tree = tree.rest()
                nodes += after
            length = start + len(nodes)
            if any(node != k for k, node in enumerate(nodes)):
                moved[i] = start, nodes
                self._pick_pending(i, start, nodes)
            exits = sequence.exits
            sequence.exits = {at: exits[at] for at in exits if at < start} | {
                start + k: exits[start + node]
                for k, node in enumerate(nodes)
                if start + node in exits
            }
            sequence.tokens[start:length] = [sequence.tokens[start + node] for node in nodes]
            if path:
                place, kept = sequence.padding + start, sequence.tokens[start : start + len(path)]
                tokens = upload(np.array(kept), sequence.context.device)
                sequence.context[place : place + len(kept)] = tokens
            self.rollback(i, length)
        if moved:
            self.cache.keep_paths(moved)

    def _pick_pending(self, i: int, start: int, nodes: Sequence[int]) -> None:
        """Of a tree whose first node is at `start`, let only some nodes wait, where it waits."""
        for segment in range(1, len(self.segments)):
            waiting = self._waterlines.waiting(i, segment, len(self.sequences[i].tokens))
            if waiting.start < start < waiting.stop:
                before = start - waiting.start
                places = [*range(before), *(before + node for node in nodes)]
                self._pending.pick(i, segment, places)

    def commit(self, i: int, token: int) -> str | None:
        """Make `token` the next committed token of a sequence.

        A draft that is this token is accepted; another one, and all behind it, is rolled back.

        Returns:
            The type of the draft that was accepted; None if there was none.
        """
        sequence = self.sequences[i]
        accepted = sequence.open_drafts > 0 and sequence.tokens[sequence.committed] == token
        if not accepted:
            self.rollback(i, sequence.committed)
            sequence.append(token)
        sequence.committed += 1
        sequence.accepted += accepted
        return sequence.draft_type if accepted else None

    def finish(self, i: int) -> None:
        """End a sequence with its last committed token."""
        sequence = self.sequences[i]
        sequence.finished = True
        if sequence.tree is not None:
            sequence.tree.decided = True
        self.rollback(i, sequence.committed)

    def rollback(self, i: int, length: int) -> None:
        """Forget the tokens of a sequence from the `length`-th on, and all computed for them."""
        sequence = self.sequences[i]
        del sequence.tokens[length:]
        sequence.exits = {at: exit_ for at, exit_ in sequence.exits.items() if at < length}
        self._waterlines.rollback(i, length)
        for segment in range(1, len(self.segments)):
            waiting = self._waterlines.waiting(i, segment, length)
            self._pending.cut(i, segment, len(waiting))

    def end_drafts(self) -> list[tuple[str, int, int]]:
        """Forget decided drafts; for each, its type, its tokens and how many were accepted."""
        ended = []
        for sequence in self.sequences:
            if sequence.draft_type and not sequence.open_drafts:
                ended.append((sequence.draft_type, sequence.drafted, sequence.accepted))
                sequence.draft_type, sequence.drafted, sequence.accepted = None, 0, 0
                sequence.tree = None
        return ended

    def keep_unfinished(self) -> None:
        """Drop finished sequences; the last ones move into their places, so little is copied."""
        kept = [i for i, sequence in enumerate(self.sequences) if not sequence.finished]
        movers = iter([i for i in kept if i >= len(kept)])
        order = [
            next(movers) if sequence.finished else i
            for i, sequence in enumerate(self.sequences[: len(kept)])
        ]
        self.sequences = [self.sequences[i] for i in order]
        self._waterlines.keep(order)
        self._pending.keep(order)
        if order:
            self.cache.keep(order)
