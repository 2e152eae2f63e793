"""Charts of the README and the docs, as SVG that is read in light and dark and without colour.

    python scripts/charts.py

Drawn from result files. What a chart shows is also in a table, and captions are in the pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import model_tables as models
from drawings import ROOT, STYLE
from headline_tables import Headline, headlines, short
from results import MODELS, read, times

WIDTH = 440
CHART_STYLE = (
    STYLE
    + """
.axis { stroke: #7a8792; fill: none } .grid { stroke: #7a8792; stroke-opacity: .3 }
.whisker { stroke: #1b2733; stroke-width: 1.5; fill: none } .hf { fill: #7fb2cb }
.hatch { stroke: #0b5a7d; stroke-width: 2 } .point { fill: #0b5a7d }
.star { fill: #b3261e } .box { stroke: #7a8792 }
.line { stroke: #a8690f; stroke-width: 2; stroke-dasharray: 6 3; fill: none }
@media (prefers-color-scheme: dark) {
  .whisker { stroke: #e6ebf0 } .hf { fill: #3a7592 } .hatch { stroke: #8fd0ee }
  .point { fill: #8fd0ee } .star { fill: #ff9d94 } .line { stroke: #e0a94a }
}
"""
)
HATCH = (
    '<defs><pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V6"/></pattern></defs>'
)


def bars() -> list[Headline]:
    """Seven of the headlines, but for large batches, those without a gain included."""
    chosen = [h for h in headlines() if h.batch < 8]
    assert len(chosen) == 7, chosen
    return chosen


def methods() -> str:
    """Speed-up over the fastest way without TIDE, with ranges."""
    left, right, tall, top = 14, WIDTH - 14, 48, 12
    most = max(h.high or h.speedup for h in bars())
    scale = (right - left - 40) / most
    parts = [HATCH]
    for i, of in enumerate(bars()):
        y = top + i * tall
        what = (
            f"{of.engine}, {of.model.removesuffix('-Instruct')}, {short(of.dtype)}, "
            f"batch {of.batch}: {of.method}"
        )
        parts.append(_text(left, y + 12, what, "small"))
        width = of.speedup * scale
        box = f'x="{left}" y="{y + 18}" width="{width:.1f}" height="18"'
        parts.append(f'<rect class="hf" {box}/>')
        if of.engine == "vLLM":
            parts.append(f'<rect fill="url(#h)" {box}/>')
        one, end = left + scale, left + width
        parts.append(f'<path class="axis" d="M{one:.1f} {y + 15}v24"/>')
        if of.low is not None and of.high is not None:
            low, high = left + of.low * scale, left + of.high * scale
            middle = y + 27
            parts.append(
                f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10'
                f'M{high:.1f} {middle - 5}v10"/>'
            )
            end = max(end, high)
        parts.append(_text(end + 6, y + 31, times(of.speedup), "strong"))
    bottom = top + len(bars()) * tall
    parts.append(
        _text(left + scale, bottom + 8, "1.00x: fastest without TIDE", "small muted", "middle")
    )
    told = "; ".join(
        f"{of.engine} batch {of.batch} {of.method} {times(of.speedup)}" for of in bars()
    )
    return _svg(bottom + 20, parts, told)


def tradeoff() -> str:
    """Speed-up over HF generate against disagreement, with p20 and p80 of prompts."""
    found = read("bench_smollm2")["results"]
    lossless = next(m["speedup"] for m in found if m["method"] == "lossless")
    points = [m for m in found if m.get("mode") == "exit" and m["drafts"]]
    # A certificate below the noise floor was forced, and is not shown.
    points = [m for m in points if not m["certificate"] or m["certificate"]["risk"] >= 0.02]
    left, right, top, bottom = 44, WIDTH - 16, 16, 250
    most_x = 100 * max(m["disagreement"] for m in points) * 1.08
    low_y, high_y = 0.8, 1.9

    def x_of(share: float) -> float:
        return left + 100 * share / most_x * (right - left)

    def y_of(speedup: float) -> float:
        return bottom - (speedup - low_y) / (high_y - low_y) * (bottom - top)

    parts = []
    for tick in (0.8, 1.0, 1.2, 1.4, 1.6, 1.8):
        y = y_of(tick)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        parts.append(_text(left - 6, y + 4, f"{tick:.1f}x", "small muted", "end"))
    for percent in range(0, int(most_x) + 1, 2):
        x = x_of(percent / 100)
        parts.append(_text(x, bottom + 16, f"{percent} %", "small muted", "middle"))
    y = y_of(lossless)
    parts.append(f'<path class="line" d="M{left} {y:.1f}H{right}"/>')
    parts.append(_text(x_of(0.1), y - 6, f"lossless {times(lossless)}", "small", "middle"))
    for of in points:
        x, y, spread = x_of(of["disagreement"]), y_of(of["speedup"]), of["per_prompt_speedup"]
        low, high = y_of(spread["p20"]), y_of(spread["p80"])
        parts.append(
            f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8'
            f'M{x - 4:.1f} {high:.1f}h8"/>'
        )
        if of["certificate"]:
            d = f"M{x:.1f} {y - 9:.1f}l8 9l-8 9l-8 -9z"
            parts.append(f'<path class="star" d="{d}"/>')
        else:
            parts.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    parts.append(_text((left + right) / 2, bottom + 34, "tokens that differ from full depth",
                       "small muted", "middle"))  # fmt: skip
    told = "; ".join(f"{m['method']} {times(m['speedup'])}" for m in points)
    return _svg(bottom + 46, parts, f"lossless {times(lossless)}; {told}")


def depth() -> str:
    """Tokens that full depth predicts already, against the share of the layers that ran."""
    found = [read(f"assess_{name}") for name in MODELS]
    left, right, top, bottom = 44, WIDTH - 16, 34, 268

    def x_of(share: float) -> float:
        return left + share * (right - left)

    def y_of(share: float) -> float:
        return bottom - share * (bottom - top)

    parts = [_text(4, 16, "tokens that full depth predicts already", "small muted")]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path class="grid" d="M{left} {y_of(tick):.1f}H{right}"/>')
        parts.append(_text(left - 6, y_of(tick) + 4, f"{100 * tick:.0f} %", "small muted", "end"))
        parts.append(_text(x_of(tick), bottom + 16, f"{100 * tick:.0f} %", "small muted",
                           "middle" if tick < 1 else "end"))  # fmt: skip
    told = []
    for k, of in enumerate(found):
        points = [(x_of((n + 1) / of["n_layers"]), y_of(share))
                  for n, share in enumerate(of["agreement"])]  # fmt: skip
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = ("none", "7 4", "2 3", "9 3 2 3")[k]
        style = f'class="axis" style="stroke-width:2;stroke-dasharray:{dashes}"'
        parts.append(f'<path {style} d="M{way}"/>')
        y = top + 16 + 18 * k
        name = of["conditions"]["model"].removesuffix("-Instruct")
        parts.append(f'<path {style} d="M{left + 10} {y - 4}h34"/>')
        parts.append(_text(left + 52, y, name, "small"))
        half = next(n + 1 for n, share in enumerate(of["agreement"]) if share >= 0.5)
        told.append(f"{name}: half of the tokens after {half} of {of['n_layers']} layers")
    parts.append(_text((left + right) / 2, bottom + 34, "layers that ran", "small muted",
                       "middle"))  # fmt: skip
    return _svg(bottom + 46, parts, "; ".join(told))


SHAPES = ("M{x} {y}m-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0", "M{x} {y}m-6 -6h12v12h-12z",
          "M{x} {y}m0 -8l8 14h-16z")  # fmt: skip


def sizes() -> str:
    """Depth saved by exits at three error rates, against the size of the model."""
    found = models.measured("depth_{}")
    shares = {
        f"{100 * float(risk):.0f} %": [
            max(at["depth_saved"] for at in of["exits"][risk]) for of in found.values()
        ]
        for risk in models.RISKS
    }
    title = "depth saved by exits, at an error rate of"
    told = "; ".join(
        f"{models.name(of)} {', '.join(f'{100 * some[k]:.1f} %' for some in shares.values())}"
        for k, of in enumerate(found.values())
    )
    names = {model: f"{models.MODELS[model][0]:,} M" for model in found}
    ticks = {n / 20: f"{5 * n} %" for n in range(20)}
    return _against_size(names, shares, ticks, title, f"depth saved at 1, 2 and 5 % error: {told}")


def modes() -> str:
    """Speed-up of each mode over the fastest way without TIDE, against the size of the model."""
    found = models.one_run_each()
    ways = {
        "lossless": "lossless", "exits alone": "exit without drafts",
        "both": "exit, threshold scale 1",
    }  # fmt: skip
    speeds = {
        label: [models.median(of, f"{way}, compiled") for of in found.values()]
        for label, way in ways.items()
    }
    told = "; ".join(
        f"{models.name(of)} {', '.join(times(some[k]) for some in speeds.values())}"
        for k, of in enumerate(found.values())
    )
    names = {
        model: f"{models.MODELS[model][0]:,} M\n{short(of['conditions']['dtype'])}"
        for model, of in found.items()
    }
    title = "speed-up over the fastest way without TIDE, batch 1"
    ticks = {n / 2: f"{n / 2:g}x" for n in range(8)}
    return _against_size(names, speeds, ticks, title, f"{', '.join(ways)}: {told}")


def _against_size(
    names: Mapping[str, str], values: Mapping[str, Sequence[float]], ticks: Mapping[float, str],
    title: str, told: str,
) -> str:  # fmt: skip
    """Points by the size of a model, with a shape for each kind of value.

    Args:
        names: of models, as they stand below their points, in one or more lines.
        values: by kind, one for each model.
        ticks: of the vertical axis, with their labels; those above all values are left out.
        title: stands above.
        told: the same in words.
    """
    left, right, top, bottom = 44, WIDTH - 16, 62, 262
    most = max(max(of) for of in values.values())
    low, high = (math.log(f(size for size, _ in models.MODELS.values())) for f in (min, max))

    def x_of(model: str) -> float:
        at = (math.log(models.MODELS[model][0]) - low) / (high - low)
        return left + 50 + at * (right - left - 110)

    def y_of(value: float) -> float:
        return bottom - value / most * (bottom - top)

    parts = [_text(4, 16, title, "small muted")]
    for tick, label in ticks.items():
        if tick <= most:
            parts.append(f'<path class="grid" d="M{left} {y_of(tick):.1f}H{right}"/>')
            parts.append(_text(left - 6, y_of(tick) + 4, label, "small muted", "end"))
    for (kind, of), shape, x in zip(values.items(), SHAPES, (60, 160, 260), strict=True):
        legend = shape.format(x=x, y=36)
        parts.append(f'<path class="point" d="{legend}"/>')
        parts.append(_text(x + 14, 40, kind, "small"))
        for model, value in zip(names, of, strict=True):
            place = shape.format(x=f"{x_of(model):.1f}", y=f"{y_of(value):.1f}")
            parts.append(f'<path class="point" d="{place}"/>')
    for model, name in names.items():
        for k, line in enumerate(name.split("\n")):
            parts.append(_text(x_of(model), bottom + 18 + 15 * k, line, "small muted", "middle"))
    under = bottom + 21 + 15 * max(len(name.split("\n")) for name in names.values())
    parts.append(_text((left + right) / 2, under, "parameters", "small muted", "middle"))
    return _svg(under + 12, parts, told)


# A part of a step -> how its box is filled; told apart without colour.
FILLS = {"layers": 'class="hf"', "head": 'fill="url(#h)" class="box"', "gates": 'class="star"',
         "host": 'class="box" fill="none"'}  # fmt: skip


def steps() -> str:
    """Milliseconds for each token by part, stacked."""
    found = read("step_costs")["results"]
    left, right, tall, top = 14, WIDTH - 14, 44, 34
    scale = (right - left - 56) / max(sum(of["ms_per_token"].values()) for of in found)
    parts, x = [HATCH], float(left)
    for name, fill in FILLS.items():
        parts.append(f'<rect {fill} x="{x:.1f}" y="12" width="14" height="12"/>')
        parts.append(_text(x + 20, 22, name, "small"))
        x += 84
    told = []
    for i, of in enumerate(found):
        y, x = top + i * tall, float(left)
        parts.append(_text(left, y + 14, of["method"], "small"))
        for name, fill in FILLS.items():
            width = of["ms_per_token"][name] * scale
            parts.append(f'<rect {fill} x="{x:.1f}" y="{y + 20}" width="{width:.1f}" height="16"/>')
            x += width
        whole = f"{sum(of['ms_per_token'].values()):.1f} ms"
        parts.append(_text(x + 6, y + 33, whole, "strong"))
        told.append(f"{of['method']} {whole}")
    return _svg(top + len(found) * tall + 10, parts, "; ".join(told))


def _svg(height: float, parts: list[str], told: str) -> str:
    return "\n".join(_lines(height, parts, told)) + "\n"


def _lines(height: float, parts: list[str], told: str) -> Iterator[str]:
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    yield f"<title>{escape(told)}</title><style>{CHART_STYLE}</style>"
    yield f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="8"/>'
    yield from parts
    yield "</svg>"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{style}">{escape(text)}</text>'


CHARTS = {
    "methods": methods, "tradeoff": tradeoff, "depth": depth, "sizes": sizes, "modes": modes,
    "steps": steps,
}  # fmt: skip


def main() -> None:
    folder = ROOT / "docs" / "charts"
    folder.mkdir(exist_ok=True)
    for name, draw in CHARTS.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
