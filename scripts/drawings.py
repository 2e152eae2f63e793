"""Draws how waterlines work, for docs/waterlines.md, by moving the library's own waterlines.

    python scripts/drawings.py

Each drawing is a column of frames; a frame shows segments from the first layers down, tokens from
left to right. They carry their own background, so they can be read on any page.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from tide.decode.waterline import Waterlines  # noqa: E402

WIDTH, MARGIN, LABELS = 440, 14, 96
CELL, GAP, LINE = 26, 4, 18
LETTER = 6.9  # width of an average letter of the text at 13 px, rather too wide than too narrow
SEGMENTS = ("layers 0-7", "layers 8-15", "layers 16-31")
KINDS = {
    "now": "runs in this pass",
    "done": "has passed before",
    "waits": "waits on the ledge",
    "kv": "K and V only",
    "none": "not yet",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b2733 }
.small { font-size: 11px } .muted { fill: #55636f } .strong { font-weight: 600 }
.paper { fill: #f6f8fa } .wrong { fill: #b3261e } .oncell { fill: #ffffff; font-size: 11px }
.now { fill: #0b5a7d } .done { fill: #7fb2cb } .none { fill: none; stroke: #b6c2cc }
.waits { fill: #fbe9c6; stroke: #a8690f; stroke-dasharray: 4 2 }
.kv { fill: #d6e6ee; stroke: #3b82a6 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0 } .muted { fill: #a3b0bc } .paper { fill: #1d232d }
  .wrong { fill: #ff9d94 } .oncell { fill: #0d1319 }
  .now { fill: #8fd0ee } .done { fill: #3a7592 } .none { stroke: #4b5866 }
  .waits { fill: #4d3a10; stroke: #e0a94a } .kv { fill: #22323c; stroke: #5fa8cb }
}
"""


@dataclass
class Frame:
    """One picture of the waterlines.

    Attributes:
        text: what happens.
        after: tokens that have passed each segment now.
        before: and before this pass.
        known: tokens there are.
        kv: tokens that wrote only K and V, by segment.
        guesses: tokens that are guesses.
        wrong: of them, the one that proved wrong.
    """

    text: str
    after: list[int]
    before: list[int]
    known: int
    kv: dict[int, set[int]] = field(default_factory=dict)
    guesses: set[int] = field(default_factory=set)
    wrong: int | None = None

    def kind(self, segment: int, token: int) -> str:
        """What a cell shows."""
        if token in self.kv.get(segment, ()):
            return "kv"
        if token < self.after[segment]:
            return "now" if token >= self.before[segment] else "done"
        return "waits" if segment and token < self.after[segment - 1] else "none"


class Story:
    """The waterlines of one row, and what they were when it was last looked at."""

    def __init__(self, *passed: int) -> None:
        self.lines = Waterlines(1, len(passed), 16)
        for segment, count in enumerate(passed):
            self.lines.advance(segment, [count])
        self.seen = list(passed)
        self.kv: dict[int, set[int]] = {}

    def run(self, *segments: int, known: int) -> None:
        """Run segments over all that waits before them."""
        for segment in segments:
            self.lines.advance(segment, [len(self.lines.ledge(0, segment, known))])

    def fill(self, *segments: int) -> None:
        """Write K and V only, for all that waits."""
        for segment in segments:
            ledge = self.lines.ledge(0, segment, 0)
            self.kv.setdefault(segment, set()).update(ledge)
            self.lines.advance(segment, [len(ledge)])

    def frame(
        self, text: str, known: int, guesses: range = range(0), wrong: int | None = None
    ) -> Frame:
        """A picture of what has changed since the last."""
        before, self.seen = self.seen, list(self.lines.passed[0])
        kv = {segment: set(tokens) for segment, tokens in self.kv.items()}
        return Frame(text, list(self.seen), before, known, kv, set(guesses), wrong)


def ledges() -> list[Frame]:
    """What a waterline and a ledge are."""
    story = Story(8, 5, 3)
    return [story.frame(
        "Eight tokens have passed the first segment, five the second, three the third. Tokens 5, 6 "
        "and 7 wait before the second segment; 3 and 4 before the third.", 8,
    )]  # fmt: skip


def step() -> list[Frame]:
    """Two decode steps: one that ends early, one that goes to full depth."""
    story, frames = Story(6, 4, 4), []
    story.run(0, known=7)
    frames.append(story.frame(
        "Token 6 runs through the first segment alone. The gate is sure: its exit head says token "
        "7, and 6 waits beside 4 and 5.", 7,
    ))  # fmt: skip
    story.run(0, known=8)
    frames.append(story.frame("Token 7 runs through the first segment. The gate is not sure.", 8))
    story.run(1, known=8)
    frames.append(story.frame(
        "So the second segment runs on all that waits, 4 to 7, in one pass. Not sure either.", 8,
    ))  # fmt: skip
    story.run(2, known=8)
    frames.append(story.frame(
        "The third segment runs on them too. Full depth says token 8; and what it says after 4, 5 "
        "and 6 is compared with what their exit heads had said.", 8,
    ))  # fmt: skip
    return frames


