"""The decision tree of docs/choosing.md.

python scripts/choosing_drawing.py
"""

from __future__ import annotations

import textwrap
from html import escape

from drawings import ROOT, STYLE

WIDTH, QUESTION, ANSWER, STEP, TALL = 440, 226, 150, 84, 62
# Question -> what a yes leads to.
STEPS = (
    (
        "On a GPU: is there a trained draft head or a good small model for yours?",
        "EAGLE or a draft model",
    ),
    ("Do prompts or large batches take most of the time?", "vLLM as it is"),
    ("May no token differ from the full model?", "TIDE, lossless"),
    (
        "Do you have hundreds of prompts, and does `tide assess` show 1.1x or more?",
        "TIDE, exits: calibrate, certify, compare",
    ),
)
LAST = "TIDE, lossless"


def _box(style: str, at: tuple[int, int], width: int, text: str) -> str:
    x, y = at
    lines = textwrap.wrap(text, int((width - 16) / 6.2))
    first = y + TALL / 2 - 8 * (len(lines) - 1) + 4
    texts = "".join(
        f'<text class="small" x="{x + width / 2:g}" y="{first + 16 * i:g}" text-anchor="middle">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    radius = 6 if style == "none" else 20  # told apart by shape too
    return (
        f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{TALL}" rx="{radius}"/>'
        + texts
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text class="small muted" x="{x:g}" y="{y:g}">{text}</text>'


def main() -> None:
    parts, x, end = [], 14, WIDTH - 14 - ANSWER
    for i, (question, answer) in enumerate(STEPS):
        y, middle = 14 + i * STEP, 14 + i * STEP + TALL / 2
        parts += [
            _box("none", (x, y), QUESTION, question),
            _box("kv", (end, y), ANSWER, answer),
            f'<path class="arrow" d="M{x + QUESTION} {middle:g}H{end - 3}"/>',
            _label(x + QUESTION + 8, middle - 6, "yes"),
            f'<path class="arrow" d="M{x + QUESTION / 2:g} {y + TALL}V{y + STEP - 2}"/>',
            _label(x + QUESTION / 2 + 6, y + TALL + 15, "no"),
        ]
    parts.append(_box("kv", (x, 14 + len(STEPS) * STEP), QUESTION, LAST))
    height = 14 + len(STEPS) * STEP + TALL + 14
    style = STYLE + ".arrow { stroke: #7a8792; fill: none }"
    told = " ".join(f"{question} Yes: {answer}." for question, answer in STEPS)
    (ROOT / "docs" / "drawings" / "choosing.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(told)} Otherwise: {LAST}.</title>"
        f"<style>{style}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
