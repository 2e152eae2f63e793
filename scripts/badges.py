"""The badges of the README, drawn here so that no service has to be called.

python scripts/badges.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

BADGES = {
    "python": ("python", "3.10 and later"),
    "licence": ("licence", "Apache-2.0"),
    "status": ("status", "alpha"),
}
LETTER = 6.6  # width of an average letter at 11 px, rather too wide than too narrow


def badge(name: str, value: str) -> str:
    """Two boxes beside each other; white on dark, so that they are read on any page."""
    first, second = (round(len(text) * LETTER) + 12 for text in (name, value))
    text = 'y="14" font-family="system-ui, sans-serif" font-size="11" fill="#ffffff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{first + second}" height="20" role="img">'
        f"<title>{escape(name)}: {escape(value)}</title>"
        f'<rect width="{first + second}" height="20" rx="3" fill="#0b5a7d"/>'
        f'<rect width="{first}" height="20" rx="3" fill="#3d4954"/>'
        f'<text x="6" {text}>{escape(name)}</text>'
        f'<text x="{first + 6}" {text}>{escape(value)}</text></svg>\n'
    )


def main() -> None:
    folder = Path(__file__).parent.parent / "docs" / "badges"
    folder.mkdir(exist_ok=True)
    for name, texts in BADGES.items():
        (folder / f"{name}.svg").write_text(badge(*texts))


if __name__ == "__main__":
    main()
