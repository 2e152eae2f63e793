"""Gives the charts of a benchmark, drawn with matplotlib. One function each, all from `Runs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tide.errors import MissingPackageError
from tide.picture import colour
from tide.report.runs import Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _THEIRS = colour(1.0), "#9a9a9a"


def peers(runs: Runs, axes: Axes) -> None:
    """Every way to decode beside the baseline."""
    names = [side["side"] for side in runs.sides]
    speeds = [side["speedup"] for side in runs.sides]
    spread = [
        [
            max(0.0, s["speedup"] - s["speedup_of_a_prompt"].get("p20", s["speedup"]))
            for s in runs.sides
        ],
        [
            max(0.0, s["speedup_of_a_prompt"].get("p80", s["speedup"]) - s["speedup"])
            for s in runs.sides
        ],
    ]
    colours = [_OURS if "layers_run" in side else _THEIRS for side in runs.sides]
    axes.barh(names, speeds, xerr=spread, color=colours, error_kw={"ecolor": "#555555"})
    axes.axvline(1, color="#555555", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over the first; lines: p20 to p80 of prompts")


def risk_speed(runs: Runs, axes: Axes) -> None:
    """Speed over the share of tokens that differ; certified points are stars."""
    curve = runs.curve
    at = [100 * side["disagreement"] for side in curve]
    axes.plot(at, [side["speedup"] for side in curve], "-", color=_THEIRS, zorder=1)
    axes.margins(x=0.12, y=0.15)
    for i, (x, side) in enumerate(zip(at, curve, strict=True)):
        certified = side["certificate"]
        axes.scatter(
            x, side["speedup"], s=130 if certified else 40, marker="*" if certified else "o",
            color="#c0392b" if certified else _OURS, zorder=2,
        )  # fmt: skip
        name = side["side"].removeprefix("exit, ")
        above_or_below = (4, 7 if i % 2 else -13)  # neighbours would write over each other
        axes.annotate(
            name, (x, side["speedup"]), above_or_below, textcoords="offset points", fontsize=8
        )
        if certified:  # how far the promise reaches
            reach = 100 * certified["risk"]
            axes.plot([x, reach], [side["speedup"]] * 2, ":", color="#c0392b", linewidth=1)
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set(
        xlabel="tokens that differ from full depth, %; stars: certified, dots up to the promise",
        ylabel="speed-up",
    )


def exits_per_layer(runs: Runs, axes: Axes) -> None:
    """Where tokens leave."""
    sides = [side for side in runs.ours if side["exits_per_layer"]]
    layers = sorted({int(layer) for side in sides for layer in side["exits_per_layer"]})
    width = 0.8 / max(1, len(sides))
    for i, side in enumerate(sides):
        rate = side["exit_rate"] / sum(side["exits_per_layer"].values())
        shares = [100 * rate * side["exits_per_layer"].get(str(layer), 0) for layer in layers]
        at = [k + (i - (len(sides) - 1) / 2) * width for k in range(len(layers))]
        tone = colour(i / max(1, len(sides) - 1))
        axes.bar(at, shares, width, label=side["side"], color=tone)
    axes.set_xticks(range(len(layers)), [f"after {layer + 1}" for layer in layers])
    axes.set(xlabel="layers", ylabel="tokens that leave, %")
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def depth_by_category(runs: Runs, axes: Axes) -> None:
    """Layer calls per token for each category of prompt."""
    sides = [side for side in runs.ours if side["mode"] != "off"]
    if any(side["certificate"] for side in sides):  # then the curve's other points only crowd
        sides = [s for s in sides if s["certificate"] or not s["drafts"] or s["mode"] == "lossless"]
    categories = sorted({c for side in sides for c in side["layer_calls_per_token"]})
    for i, side in enumerate(sides):
        calls = [side["layer_calls_per_token"][category] for category in categories]
        tone = colour(i / max(1, len(sides) - 1))
        axes.plot(calls, categories, "osD^vP*X"[i % 8], label=side["side"], color=tone)
    axes.invert_yaxis()
    axes.grid(axis="y", linewidth=0.4)
    axes.set_xlabel("layer calls per token, prompt included")
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def realised(runs: Runs, axes: Axes) -> None:
    """Speed reached, against what it would be if only layers cost time."""
    sides = runs.ours
    axes.scatter([s["limit"] for s in sides], [s["speedup"] for s in sides], color=_OURS)
    for side in sides:
        axes.annotate(
            side["side"], (side["limit"], side["speedup"]), (4, -9), textcoords="offset points",
            fontsize=8,
        )  # fmt: skip
    ends = [1.0, max(max(s["limit"], s["speedup"]) for s in sides)]
    axes.plot(ends, ends, color="#555555", linewidth=0.8)
    axes.set(xlabel="limit: layer calls of plain decoding / those made", ylabel="speed-up reached")


# Name -> (title, what draws it, whether there is anything to draw).
CHARTS: dict[str, tuple[str, Callable[[Runs, Axes], None], Callable[[Runs], Any]]] = {
    "peers": ("Side by side", peers, lambda runs: runs.sides),
    "risk_speed": ("Risk and speed", risk_speed, lambda runs: len(runs.curve) > 1),
    "exits_per_layer": (
        "Exits per layer", exits_per_layer,
        lambda runs: any(side["exits_per_layer"] for side in runs.ours),
    ),
    "depth_by_category": (
        "Depth by category of prompt", depth_by_category,
        lambda runs: len({c for s in runs.ours for c in s["layer_calls_per_token"]}) > 1,
    ),
    "realised": ("Speed against the limit", realised, lambda runs: runs.ours),
}  # fmt: skip


def figures(runs: Runs) -> dict[str, tuple[str, Figure]]:
    """Titles and figures of all charts for which the runs have figures."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "Charts need matplotlib. Install it with `pip install 'tide-llm[plot]'`."
        ) from error
    found = {}
    for name, (title, draw, is_there) in CHARTS.items():
        if is_there(runs):
            rows = len(runs.sides) if name == "peers" else 0
            figure = Figure(figsize=(7.2, max(4.2, 0.38 * rows)), layout="constrained")
            draw(runs, figure.subplots())
            found[name] = (title, figure)
    return found
