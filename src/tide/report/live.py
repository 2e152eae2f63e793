"""Gives text on the terminal, each token coloured by its depth as soon as it is settled."""

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
        engine: that generates; its `last_stats` says how deep each token went.
        tokenizer: its tokenizer.
        console: where to print. Without colours, early tokens carry their depth as a number.
    """

    def __init__(self, engine: TIDE, tokenizer: Any, console: Console) -> None:
        self.engine, self.console = engine, console
        self._pieces = Pieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        self._printed, self._prompt_is_next = 0, True

    def put(self, value: Tensor) -> None:
        """Print a token; `generate` hands out the prompt first, which is not printed."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        stats, at = self.engine.last_stats, self._printed
        shown = look(stats.depths[0][at], stats.n_layers, stats.sources[0][at])
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
    """What the colours mean, and what the answer took."""
    console.rule()
    for shown, count in trace.looks.items():
        sample = painted("  ", shown, console).append(
            f" {shown.name}: {count} tokens", Style.null()
        )
        console.print(sample)
    for line in trace.footer():
        console.print(line, highlight=False, soft_wrap=True)
    wrong = [(p.text, p.full) for p in trace.pieces if p.differs]
    if wrong:
        said = ", ".join(f"{full!r} for {text!r}" for text, full in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        line = f"Full depth would have said {said}{more}."
        console.print(line, highlight=False, markup=False, soft_wrap=True)
