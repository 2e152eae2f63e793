"""Self-contained pages of an answer with its depths, and of a benchmark. They fetch nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from tide.picture import depth_histogram, depth_map, legend, style
from tide.report.runs import Runs
from tide.report.trace import Piece, Trace


def trace_page(trace: Trace) -> str:
    """An answer as a page: its text coloured by depth, tokens by depth, layers by token."""
    depths, n_layers = [piece.depth for piece in trace.pieces], trace.stats.n_layers
    labels = [piece.text for piece in trace.pieces]
    body = f"""
<h1>Tokens coloured by depth</h1>
<div class="prompt">{escape(trace.prompt)}</div>
<input type="checkbox" class="numbers" id="numbers"> <label for="numbers">Show the depth next
to each exited token</label>
<div class="text" lang="">{"".join(_token(trace, i) for i in range(len(trace.pieces)))}</div>
{legend(trace.looks)}
{"".join(f"<p>{escape(line)}</p>" for line in trace.footer())}
<h2>Tokens by depth</h2>
<div class="wide">{depth_histogram(depths, n_layers)}</div>
<h2>Layers by token</h2>
<p>Each bar is a token; its height is the number of layers that ran before the token was emitted.
Faint: layers that had not run by then.</p>
<div class="wide" tabindex="0">{depth_map(depths, n_layers, labels)}</div>
{conditions(trace.conditions)}
<div class="details" role="status">Point at a token, or tap it, to see its details.</div>
<script>{_part("page.js")}</script>"""
    return page("Tokens by depth", body)


def report_page(runs: Runs, charts: Mapping[str, tuple[str, str]]) -> str:
    """A benchmark as a page.

    Args:
        charts: titles and drawings, as SVG, by name.
    """
    drawn = "".join(
        f'<h2>{escape(title)}</h2><div class="fit">{svg}</div>' for title, svg in charts.values()
    )
    head = ("method", f"speed-up over {escape(runs.baseline)}",
            "per-prompt speed-up p20 / p50 / p80", "ideal speed-up", "exit rate",
            "disagreement (audited)", "certified bound")  # fmt: skip
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(method)) + "</tr>"
        for method in runs.methods
    )
    body = f"""
<h1>{escape(str(runs.conditions.get("model", "Benchmark")))}: speed and depth</h1>
<div class="wide" tabindex="0"><table>
<thead><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr></thead>
<tbody>{rows}</tbody></table></div>
{drawn}
{conditions(runs.conditions)}"""
    return page("Speed and depth", body)


def _cells(method: Mapping[str, Any]) -> list[str]:
    spread, ours = method["per_prompt_speedup"], "layers_run" in method
    certificate = method.get("certificate")
    return [
        method["method"],
        f"{method['speedup']:.2f}x",
        " / ".join(f"{spread[p]:.2f}" for p in ("p20", "p50", "p80")) if "p20" in spread else "",
        f"{method['ideal_speedup']:.2f}x" if ours else "",
        f"{method['exit_rate']:.1%}" if ours else "",
        f"{method['disagreement']:.2%}" if ours else "",
        f"{100 * certificate['risk']:g}%" if certificate else "",
    ]


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_part('page.css')}</style></head><body>{body}</body></html>\n"
    )


def conditions(under: Mapping[str, Any]) -> str:
    """The conditions of a measurement, as a paragraph."""
    listed = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in under.items())
    return f'<p class="conditions">{escape(listed)}</p>'


def _token(trace: Trace, at: int) -> str:
    piece = trace.pieces[at]
    look = trace.look(piece)
    number = f"<sub>{look.mark}</sub>" if look.mark else ""
    differs = " differs" if piece.differs else ""
    focus = 0 if at == 0 else -1  # one stop for the tab key; the arrow keys move on from there
    return (
        f'<span class="token{differs}" tabindex="{focus}"{style(look)} '
        f'data-details="{escape(_details(trace, at, piece))}">{escape(piece.text)}{number}</span>'
    )


def _details(trace: Trace, at: int, piece: Piece) -> str:
    parts = [f"Token {at + 1}, {piece.text!r}: {trace.look(piece).name}"]
    if piece.score is not None:
        parts.append(f"gate score {piece.score:.3f}")
    if piece.draft_source is not None:
        parts.append(f"draft source: {piece.draft_source}")
    if piece.depth < trace.stats.n_layers:
        if piece.target_token is None:
            parts.append("not audited")
        elif piece.differs:
            parts.append(f"full depth predicts {piece.target_token!r}")
        else:
            parts.append("full depth predicts the same")
    return "; ".join(parts) + "."


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
