"""Pictures of depth: colours, marks that work without colour, and drawings in SVG.

Knows no model and no tokenizer: only depths, and the number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# From shallow to deep. Lightness alone tells them apart, for readers who cannot see red or green.
_RAMP = ("#fde725", "#90d743", "#35b779", "#21918c", "#31688e")
DRAFTED = "#d5d0f0"
_DARK, _LIGHT = "#000000", "#ffffff"
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True)
class Look:
    """How a token is shown.

    Attributes:
        name: for the legend.
        mark: stands for the colour where colours are not available.
        background, foreground: colours; None at full depth, which is shown without colour.
    """

    name: str
    mark: str = ""
    background: str | None = None
    foreground: str | None = None


def look(depth: int, n_layers: int, draft_source: str | None = None) -> Look:
    """How to show a token that needed `depth` layers, and that `draft_source` drafted."""
    if depth < n_layers:
        background = colour(depth / n_layers)
        mark = str(depth).translate(_SUBSCRIPTS)
        return Look(f"exited after {depth} of {n_layers} layers", mark, background, ink(background))
    if draft_source is not None:
        return Look("drafted, then accepted in a shared pass", "ᐩ", DRAFTED, ink(DRAFTED))
    return Look(f"all {n_layers} layers")


def colour(share: float) -> str:
    """The colour of a depth, given as a share of the layers."""
    at = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    pairs = zip(_channels(_RAMP[low]), _channels(_RAMP[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def ink(background: str) -> str:
    """Black or white, whichever is easier to read on a background."""
    return max((_DARK, _LIGHT), key=lambda text: contrast(text, background))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as WCAG 2 defines it, from 1 to 21."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def depth_histogram(depths: Sequence[int], n_layers: int) -> str:
    """How many tokens needed each depth, as SVG."""
    counts = Counter(depths)
    bar, gap, most = 28, 8, max(counts.values(), default=1)
    bars = []
    for i, (depth, count) in enumerate(sorted(counts.items())):
        y, width = i * (bar + gap), 360 * count / most
        bars.append(
            f'<text x="78" y="{y + 19}" text-anchor="end">{depth} layers</text>'
            f'<rect x="86" y="{y}" width="{width:.1f}" height="{bar}" '
            f'fill="{colour(depth / n_layers)}"/>'
            f'<text x="{92 + width:.1f}" y="{y + 19}">{count} ({count / len(depths):.0%})</text>'
        )
    return _svg(540, len(counts) * (bar + gap), bars, "Tokens by the layers they needed")


def depth_map(depths: Sequence[int], n_layers: int, labels: Sequence[str] = ()) -> str:
    """Layers by token, as SVG: coloured those that ran before a token was emitted, others faint.

    Args:
        labels: of the tokens, shown on hover.
    """
    height, top, cell = 150, 4, 9
    bars = [
        f'<text x="34" y="{top + 10}" text-anchor="end">{n_layers}</text>'
        f'<text x="34" y="{top + height}" text-anchor="end">1</text>'
    ]
    for i, depth in enumerate(depths):
        x, tall = 40 + i * cell, height * depth / n_layers
        label = f"{labels[i]!r}: " if labels else ""
        bars.append(
            f"<g><title>{escape(f'token {i + 1}, {label}{depth} of {n_layers} layers')}</title>"
            f'<rect class="above" x="{x}" y="{top}" width="{cell - 1}" height="{height}"/>'
            f'<rect x="{x}" y="{top + height - tall:.1f}" width="{cell - 1}" height="{tall:.1f}" '
            f'fill="{colour(depth / n_layers)}"/></g>'
        )
    return _svg(44 + len(depths) * cell, height + 2 * top, bars, "Layers by token")


def legend(looks: Mapping[Look, int]) -> str:
    """What the colours of a text mean and how many tokens have each, as HTML."""
    total = sum(looks.values())
    entries = [
        f'<li><span class="token"{style(look)}>{look.mark or "&nbsp;"}</span> {escape(look.name)}: '
        f"{count} ({count / total:.0%})</li>"
        for look, count in looks.items()
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def style(look: Look) -> str:
    """The style attribute of an HTML element with this look; empty if it has no colour."""
    if look.background is None:
        return ""
    return f' style="background:{look.background};color:{look.foreground}"'


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="13" fill="currentColor">'
        f"<style>.above{{fill:#8883}}</style>{''.join(parts)}</svg>"
    )


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in _channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
