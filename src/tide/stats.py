"""Counters of what really ran.

Knows nothing of models: whoever calls a layer counts it here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tide.picture import depth_histogram, depth_map


@dataclass
class LayerCounts:
    """How often each layer ran, and for how many tokens; padding is not a token.

    Attributes:
        calls: full calls of each layer.
        tokens: tokens that passed each layer in those calls.
        fills: tokens for which a layer wrote only KV.
    """

    calls: list[int]
    tokens: list[int]
    fills: list[int]

    @classmethod
    def zeros(cls, n_layers: int) -> LayerCounts:
        """Counters for a model of `n_layers` layers, all at zero."""
        return cls([0] * n_layers, [0] * n_layers, [0] * n_layers)

    def reset(self) -> None:
        """Set every counter back to zero."""
        for counter in (self.calls, self.tokens, self.fills):
            counter[:] = [0] * len(counter)


class TokenRecord(NamedTuple):
    """How a token was committed.

    Attributes:
        depth: layers that it needed.
        score: the confidence with which it exited; NaN at full depth.
        draft_type: of the draft that it came from, if any.
        target: full depth's prediction, if known yet.
    """

    depth: int
    score: float
    draft_type: str | None
    target: int | None


@dataclass
class ExitStats:
    """What one `generate` call did, counted while it ran.

    Attributes:
        n_layers: layers of the model.
        exits_per_layer: tokens that exited after each layer, layers counted from 0.
        remaining_tokens: tokens committed at full depth.
        layers_run: layer calls made, prompt included; a call over many tokens reads the weights
            of the layer once and counts once.
        layers_full: layer calls that `generate` makes for the same output.
        tokens_run: tokens times layers really computed, padding not counted.
        steps: steps of the loop.
        drafted: tokens drafted, by draft type.
        accepted: of those, the ones that were accepted.
        audited: exited tokens that a deep pass has checked since.
        differed: of those, the ones for which full depth predicts another token.
        depths: for each sequence, the layers that each of its new tokens needed; after
            `engine(ids)`, that each token given needed, 0 for padding.
        scores: for each sequence, the confidence with which each token exited; NaN at full depth.
        draft_sources: for each sequence, the type of draft that each token came from; None if it
            was not drafted.
        target_tokens: for each sequence, full depth's prediction in place of each token; None where
            it was not computed.
        losses: for each sequence, the share of its new tokens found to differ from full depth; None
            if it was not audited.
    """

    n_layers: int
    exits_per_layer: dict[int, int] = field(default_factory=dict)
    remaining_tokens: int = 0
    layers_run: int = 0
    layers_full: int = 0
    tokens_run: int = 0
    steps: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    audited: int = 0
    differed: int = 0
    depths: list[list[int]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    draft_sources: list[list[str | None]] = field(default_factory=list)
    target_tokens: list[list[int | None]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)

    @classmethod
    def of_batch(cls, n_layers: int, sequences: int) -> ExitStats:
        """Empty counters for a batch."""
        made = cls(n_layers)
        for each in (made.depths, made.scores, made.draft_sources, made.target_tokens):
            each.extend([] for _ in range(sequences))
        return made

    @property
    def exited_tokens(self) -> int:
        """Tokens that exited before the last layer."""
        return sum(self.exits_per_layer.values())

    @property
    def total_tokens(self) -> int:
        """New tokens."""
        return self.exited_tokens + self.remaining_tokens

    @property
    def exit_rate(self) -> float:
        """Share of the new tokens that exited."""
        return self.exited_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def disagreement(self) -> float | None:
        """Share of the audited tokens that differ from full depth; None if none was audited."""
        return self.differed / self.audited if self.audited else None

    def count_depth(self, depth: int) -> None:
        """Count a token that needed `depth` layers."""
        if depth == self.n_layers:
            self.remaining_tokens += 1
        else:
            self.exits_per_layer[depth - 1] = self.exits_per_layer.get(depth - 1, 0) + 1

    def commit(self, sequence: int, record: TokenRecord) -> None:
        """Record a committed token of a sequence."""
        self.count_depth(record.depth)
        self.depths[sequence].append(record.depth)
        self.scores[sequence].append(record.score)
        self.draft_sources[sequence].append(record.draft_type)
        self.target_tokens[sequence].append(record.target)

    def audit(self, sequence: int, place: int, target: int, *, differs: bool) -> None:
        """Record full depth's prediction in place of the `place`-th new token of a sequence."""
        self.target_tokens[sequence][place] = target
        self.audited += 1
        self.differed += differs

    def count_drafts(self, draft_type: str, drafted: int, accepted: int) -> None:
        """Count drafted tokens and how many of them were accepted."""
        self.drafted[draft_type] = self.drafted.get(draft_type, 0) + drafted
        self.accepted[draft_type] = self.accepted.get(draft_type, 0) + accepted

    def count_layers(self, counts: LayerCounts, layers_full: int) -> None:
        """Take over what the runner has counted."""
        self.layers_run, self.tokens_run = sum(counts.calls), sum(counts.tokens)
        self.layers_full = layers_full

    def summary(self) -> str:
        """The published text, and after it what else is counted."""
        total = self.total_tokens
        lines = [
            f"Total tokens: {total}, Exited: {self.exited_tokens} ({_percent(self.exit_rate)})"
        ]
        lines += [
            f"  Layer {layer}: {count} exits ({_percent(count / total)})"
            for layer, count in sorted(self.exits_per_layer.items())
        ]
        lines.append(f"  Ran all layers: {self.remaining_tokens}")
        saved = 1 - self.layers_run / self.layers_full if self.layers_full else 0.0
        lines.append(
            f"Layer calls: {self.layers_run} of {self.layers_full} ({_percent(saved)} saved), "
            f"steps: {self.steps}"
        )
        for draft_type, drafted in sorted(self.drafted.items()):
            lines.append(
                f"Drafts ({draft_type}): {self.accepted[draft_type]} of {drafted} accepted"
            )
        if self.audited:
            lines.append(f"Audit: {self.differed} of {self.audited} exited tokens differed")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The summary and the depths, for notebooks."""
        shown = [[depth for depth in sequence if depth] for sequence in self.depths]  # 0 is padding
        depths = [depth for sequence in shown for depth in sequence]
        drawn = "".join(f"<div>{depth_map(sequence, self.n_layers)}</div>" for sequence in shown)
        return f"<pre>{self.summary()}</pre>{depth_histogram(depths, self.n_layers)}{drawn}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
