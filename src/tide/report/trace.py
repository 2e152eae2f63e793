"""The trace of one answer: its text, token by token, with the depth that each token needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tide.picture import Look, look
from tide.stats import ExitStats

_GAIN = 1.03  # less is within the noise of one run


@dataclass(frozen=True)
class Piece:
    """One token.

    Attributes:
        text: what it adds to the text; empty while a character is incomplete.
        depth: layers that it ran.
        score: confidence of the gate at its exit; None at full depth.
        draft_source: which source drafted it; None if it was not drafted.
        target_token: prediction of full depth; None if the token was not audited.
        differs: whether the target token is a different one.
    """

    text: str
    depth: int
    score: float | None
    draft_source: str | None
    target_token: str | None
    differs: bool


@dataclass
class Trace:
    """One answer.

    Attributes:
        prompt: as given.
        pieces: the answer.
        stats: what the engine counted.
        conditions: under which it was generated.
        speeds: tokens per second of each method that was timed, by name; ours is the first.
    """

    prompt: str
    pieces: list[Piece]
    stats: ExitStats
    conditions: dict[str, Any] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, prompt: str, tokens: Sequence[int], stats: ExitStats) -> Trace:
        """The trace of the first sequence of a call."""
        texts = Pieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        pieces = []
        for i, token in enumerate(tokens):
            score, target = stats.scores[0][i], stats.target_tokens[0][i]
            pieces.append(
                Piece(
                    texts.add(token, last=i == len(tokens) - 1),
                    stats.depths[0][i],
                    None if math.isnan(score) else score,
                    stats.draft_sources[0][i],
                    None if target is None else tokenizer.decode([target]),
                    target not in (None, token),
                )
            )
        return cls(prompt, pieces, stats)

    def look(self, piece: Piece) -> Look:
        """How to show a piece."""
        return look(piece.depth, self.stats.n_layers, piece.draft_source)

    @property
    def looks(self) -> dict[Look, int]:
        """How many pieces have each look, the shallowest first."""
        counts: dict[Look, int] = {}
        for piece in sorted(
            self.pieces, key=lambda piece: (piece.depth, piece.draft_source is None)
        ):
            counts[self.look(piece)] = counts.get(self.look(piece), 0) + 1
        return counts

    def footer(self) -> list[str]:
        """What the answer cost, in a few lines."""
        stats = self.stats
        saved = 1 - stats.layers_run / stats.layers_full
        lines = [
            f"{stats.total_tokens} tokens; {stats.layers_run} of {stats.layers_full} layer calls "
            f"({saved:.1%} saved); {stats.exited_tokens} tokens exited."
        ]
        if stats.audited:
            lines.append(
                f"Audit: full depth checked {stats.audited} exited tokens and predicts a different "
                f"token for {stats.differed} ({stats.differed / stats.total_tokens:.1%} of all "
                f"{stats.total_tokens} tokens, which is what a risk limits)."
            )
        if self.speeds:
            names = list(self.speeds)
            speeds = ", ".join(f"{name} {self.speeds[name]:.1f}" for name in names)
            lines.append(
                f"Tokens per second: {speeds} (this prompt, one run each, printing and audit "
                "included)."
            )
            lines.append(self.gain())
        return lines

    def gain(self) -> str:
        """What was gained over the fastest baseline or, if nothing was, why and what to try."""
        ours, *others = self.speeds
        baseline = max(others, key=lambda name: self.speeds[name])
        ratio = f"{self.speeds[ours] / self.speeds[baseline]:.2f}x over {baseline}"
        faster = self.speeds[ours] >= _GAIN * self.speeds[baseline]
        stats, compiled = self.stats, self.conditions.get("compile")
        if not stats.exited_tokens and not sum(stats.accepted.values()):
            why = "no token exited and no draft was accepted"
            advice = "a prompt whose answer repeats parts of it, or a longer answer"
            if faster:
                noise = f"The {ratio} is from the loop itself, or noise."
                return f"Nothing was saved: {why}. {noise} Try {advice}."
        elif faster and compiled:
            return f"Gained: {ratio}, the fastest without TIDE here, in one run."
        elif faster:
            return f"Gained: {ratio}, in one run. `--compile` also times compiled `generate`."
        elif not compiled:
            saved = 1 - stats.layers_run / stats.layers_full
            why = f"the work between passes cost more than the {saved:.0%} of layer calls saved"
            advice = "--compile, a larger model, or a longer answer"
        else:
            why = "gates and passes over several tokens cost more than they saved on this prompt"
            advice = "`tide bench`, which takes many prompts: one is noisy"
        return f"Nothing gained ({ratio}): {why}. Try {advice}."


class Pieces:
    """Turns tokens into text one by one; a character of several tokens appears with the last.

    Args:
        decode: from token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._tokens, self._text = decode, list[int](), ""

    def add(self, token: int, *, last: bool = False) -> str:
        """What a token adds to the text; the last one also adds an incomplete character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        new, self._text = text[len(self._text) :], text
        return new
