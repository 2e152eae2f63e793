"""Gives a trace: the text of one answer, piece by piece, with the depth that each token needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tide.picture import Look, look
from tide.stats import ExitStats


@dataclass(frozen=True)
class Piece:
    """One token.

    Attributes:
        text: what it adds to the text; empty for a part of a character that is not whole yet.
        depth: layers that it needed.
        score: the gate's confidence with which it left; None at full depth.
        source: who had guessed it, if anybody had.
        full: what full depth says in its place; None if it was not asked.
        differs: whether that is another token.
    """

    text: str
    depth: int
    score: float | None
    source: str | None
    full: str | None
    differs: bool


@dataclass
class Trace:
    """One answer.

    Attributes:
        prompt: what was asked.
        pieces: the answer.
        stats: what the engine counted.
        conditions: under which it was made.
        speeds: tokens per second of each way that was timed, by name.
    """

    prompt: str
    pieces: list[Piece]
    stats: ExitStats
    conditions: dict[str, Any] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, prompt: str, tokens: Sequence[int], stats: ExitStats) -> Trace:
        """The trace of the first row of a call."""
        texts = Pieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        pieces = []
        for i, token in enumerate(tokens):
            score, full = stats.scores[0][i], stats.full[0][i]
            pieces.append(
                Piece(
                    texts.add(token, last=i == len(tokens) - 1),
                    stats.depths[0][i],
                    None if math.isnan(score) else score,
                    stats.sources[0][i],
                    None if full is None else tokenizer.decode([full]),
                    full not in (None, token),
                )
            )
        return cls(prompt, pieces, stats)

    def look(self, piece: Piece) -> Look:
        """How to show a piece."""
        return look(piece.depth, self.stats.n_layers, piece.source)

    @property
    def looks(self) -> dict[Look, int]:
        """How many pieces are shown in each way, the shallowest first."""
        counts: dict[Look, int] = {}
        for piece in sorted(self.pieces, key=lambda piece: (piece.depth, piece.source is None)):
            counts[self.look(piece)] = counts.get(self.look(piece), 0) + 1
        return counts

    def footer(self) -> list[str]:
        """What the answer took, in a few lines."""
        stats = self.stats
        saved = 1 - stats.layers_run / stats.layers_full
        lines = [
            f"{stats.total_tokens} tokens; {stats.layers_run} of {stats.layers_full} layer calls "
            f"({saved:.1%} saved); {stats.exited_tokens} tokens left early."
        ]
        if stats.audited:
            lines.append(
                f"Audit: full depth looked at {stats.audited} of the early tokens and would have "
                f"said another in {stats.differed}."
            )
        if self.speeds:
            names = list(self.speeds)
            said = ", ".join(f"{name} {self.speeds[name]:.1f}" for name in names)
            ratio = self.speeds[names[0]] / self.speeds[names[-1]]
            lines.append(
                f"Tokens per second: {said} ({ratio:.2f}x; this prompt, one run each, printing and "
                "audit included)."
            )
        return lines


class Pieces:
    """Turns tokens into text one by one; a character made of several tokens comes with the last.

    Args:
        decode: from token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._tokens, self._said = decode, list[int](), ""

    def add(self, token: int, *, last: bool = False) -> str:
        """What a token adds to the text; the last one adds what there is of a character, too."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        new, self._said = text[len(self._said) :], text
        return new
