"""Drawings of how waterlines work, for docs/waterlines.md, made with the library's own waterlines.

    python scripts/drawings.py

Each drawing stacks frames; a frame shows segments from the first layers down, tokens from
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

from tide.decode.waterlines import Waterlines  # noqa: E402

WIDTH, MARGIN, LABELS = 440, 14, 96
CELL, GAP, LINE = 26, 4, 18
LETTER = 6.9  # width of an average letter of the text at 13 px, rather too wide than too narrow
SEGMENTS = ("layers 0-7", "layers 8-15", "layers 16-31")
# What a cell shows, which is also its CSS class -> its text in the legend.
CELLS = {
    "now": "runs in this pass",
    "done": "ran in an earlier pass",
    "pending": "pending before the segment",
    "kv": "KV only",
    "none": "not run yet",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b2733 }
.small { font-size: 11px } .muted { fill: #55636f } .strong { font-weight: 600 }
.paper { fill: #f6f8fa } .rejected { fill: #b3261e } .oncell { fill: #ffffff; font-size: 11px }
.now { fill: #0b5a7d } .done { fill: #7fb2cb } .none { fill: none; stroke: #b6c2cc }
.pending { fill: #fbe9c6; stroke: #a8690f; stroke-dasharray: 4 2 }
.kv { fill: #d6e6ee; stroke: #3b82a6 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0 } .muted { fill: #a3b0bc } .paper { fill: #1d232d }
  .rejected { fill: #ff9d94 } .oncell { fill: #0d1319 }
  .now { fill: #8fd0ee } .done { fill: #3a7592 } .none { stroke: #4b5866 }
  .pending { fill: #4d3a10; stroke: #e0a94a } .kv { fill: #22323c; stroke: #5fa8cb }
}
"""


@dataclass
class Frame:
    """One picture of the waterlines.

    Attributes:
        text: what happens.
        after: tokens that have passed each segment now.
        before: the same before this pass.
        known: number of tokens so far.
        kv: tokens that stored only their KV, by segment.
        drafts: draft tokens.
        rejected: the draft token that full depth rejects.
    """

    text: str
    after: list[int]
    before: list[int]
    known: int
    kv: dict[int, set[int]] = field(default_factory=dict)
    drafts: set[int] = field(default_factory=set)
    rejected: int | None = None

    def cell(self, segment: int, token: int) -> str:
        """What a cell shows, one of `CELLS`."""
        if token in self.kv.get(segment, ()):
            return "kv"
        if token < self.after[segment]:
            return "now" if token >= self.before[segment] else "done"
        return "pending" if segment and token < self.after[segment - 1] else "none"


class Story:
    """The waterlines of one sequence, and what they were in the last frame."""

    def __init__(self, *passed: int) -> None:
        self.lines = Waterlines(1, len(passed), 16)
        for segment, count in enumerate(passed):
            self.lines.advance(segment, [count])
        self.last = list(passed)
        self.kv: dict[int, set[int]] = {}

    def run(self, *segments: int, known: int) -> None:
        """Run segments on all tokens that wait before them."""
        for segment in segments:
            self.lines.advance(segment, [len(self.lines.waiting(0, segment, known))])

    def fill(self, *segments: int) -> None:
        """Store only KV, for all tokens that wait."""
        for segment in segments:
            waiting = self.lines.waiting(0, segment, 0)
            self.kv.setdefault(segment, set()).update(waiting)
            self.lines.advance(segment, [len(waiting)])

    def frame(
        self, text: str, known: int, drafts: range = range(0), rejected: int | None = None
    ) -> Frame:
        """A picture of what has changed since the last."""
        before, self.last = self.last, list(self.lines.passed[0])
        kv = {segment: set(tokens) for segment, tokens in self.kv.items()}
        return Frame(text, list(self.last), before, known, kv, set(drafts), rejected)


def pending() -> list[Frame]:
    """Waterlines, and the tokens that are pending between them."""
    story = Story(8, 5, 3)
    return [story.frame(
        "Eight tokens have passed the first segment, five the second, three the third. Tokens 5, 6 "
        "and 7 are pending before the second segment, tokens 3 and 4 before the third.", 8,
    )]  # fmt: skip


def step() -> list[Frame]:
    """Two decode steps: in one a token exits, in the other one reaches full depth."""
    story, frames = Story(6, 4, 4), []
    story.run(0, known=7)
    frames.append(story.frame(
        "Token 6 runs through the first segment alone. The gate lets it exit: its exit head "
        "predicts token 7, and 6 is pending beside 4 and 5.", 7,
    ))  # fmt: skip
    story.run(0, known=8)
    frames.append(story.frame(
        "Token 7 runs through the first segment. The gate does not let it exit, so it "
        "continues.", 8,
    ))  # fmt: skip
    story.run(1, known=8)
    frames.append(story.frame(
        "The second segment runs on all pending tokens, 4 to 7, in one pass. Token 7 continues "
        "again.", 8,
    ))  # fmt: skip
    story.run(2, known=8)
    frames.append(story.frame(
        "The third segment runs on them too. Full depth predicts token 8. Its predictions after 4, "
        "5 and 6 are compared with those of their exit heads.", 8,
    ))  # fmt: skip
    return frames


