"""The tables of the kernels: what the compiler computed, and the bytes that must move.

`scripts/tables.py` writes them into the pages; `tide kernels --target all --out
bench/results/kernels.json` compiles.
"""

from __future__ import annotations

import sys

from results import ROOT, read, table

sys.path[:0] = [str(ROOT / "src")]


def compiled(dtype: str) -> str:
    """Registers and shared memory of each kernel, by target."""
    found = [c for c in read("kernels")["compiled"] if c["dtype"] == dtype]
    targets = list(dict.fromkeys(c["target"] for c in found))
    rows = []
    for kernel in dict.fromkeys(c["kernel"] for c in found):
        of = {c["target"]: c for c in found if c["kernel"] == kernel}
        rows.append([f"`{kernel}`", *(_cell(of[target]) for target in targets)])
    versions = ", ".join(f"{name} {number}" for name, number in read("kernels")["versions"].items())
    note = f"*Computed by the compiler, not measured: {dtype}; {versions}.*"
    return f"{table(['kernel', *targets], rows)}\n\n{note}"


def _cell(made: dict[str, int]) -> str:
    spilled = f", {made['spilled']} spilled" if made["spilled"] else ""
    return f"{made['registers']}, {made['shared'] / 1024:.0f} KiB{spilled}"


def moved() -> str:
    """Bytes that each operation must move, whatever the kernel."""
    import torch

    from tide.kernels.cases import Sizes, make_cases

    dtypes = (torch.float32, torch.bfloat16)
    cases = [make_cases(dtype, "meta", Sizes()) for dtype in dtypes]
    rows = [
        [f"`{pair[0].operation}`", *(f"{case.moved:,}" for case in pair)]
        for pair in zip(*cases, strict=True)
    ]
    heads = ["operation", *(f"bytes, {str(dtype)[6:]}" for dtype in dtypes)]
    sizes = "; ".join(f"{n}: {v:,}" for n, v in vars(Sizes()).items())
    return f"{table(heads, rows)}\n\n*Computed, not measured: {sizes}.*"
