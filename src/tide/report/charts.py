"""The charts of a benchmark, drawn with matplotlib. One function each, all from `Runs`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tide.errors import MissingPackageError
from tide.picture import colour
from tide.report.runs import Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _THEIRS, _CERTIFIED, _LINES = colour(1.0), "#9a9a9a", "#c0392b", "#555555"


def peers(runs: Runs, axes: Axes) -> None:
    """The speed-up of every method over the baseline."""
    methods = runs.methods
    names = [_label(method["method"]) for method in methods]
    speeds = [method["speedup"] for method in methods]
    spread = [
        [
            max(0.0, m["speedup"] - m["per_prompt_speedup"].get("p20", m["speedup"]))
            for m in methods
        ],
        [
            max(0.0, m["per_prompt_speedup"].get("p80", m["speedup"]) - m["speedup"])
            for m in methods
        ],
    ]
    colours = [_OURS if "layers_run" in method else _THEIRS for method in methods]
    axes.barh(names, speeds, xerr=spread, color=colours, error_kw={"ecolor": _LINES})
    axes.axvline(1, color=_LINES, linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"speed-up over {_label(runs.baseline)}; lines: per-prompt speed-up, p20 to p80"
    )


def risk_speed(runs: Runs, axes: Axes) -> None:
    """Speed-up over disagreement; certified methods are stars."""
    curve = runs.curve
    at = [100 * method["disagreement"] for method in curve]
    axes.plot(at, [method["speedup"] for method in curve], "-", color=_THEIRS, zorder=1)
    axes.margins(x=0.12, y=0.15)
    for i, (x, method) in enumerate(zip(at, curve, strict=True)):
        certified = method["certificate"]
        axes.scatter(
            x, method["speedup"], s=130 if certified else 40, marker="*" if certified else "o",
            color=_CERTIFIED if certified else _OURS, zorder=2,
        )  # fmt: skip
        name = _label(method["method"].removeprefix("exit, ").removeprefix("threshold "))
        above_or_below = (4, 7 if i % 2 else -13)  # or the names of neighbours would overlap
        axes.annotate(
            name, (x, method["speedup"]), above_or_below, textcoords="offset points", fontsize=8
        )
        if certified:
            bound = 100 * certified["risk"]
            axes.plot([x, bound], [method["speedup"]] * 2, ":", color=_CERTIFIED, linewidth=1)
    axes.axhline(1, color=_LINES, linewidth=0.8)
    axes.set(
        xlabel="disagreement (audited), % of tokens; stars: certified, dotted: up to the bound",
        ylabel="speed-up",
    )


def exits_per_layer(runs: Runs, axes: Axes) -> None:
    """Where tokens exit."""
    methods = [method for method in runs.ours if method["exits_per_layer"]]
    layers = sorted({int(layer) for method in methods for layer in method["exits_per_layer"]})
    width = 0.8 / max(1, len(methods))
    for i, method in enumerate(methods):
        rate = method["exit_rate"] / sum(method["exits_per_layer"].values())
        shares = [100 * rate * method["exits_per_layer"].get(str(layer), 0) for layer in layers]
        at = [k + (i - (len(methods) - 1) / 2) * width for k in range(len(layers))]
        tone = colour(i / max(1, len(methods) - 1))
        axes.bar(at, shares, width, label=_label(method["method"]), color=tone)
    axes.set_xticks(range(len(layers)), [f"after {layer + 1}" for layer in layers])
    axes.set(xlabel="layers", ylabel="exit rate, % of tokens")
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def depth_by_category(runs: Runs, axes: Axes) -> None:
    """Layer calls per token for each category of prompt."""
    methods = [method for method in runs.ours if method["mode"] != "off"]
    if any(method["certificate"] for method in methods):  # the other points would only crowd it
        methods = [
            method
            for method in methods
            if method["certificate"] or not method["drafts"] or method["mode"] == "lossless"
        ]
    categories = sorted({c for method in methods for c in method["layer_calls_per_token"]})
    for i, method in enumerate(methods):
        per_token = method["layer_calls_per_token"]
        calls = [per_token.get(category, math.nan) for category in categories]
        tone = colour(i / max(1, len(methods) - 1))
        axes.plot(
            calls,
            [_label(category) for category in categories],
            "osD^vP*X"[i % 8],
            label=_label(method["method"]),
            color=tone,
        )
    axes.invert_yaxis()
    axes.grid(axis="y", linewidth=0.4)
    axes.set_xlabel("layer calls per token, prompt included")
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def realised(runs: Runs, axes: Axes) -> None:
    """Speed-up against the ideal speed-up, which counts layers only."""
    methods = runs.ours
    ideal, speeds = [m["ideal_speedup"] for m in methods], [m["speedup"] for m in methods]
    axes.scatter(ideal, speeds, color=_OURS)
    for method, x, y in zip(methods, ideal, speeds, strict=True):
        axes.annotate(
            _label(method["method"]), (x, y), (4, -9), textcoords="offset points", fontsize=8
        )
    ends = [1.0, max(*ideal, *speeds)]
    axes.plot(ends, ends, color=_LINES, linewidth=0.8)
    axes.set(xlabel="ideal speed-up: layer calls at full depth / layer calls made",
             ylabel="speed-up")  # fmt: skip


def _label(name: str) -> str:
    """A name as matplotlib shows it as it is: between dollars it would read formulas."""
    return name.replace("$", r"\$")


# Name -> (title, what draws it, whether there is anything to draw).
CHARTS: dict[str, tuple[str, Callable[[Runs, Axes], None], Callable[[Runs], Any]]] = {
    "peers": ("Speed-up by method", peers, lambda runs: runs.methods),
    "risk_speed": ("Risk and speed", risk_speed, lambda runs: len(runs.curve) > 1),
    "exits_per_layer": (
        "Exits per layer", exits_per_layer,
        lambda runs: any(method["exits_per_layer"] for method in runs.ours),
    ),
    "depth_by_category": (
        "Depth by category of prompt", depth_by_category,
        lambda runs: len({c for m in runs.ours for c in m["layer_calls_per_token"]}) > 1,
    ),
    "realised": ("Speed-up and ideal speed-up", realised, lambda runs: runs.ours),
}  # fmt: skip


def figures(runs: Runs) -> dict[str, tuple[str, Figure]]:
    """Titles and figures of all charts for which the runs have data."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "Charts need matplotlib. Install it with `pip install 'tide-llm[plot]'`."
        ) from error
    found = {}
    for name, (title, draw, is_there) in CHARTS.items():
        if is_there(runs):
            bars = len(runs.methods) if name == "peers" else 0
            figure = Figure(figsize=(7.2, max(4.2, 0.38 * bars)), layout="constrained")
            draw(runs, figure.subplots())
            found[name] = (title, figure)
    return found
