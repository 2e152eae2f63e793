"""Live text on the terminal: each token appears in the colour of its depth once it is final."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

from tide.picture import Look, look
from tide.report.trace import Pieces, Trace

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from tide.engine import TIDE


class DepthStreamer:
    """A streamer for `generate` that prints tokens in the colour of their depth.

    Args:
        engine: generates the text; its `last_stats` has the depth of each token.
        tokenizer: its tokenizer.
        console: where to print. Without colours, exited tokens carry their depth as a number.
    """

    def __init__(self, engine: TIDE, tokenizer: Any, console: Console) -> None:
        self.engine, self.console = engine, console
        self._pieces = Pieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        self._printed, self._prompt_is_next = 0, True

    def put(self, value: Tensor) -> None:
        """Print a token; `generate` streams the prompt first, which is not printed."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        stats, at = self.engine.last_stats, self._printed
        shown = look(stats.depths[0][at], stats.n_layers, stats.draft_sources[0][at])
        self.console.print(painted(self._pieces.add(int(value)), shown, self.console), end="")
        self._printed += 1

    def end(self) -> None:
        """End the line."""
        self.console.print()


def painted(text: str, look: Look, console: Console) -> Text:
    """A piece of text as it is shown on a console."""
    if look.background is None or not text:
        return Text(text)
    if console.color_system is None or console.no_color:
        # A number would hide at the start of the next line.
        body = text.rstrip("\n")
        return Text(body + look.mark + text[len(body) :])
    return Text(text, Style(color=look.foreground, bgcolor=look.background, underline=True))


def print_legend(trace: Trace, console: Console) -> None:
    """Print what the colours mean and what the answer cost."""
    console.rule()
    colours = console.color_system is not None and not console.no_color
    if colours and trace.stats.exited_tokens:
        console.print("The brighter an exited token, the fewer layers it ran; others ran all.")
    for shown, count in trace.looks.items():
        sample = painted("  ", shown, console).append(
            f" {shown.name}: {count} token{'s' if count > 1 else ''}", Style.null()
        )
        console.print(sample)
    for line in trace.footer():
        console.print(line, highlight=False, soft_wrap=True)
    differ = [(n, piece) for n, piece in enumerate(trace.pieces, 1) if piece.differs]
    if differ:
        some = ", ".join(
            f"{piece.target_token!r} instead of {piece.text!r} (token {n})"
            for n, piece in differ[:5]
        )
        more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
        line = f"Full depth predicts {some}{more}."
        console.print(line, highlight=False, markup=False, soft_wrap=True)
