"""Gives self-contained pages: an answer with its depths, a benchmark. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from tide.picture import depth_histogram, depth_map, legend, style
from tide.report.runs import Runs
from tide.report.trace import Piece, Trace


def trace_page(trace: Trace) -> str:
    """An answer as a page: its text coloured by depth, who left where, layers by token."""
    depths, n_layers = [piece.depth for piece in trace.pieces], trace.stats.n_layers
    labels = [piece.text for piece in trace.pieces]
    body = f"""
<h1>Tokens by the depth they needed</h1>
<div class="prompt">{escape(trace.prompt)}</div>
<input type="checkbox" class="numbers" id="numbers"> <label for="numbers">Write the depth beside
each token that left early</label>
<div class="text" lang="">{"".join(_token(trace, i) for i in range(len(trace.pieces)))}</div>
{legend(trace.looks)}
{"".join(f"<p>{escape(line)}</p>" for line in trace.footer())}
<h2>Tokens by depth</h2>
<div class="wide">{depth_histogram(depths, n_layers)}</div>
<h2>Layers by token</h2>
<p>Each column is a token; its height is the layers that ran before it was said. Faint: layers
that had not run by then.</p>
<div class="wide" tabindex="0">{depth_map(depths, n_layers, labels)}</div>
{conditions(trace.conditions)}
<div class="details" role="status">Point at a token, or tap it, to see its depth.</div>
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
    head = ("side", "speed-up", "p20 to p80", "limit", "leave early", "differ", "promised")
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(side)) + "</tr>"
        for side in runs.sides
    )
    body = f"""
<h1>{escape(str(runs.conditions.get("model", "Benchmark")))}: speed and depth</h1>
<div class="wide" tabindex="0"><table>
<thead><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr></thead>
<tbody>{rows}</tbody></table></div>
{drawn}
{conditions(runs.conditions)}"""
    return page("Speed and depth", body)


def _cells(side: Mapping[str, Any]) -> list[str]:
    spread, ours = side["speedup_of_a_prompt"], "layers_run" in side
    certificate = side.get("certificate")
    return [
        side["side"],
        f"{side['speedup']:.2f}x",
        f"{spread['p20']:.2f} to {spread['p80']:.2f}" if "p20" in spread else "",
        f"{side['limit']:.2f}x" if ours else "",
        f"{side['exit_rate']:.1%}" if ours else "",
        f"{side['disagreement']:.2%}" if ours else "",
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
    """The conditions of a figure, as a paragraph."""
    said = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in under.items())
    return f'<p class="conditions">{escape(said)}</p>'


def _token(trace: Trace, at: int) -> str:
    piece = trace.pieces[at]
    look = trace.look(piece)
    number = f"<sub>{look.mark}</sub>" if look.mark else ""
    differs = " differs" if piece.differs else ""
    focus = 0 if at == 0 else -1  # one stop for the tab key; the arrows go on from there
    return (
        f'<span class="token{differs}" tabindex="{focus}"{style(look)} '
        f'data-says="{escape(_says(trace, at, piece))}">{escape(piece.text)}{number}</span>'
    )


def _says(trace: Trace, at: int, piece: Piece) -> str:
    parts = [f"Token {at + 1}, {piece.text!r}: {trace.look(piece).name}"]
    if piece.score is not None:
        parts.append(f"the gate gave it {piece.score:.3f}")
    if piece.source is not None:
        parts.append(f"guessed by {piece.source}")
    if piece.depth < trace.stats.n_layers:
        if piece.full is None:
            parts.append("full depth was not asked")
        else:
            parts.append(
                f"full depth says {piece.full!r}" if piece.differs else "full depth says the same"
            )
    return "; ".join(parts) + "."


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