def strategies() -> list[Frame]:
    """K and V of a token that left: deferred, and propagate."""
    deferred, propagate = Story(6, 5, 5), Story(6, 5, 5)
    deferred.run(0, known=7)
    first = deferred.frame(
        "deferred: tokens 5 and 6 left after the first segment and wait. The next deep pass will "
        "give them the K and V that the full model has.", 7,
    )  # fmt: skip
    propagate.fill(1, 2)
    propagate.run(0, known=7)
    propagate.fill(1, 2)
    second = propagate.frame(
        "propagate: the segments above stored K and V for 5 and 6 at once, from the state in which "
        "they left. They never go deeper, and no later pass checks them.", 7,
    )  # fmt: skip
    return [first, second]


def drafts() -> list[Frame]:
    """Guesses that go down together."""
    story = Story(3, 3, 3)
    story.run(0, 1, 2, known=7)
    return [story.frame(
        "Token 3 is settled. Tokens 4, 5 and 6 are guesses, from the text so far or from the "
        "table. One pass takes all four to full depth, which says what comes after each: 4 and 5 "
        "were right, 6 was not.", 7, range(4, 7), wrong=6,
    )]  # fmt: skip


def fall_back() -> list[Frame]:
    """What happens to a guess that proved wrong."""
    story = Story(7, 7, 7)
    story.lines.fall_back(0, 6)
    frames = [story.frame(
        "Waterlines, ledges and cache fall back to 6 tokens. The full model's own token takes the "
        "place of the wrong guess; it has not run yet.", 7,
    )]  # fmt: skip
    story.run(0, 1, 2, known=7)
    frames.append(story.frame("The next pass begins with it.", 7))
    return frames


def svg(name: str, frames: list[Frame]) -> str:
    """A column of frames, and a legend of what they show."""
    parts: list[str] = []
    y = MARGIN
    for frame in frames:
        y = _frame(parts, frame, y) + 12
    y = _legend(parts, frames, y)
    parts.insert(0, f'<rect class="paper" width="{WIDTH}" height="{y}" rx="8"/>')
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = f"<title>{escape(name)}: {escape(' '.join(f.text for f in frames))}</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _frame(parts: list[str], frame: Frame, y: int) -> int:
    for line in textwrap.wrap(frame.text, int((WIDTH - 2 * MARGIN) / LETTER)):
        parts.append(_text(MARGIN, y + 12, line))
        y += LINE
    y += 6
    for token in range(frame.known):
        name = f"{token}?" if token in frame.guesses else str(token)
        parts.append(_text(_left(token) + CELL / 2, y + 10, name, "small muted", "middle"))
    y += 16
    for segment, label in enumerate(SEGMENTS):
        parts.append(_text(MARGIN, y + 17, label, "small"))
        for token in range(frame.known):
            parts.append(_cell(frame, segment, token, y))
        note = f"waterline {frame.after[segment]}"
        parts.append(_text(_left(8) + 6, y + 17, note, "small muted"))
        y += CELL + GAP
    return y


def _cell(frame: Frame, segment: int, token: int, y: int) -> str:
    kind, x = frame.kind(segment, token), _left(token)
    cell = f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4"/>'
    if kind == "kv":
        return cell + _text(x + CELL / 2, y + 17, "kv", "small", "middle")
    if kind == "now":
        cell += f'<circle class="paper" cx="{x + CELL / 2:g}" cy="{y + CELL / 2:g}" r="3"/>'
    if segment == len(SEGMENTS) - 1 and token == frame.wrong:
        cell += _text(x + CELL / 2, y + CELL + 12, "wrong", "small strong wrong", "middle")
    return cell


def _legend(parts: list[str], frames: list[Frame], y: int) -> int:
    shown = {
        frame.kind(segment, token)
        for frame in frames
        for segment in range(len(SEGMENTS))
        for token in range(frame.known)
    }
    y += 8
    for place, kind in enumerate(kind for kind in KINDS if kind in shown):
        x, row = MARGIN + 210 * (place % 2), y + 20 * (place // 2)
        parts.append(f'<rect class="{kind}" x="{x}" y="{row}" width="14" height="14" rx="3"/>')
        parts.append(_text(x + 22, row + 11, KINDS[kind], "small muted"))
    return y + 20 * ((len(shown) + 1) // 2) + 8


def _left(token: int) -> int:
    return LABELS + token * (CELL + GAP)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    letter = LETTER * (11 / 13 if "small" in style else 1)
    end = x + len(text) * letter / (2 if anchor == "middle" else 1)
    if end > WIDTH:
        raise SystemExit(f"{text!r} does not fit: it ends at {end:.0f} of {WIDTH}.")
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


DRAWINGS = {
    "ledges": ledges,
    "step": step,
    "strategies": strategies,
    "drafts": drafts,
    "fall_back": fall_back,
}


def main() -> None:
    folder = ROOT / "docs" / "drawings"
    folder.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(svg(name.replace("_", "-"), draw()))


if __name__ == "__main__":
    main()
