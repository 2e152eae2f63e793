"""Result files of the benchmarks, and how their numbers are written in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
MODELS = ("smollm2", "gemma3_270m", "qwen2_5_coder_0_5b")


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(of: dict[str, Any]) -> str:
    """One line in small print under a table."""
    parts = [f"{name.replace('_', ' ')}: {value}" for name, value in of.items()]
    return f"\n\n*{'; '.join(parts)}.*"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def times(speedup: float) -> str:
    return f"{speedup:.2f}x"
