"""Gives counters of what really ran.

Knows nothing of models: whoever calls a layer counts it here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tide.picture import depth_histogram, depth_map


@dataclass
class LayerCounts:
    """How often each layer ran, and for how many tokens; padding is not a token.

    Attributes:
        calls: full calls of each layer.
        tokens: tokens that passed each layer in those calls.
        fills: tokens for which a layer wrote only K and V.
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


@dataclass
class ExitStats:
    """What one `generate` call did, counted while it ran.

    Attributes:
        n_layers: layers of the model.
        exits_per_layer: tokens that left after each layer, layers counted from 0.
        remaining_tokens: tokens settled at full depth.
        layers_run: layer calls made, prompt included; a call over many tokens reads the weights
            of the layer once and counts once.
        layers_full: layer calls that plain decoding makes for the same output.
        tokens_run: tokens times layers really computed, padding not counted.
        rounds: steps of the loop.
        drafted: tokens guessed, by source.
        accepted: of those, the ones that proved right.
        audited: early tokens that a deep pass has checked since.
        differed: of those, the ones for which full depth would have said another token.
        depths: for each row, the layers that each of its new tokens needed; after `engine(ids)`,
            that each column needed, 0 for padding.
        scores: for each row, the confidence with which each token left; NaN at full depth.
        sources: for each row, who had guessed each token before it was computed; None if nobody.
        full: for each row, what full depth says in place of each token; None where it did not look.
        losses: for each row, the share of its new tokens found to differ from full depth; None if
            the row was not audited.
    """

    n_layers: int
    exits_per_layer: dict[int, int] = field(default_factory=dict)
    remaining_tokens: int = 0
    layers_run: int = 0
    layers_full: int = 0
    tokens_run: int = 0
    rounds: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    audited: int = 0
    differed: int = 0
    depths: list[list[int]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    sources: list[list[str | None]] = field(default_factory=list)
    full: list[list[int | None]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)

    @property
    def exited_tokens(self) -> int:
        """Tokens that left before the last layer."""
        return sum(self.exits_per_layer.values())

    @property
    def total_tokens(self) -> int:
        """New tokens."""
        return self.exited_tokens + self.remaining_tokens

    @property
    def exit_rate(self) -> float:
        """Share of the new tokens that left early."""
        return self.exited_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def disagreement(self) -> float | None:
        """Share of the checked early tokens that differ from full depth; None if none was."""
        return self.differed / self.audited if self.audited else None

    def exit_at(self, layer: int) -> None:
        """Count a token that left after `layer`."""
        self.exits_per_layer[layer] = self.exits_per_layer.get(layer, 0) + 1

    def full_depth(self) -> None:
        """Count a token settled at full depth."""
        self.remaining_tokens += 1

    def audit(self, differs: bool) -> None:
        """Count the full model's verdict on an early token."""
        self.audited += 1
        self.differed += differs

    def drafts(self, source: str, guessed: int, accepted: int) -> None:
        """Count guesses and how many of them were right."""
        self.drafted[source] = self.drafted.get(source, 0) + guessed
        self.accepted[source] = self.accepted.get(source, 0) + accepted

    def summary(self) -> str:
        """The published text, and after it what we count besides."""
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
            f"rounds: {self.rounds}"
        )
        for source, guessed in sorted(self.drafted.items()):
            lines.append(f"Drafts ({source}): {self.accepted[source]} of {guessed} accepted")
        if self.audited:
            lines.append(f"Audit: {self.differed} of {self.audited} early tokens differed")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The summary and the depths, for notebooks."""
        rows = [[depth for depth in row if depth] for row in self.depths]  # 0 is padding
        depths = [depth for row in rows for depth in row]
        drawn = "".join(f"<div>{depth_map(row, self.n_layers)}</div>" for row in rows)
        return f"<pre>{self.summary()}</pre>{depth_histogram(depths, self.n_layers)}{drawn}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
