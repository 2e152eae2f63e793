"""Gives progress bars with the time remaining, and the time and memory that each stage took."""

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

# Called with what is done and how much there is.
Tick = Callable[[int, int], None]


@contextmanager
def bars(quiet: bool) -> Iterator[Callable[[str], Tick]]:
    """Bars on stderr, one per name that is asked for."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, disable=quiet, console=Console(stderr=True)) as shown:

        def bar(name: str) -> Tick:
            task = shown.add_task(name, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield bar


@dataclass
class Stages:
    """What each stage took.

    Attributes:
        seconds: wall-clock time of each.
        peak_mb: most memory that the process had had by the end of each.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what runs inside."""
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 1)
        self.peak_mb[name] = peak_memory_mb()


def peak_memory_mb() -> int:
    """Most memory this process has had, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20 if sys.platform == "darwin" else 1 << 10)