def strategies() -> list[Frame]:
    """The KV of an exited token: deferred, and propagate."""
    deferred, propagate = Story(6, 5, 5), Story(6, 5, 5)
    deferred.run(0, known=7)
    first = deferred.frame(
        "deferred: tokens 5 and 6 exited after the first segment and are pending. The next deep "
        "pass computes the same KV for them as the full model.", 7,
    )  # fmt: skip
    propagate.fill(1, 2)
    propagate.run(0, known=7)
    propagate.fill(1, 2)
    second = propagate.frame(
        "propagate: the later segments store the KV of 5 and 6 at once, computed from the states "
        "at which they exited. They never run deeper, and no later pass checks them.", 7,
    )  # fmt: skip
    return [first, second]


def drafts() -> list[Frame]:
    """Draft tokens that run through all segments in one pass."""
    story = Story(3, 3, 3)
    story.run(0, 1, 2, known=7)
    return [story.frame(
        "Token 3 is committed. Tokens 4, 5 and 6 are drafts, from the text so far or from the "
        "table. One pass takes all four to full depth, which predicts the token after each: 4 and "
        "5 are accepted, 6 is rejected.", 7, range(4, 7), rejected=6,
    )]  # fmt: skip


def rollback() -> list[Frame]:
    """What happens after a draft token is rejected."""
    story = Story(7, 7, 7)
    story.lines.rollback(0, 6)
    frames = [story.frame(
        "Waterlines, pending states and the KV cache roll back to 6 tokens. The full model's own "
        "token replaces the rejected draft; it has not run yet.", 7,
    )]  # fmt: skip
    story.run(0, 1, 2, known=7)
    frames.append(story.frame("The next pass starts with it.", 7))
    return frames


def svg(name: str, frames: list[Frame]) -> str:
    """Frames below each other, and a legend of what they show."""
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
        name = f"{token}?" if token in frame.drafts else str(token)
        parts.append(_text(_x_of(token) + CELL / 2, y + 10, name, "small muted", "middle"))
    y += 16
    for segment, label in enumerate(SEGMENTS):
        parts.append(_text(MARGIN, y + 17, label, "small"))
        for token in range(frame.known):
            parts.append(_cell(frame, segment, token, y))
        note = f"waterline {frame.after[segment]}"
        parts.append(_text(_x_of(8) + 6, y + 17, note, "small muted"))
        y += CELL + GAP
    return y


def _cell(frame: Frame, segment: int, token: int, y: int) -> str:
    shows, x = frame.cell(segment, token), _x_of(token)
    cell = f'<rect class="{shows}" x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4"/>'
    if shows == "kv":
        return cell + _text(x + CELL / 2, y + 17, "kv", "small", "middle")
    if shows == "now":
        cell += f'<circle class="paper" cx="{x + CELL / 2:g}" cy="{y + CELL / 2:g}" r="3"/>'
    if segment == len(SEGMENTS) - 1 and token == frame.rejected:
        cell += _text(x + CELL / 2, y + CELL + 12, "rejected", "small strong rejected", "middle")
    return cell


def _legend(parts: list[str], frames: list[Frame], y: int) -> int:
    shown = {
        frame.cell(segment, token)
        for frame in frames
        for segment in range(len(SEGMENTS))
        for token in range(frame.known)
    }
    y += 8
    for number, cell in enumerate(cell for cell in CELLS if cell in shown):
        x, top = MARGIN + 210 * (number % 2), y + 20 * (number // 2)
        parts.append(f'<rect class="{cell}" x="{x}" y="{top}" width="14" height="14" rx="3"/>')
        parts.append(_text(x + 22, top + 11, CELLS[cell], "small muted"))
    return y + 20 * ((len(shown) + 1) // 2) + 8


def _x_of(token: int) -> int:
    return LABELS + token * (CELL + GAP)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    letter = LETTER * (11 / 13 if "small" in style else 1)
    end = x + len(text) * letter / (2 if anchor == "middle" else 1)
    if end > WIDTH:
        raise SystemExit(f"{text!r} does not fit: it ends at {end:.0f} of {WIDTH}.")
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


DRAWINGS = {
    "pending": pending,
    "step": step,
    "strategies": strategies,
    "drafts": drafts,
    "rollback": rollback,
}


def main() -> None:
    folder = ROOT / "docs" / "drawings"
    folder.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(svg(name, draw()))


if __name__ == "__main__":
    main()
