"""The picture at the top of the README: one answer as a grid of tokens and layers.

    python scripts/hero.py MODEL DIR     # let the model answer with the exits of DIR, then draw
    python scripts/hero.py               # draw what was recorded

`scripts/reproduce.sh depth_qwen2_5_coder_0_5b hero` calibrates the exits of a model of code, and
then calls this. The answer is recorded in bench/results/hero.json. Exits without drafts, so that
one token is one step, and the depths alone tell when a waiting token ran the layers above its exit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from html import escape
from typing import Any

from results import RESULTS, ROOT, read

sys.path.insert(0, str(ROOT / "src"))

PROMPT = "Write a Python function that returns the largest number in a list."
NEW_TOKENS = 44
WIDTH, LEFT, TOP = 440, 52, 58
CELL, LAYER, PER_STRIP = 16, 3.4, 22
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1b2733 } .muted { fill: #55636f }
.token { font: 10.5px ui-monospace, monospace } .differs { fill: #b3261e; font-weight: 600 }
.paper { fill: #f6f8fa } .own { fill: #0b5a7d } .later { fill: #d6e6ee; stroke: #3b82a6 }
.never { fill: none; stroke: #b6c2cc; stroke-dasharray: 2 3 }
.dot { fill: #3b82a6 } .along { stroke: #a8690f; stroke-width: 2.5; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0 } .muted { fill: #a3b0bc } .differs { fill: #ff9d94 }
  .paper { fill: #1d232d } .own { fill: #8fd0ee } .later { fill: #22323c; stroke: #5fa8cb }
  .never { stroke: #4b5866 } .dot { fill: #5fa8cb } .along { stroke: #e0a94a }
}
"""


def record(model_path: str, artifact: str) -> None:
    """Let the model answer, and store what each token needed."""
    from types import SimpleNamespace

    import tide
    from tide.cli.loading import conditions, load
    from tide.report.trace import Trace

    options = SimpleNamespace(model=model_path, dtype="float32", device=None, threads=None)
    model, tokenizer = load(options)  # type: ignore[arg-type]
    config = tide.TIDEConfig(mode="exit", drafts=(), exit_threshold=None)
    engine = tide.TIDE(model, artifact, config)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip
    out = engine.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
    trace = Trace.of(tokenizer, PROMPT, tokens, engine.last_stats)
    found = {
        "what": "one answer with exits, without drafts: the layers that each token needed",
        "conditions": {
            **conditions(model),
            "prompt": PROMPT,
            "new_tokens": NEW_TOKENS,
            "calibrated_on": engine.artifact.record["documents"],
        },
        "results": {
            "n_layers": engine.last_stats.n_layers,
            "exits": [checkpoint.layer + 1 for checkpoint in engine._machinery.exits.checkpoints],
            "tokens": [piece.text for piece in trace.pieces],
            "depths": [piece.depth for piece in trace.pieces],
            "differs": [piece.differs for piece in trace.pieces],
            "layers_run": engine.last_stats.layers_run,
            "layers_full": engine.last_stats.layers_full,
        },
    }
    (RESULTS / "hero.json").write_text(json.dumps(found, indent=1) + "\n")


def caught_up(depths: list[int], token: int, end: int) -> int | None:
    """The token in whose pass a token that exited ran the segment that ends at `end`."""
    later = range(token + 1, len(depths))
    return next((other for other in later if depths[other] >= end), None)


def draw(of: dict[str, Any]) -> str:
    """The grid, in strips; a legend below."""
    n_layers, depths = of["n_layers"], of["depths"]
    ends = [*of["exits"], n_layers]
    parts: list[str] = []
    tall = n_layers * LAYER + 4 * len(ends)
    top = TOP
    for first in range(0, len(depths), PER_STRIP):
        strip = range(first, min(first + PER_STRIP, len(depths)))
        parts += _labels(of, strip, top)
        y, low = top, 0
        for end in ends:
            height = (end - low) * LAYER
            parts.append(_text(LEFT - 6, y + height / 2 + 4, f"{low + 1}-{end}", "muted", "end"))
            parts += _segment(depths, strip, end, (y, height))
            y, low = y + height + 4, end
        top += tall + TOP + 6
    bottom = top - TOP + 8
    gaps = any(caught_up(depths, i, n_layers) is None for i, d in enumerate(depths) if d < n_layers)
    parts += _legend(bottom, gaps)
    height = bottom + 46
    told = f"{of['layers_run']} of {of['layers_full']} layer calls"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img">'
        f"<title>{len(depths)} tokens by layers: {told}</title><style>{STYLE}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="8"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _labels(of: dict[str, Any], strip: range, top: float) -> Iterator[str]:
    yield _text(LEFT - 6, top - 8, "layers", "muted", "end")
    for place, token in enumerate(strip):
        x = LEFT + place * CELL + CELL / 2 + 3
        shown = of["tokens"][token].strip(" ").replace("\n", "↵")[:8] or "␣"
        style = "token differs" if of["differs"][token] else "token"
        text = escape(shown + (" ≠" if of["differs"][token] else ""))
        yield (
            f'<text class="{style}" transform="translate({x:g} {top - 4:g}) rotate(-60)">{text}'
            "</text>"
        )


def _segment(
    depths: list[int], strip: range, end: int, where: tuple[float, float]
) -> Iterator[str]:
    y, height = where
    for place, token in enumerate(strip):
        x = LEFT + place * CELL
        box = f'x="{x}" y="{y:g}" width="{CELL - 3}" height="{height:g}" rx="2"'
        if depths[token] >= end:
            yield f'<rect class="own" {box}/>'
            waiting = [t for t in range(token) if caught_up(depths, t, end) == token]
            waiting = [t for t in waiting if depths[t] < end]
            if waiting:
                start = max(LEFT + (waiting[0] - strip.start) * CELL, LEFT)
                middle = y + height / 2
                yield f'<path class="along" d="M{start + 2} {middle:g}H{x + CELL - 5}"/>'
        elif caught_up(depths, token, end) is None:
            yield f'<rect class="never" {box}/>'
        else:
            yield f'<rect class="later" {box}/>'
            yield f'<circle class="dot" cx="{x + 7}" cy="{y + 4:g}" r="1.5"/>'


def _legend(y: float, gaps: bool) -> Iterator[str]:
    entries = (
        ("own", "ran for this token at once"), ("later", "ran later, in a shared pass"),
        ("along", "the shared pass"), *[("never", "not run: decoding stopped")] * gaps,
    )  # fmt: skip
    for number, (style, text) in enumerate(entries):
        x, top = 14 + 212 * (number % 2), y + 20 * (number // 2)
        if style == "along":
            yield f'<path class="along" d="M{x} {top + 6:g}h12"/>'
        else:
            yield f'<rect class="{style}" x="{x}" y="{top:g}" width="12" height="12" rx="2"/>'
        yield _text(x + 20, top + 10, text, "muted")


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("artifact", nargs="?")
    args = parser.parse_args()
    if args.model:
        record(args.model, args.artifact)
    (ROOT / "docs" / "drawings" / "hero.svg").write_text(draw(read("hero")["results"]))


if __name__ == "__main__":
    main()
