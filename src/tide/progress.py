"""Progress bars with the time remaining, and the time and memory of each stage."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

# Called with the number of items done and their total.
Tick = Callable[[int, int], None]


@contextmanager
def bars(quiet: bool) -> Iterator[Callable[[str], Tick]]:
    """Bars on stderr, one for each name."""
    fields = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*fields, disable=quiet, console=Console(stderr=True)) as shown:

        def bar(name: str) -> Tick:
            task = shown.add_task(name, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield bar


@dataclass
class Stages:
    """Time and memory of each stage.

    Attributes:
        seconds: wall-clock time of each stage.
        peak_mb: peak memory of the process by the end of each stage.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the code that runs inside."""
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 1)
        self.peak_mb[name] = peak_memory_mb()


def peak_memory_mb() -> int:
    """Peak memory of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20 if sys.platform == "darwin" else 1 << 10)
