"""The tables of the docs on draft trees: what was counted, and what it would give on a GPU."""

from __future__ import annotations

import re

from results import conditions, percent, read, table, times

# Bytes a second and bf16 operations a second, from NVIDIA's data sheets (A100 80GB SXM, H100 SXM).
GPUS = {"A100": (2.039e12, 312e12), "H100": (3.35e12, 989e12)}
# Parameters; all are read in every pass.
MODELS = {"8B": 8e9, "70B on 8 GPUs": 70e9 / 8}


def tokens_per_pass(name: str) -> str:
    found = read(name)
    rows = found["results"]["methods"]
    categories = list(rows[0]["by_category"])
    lines = [
        (row["method"], f"{row['tokens_per_pass']:.2f}",
         *(f"{row['by_category'][c]:.2f}" for c in categories),
         row["exact_match_outputs"], row.get("host_ms_per_step", ""),
         percent(row["host_share"]) if "host_share" in row else "")
        for row in rows
    ]  # fmt: skip
    tasks = [category.replace("_", " ") for category in categories]
    head = (
        "drafts",
        "tokens per pass",
        *tasks,
        "same text as HF",
        "host, ms a step",
        "of the time",
    )
    return table(head, lines) + conditions(found["conditions"])


def computed() -> str:
    """Tokens per pass over what a pass of so many tokens costs more than one of a single token."""
    found = {row["method"]: row for row in read("trees")["results"]["methods"]}
    nodes = {name: re.search(r"(\d+) nodes", name) for name in found}
    sizes = {"chain": 11, **{name: 1 + int(n[1]) for name, n in nodes.items() if n}}
    lines = []
    for name, tokens in sizes.items():
        cells = []
        for size in MODELS.values():
            for bandwidth, operations in GPUS.values():
                one, several = (
                    max(2 * size / bandwidth, 2 * size * n / operations) for n in (1, tokens)
                )
                cells.append(times(found[name]["tokens_per_pass"] * one / several))
        lines.append((name, *cells))
    head = ("drafts", *(f"{model}, {gpu}" for model in MODELS for gpu in GPUS))
    return table(head, lines)
