"""The drawing of docs/architecture.md: one token through the files.

python scripts/architecture_drawing.py
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from drawings import ROOT, STYLE

WIDTH, HEIGHT = 760, 560
BOX, TALL = 176, 58


class Box(NamedTuple):
    """A file: where it stands, its name and what happens there."""

    x: int
    y: int
    name: str
    text: str


BOXES = {
    "engine": Box(20, 20, "engine.py", "generate()"),
    "session": Box(290, 20, "decode/session.py", "one call"),
    "prefill": Box(560, 20, "decode/prefill.py", "prompts, first new token"),
    "drafter": Box(20, 130, "decode/drafter.py", "drafts, from sources.py"),
    "schedule": Box(290, 130, "decode/schedule.py", "the next pass"),
    "segments": Box(560, 130, "models/segments.py", "layers [lo, hi), then a gate"),
    "exits": Box(290, 240, "decode/exit_stage.py", "modes.py: draft, or commit"),
    "verify": Box(560, 240, "decode/verify.py", "commit, roll back, audit"),
    "output": Box(290, 350, "decode/output.py", "stream, return"),
    "batch": Box(
        20, 470, "decode/batch.py",
        "BatchState: tokens, waterlines, pending states, KV cache (models/cache.py)",
    ),
}  # fmt: skip
ARROWS = (
    ("engine", "session", ""),
    ("session", "prefill", "once"),
    ("session", "drafter", "loop.py: a step"),
    ("drafter", "schedule", ""),
    ("schedule", "segments", ""),
    ("segments", "exits", "at a checkpoint"),
    ("segments", "verify", "at full depth"),
    ("exits", "schedule", "deeper"),
    ("exits", "output", "no sequence goes deeper"),
    ("verify", "output", ""),
    ("output", "drafter", "next step"),
)


def _middle(box: Box) -> tuple[float, float]:
    return box.x + BOX / 2, box.y + TALL / 2


def _arrow(start: Box, end: Box, text: str) -> str:
    (x1, y1), (x2, y2) = _middle(start), _middle(end)
    if start.y == end.y:
        step = 1 if x2 > x1 else -1
        x1, x2 = x1 + step * BOX / 2, x2 - step * (BOX / 2 + 6)
    else:
        step = 1 if y2 > y1 else -1
        y1, y2 = y1 + step * TALL / 2, y2 - step * (TALL / 2 + 6)
    line = f'<path class="arrow" d="M{x1} {y1}L{x2} {y2}" marker-end="url(#head)"/>'
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    if not text:
        return line
    anchor, dx, dy = ("middle", 0, -8) if start.y == end.y else ("start", 8, 4)
    return (
        f'{line}<text class="small muted" x="{x + dx}" y="{y + dy}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _box(name: str, box: Box) -> str:
    width = WIDTH - 40 if name == "batch" else BOX
    return (
        f'<rect class="kv" x="{box.x}" y="{box.y}" width="{width}" height="{TALL}" rx="6"/>'
        f'<text class="strong" x="{box.x + 12}" y="{box.y + 24}">{escape(box.name)}</text>'
        f'<text class="small" x="{box.x + 12}" y="{box.y + 43}">{escape(box.text)}</text>'
    )


def main() -> None:
    parts = [_box(name, box) for name, box in BOXES.items()]
    parts += [_arrow(BOXES[a], BOXES[b], text) for a, b, text in ARROWS]
    note = "all of these read it; tokens, waterlines and pending states change by its methods only"
    parts.append(f'<text class="small muted" x="20" y="458">{note}</text>')
    style = STYLE + ".arrow { stroke: #55636f; fill: none } .head { fill: #55636f }"
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>'
    )
    (ROOT / "docs" / "drawings" / "architecture.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="One token through the files"><style>{style}</style><defs>{head}</defs>'
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
