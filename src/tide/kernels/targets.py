"""Compiling the kernels for GPUs that are not here, and what the code then needs of them.

What comes out is computed by the compiler, not measured.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tide.kernels import triton as fused
from tide.kernels.cases import Sizes, make_cases
from tide.kernels.launch import WARPS, Launch, recorded

# Name -> (backend, architecture, threads of a warp).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    **{f"sm_{n}": ("cuda", n, 32) for n in (70, 75, 80, 86, 89, 90, 100, 120)},
    **{name: ("hip", name, 64) for name in ("gfx90a", "gfx942")},
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A kernel, compiled.

    Attributes:
        kernel, dtype, target: which, of what, for what.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        spilled: bytes of a thread that did not fit into registers.
        size: bytes of the code.
    """

    kernel: str
    dtype: str
    target: str
    registers: int
    shared: int
    spilled: int
    size: int


def launches_of(dtype: torch.dtype, sizes: Sizes | None = None) -> list[tuple[str, Launch]]:
    """Every launch of every operation, with the operation's name; no tensor has memory."""
    found = []
    for case in make_cases(dtype, "meta", sizes or Sizes()):
        with recorded(run=False) as launches:
            getattr(fused, case.operation)(*case.arguments)
        found += [(case.operation, launch) for launch in launches]
    return found


def compile_all(dtypes: list[str], targets: list[str]) -> Iterator[Compiled]:
    """Compile every kernel as it would be launched, one by one."""
    for dtype in dtypes:
        for launch in {launch.name: launch for _, launch in launches_of(DTYPES[dtype])}.values():
            for target in targets:
                yield compile_one(launch, dtype, target)


def compile_one(launch: Launch, dtype: str, target: str) -> Compiled:
    """Compile a kernel for a target."""
    signature, constants, attributes = {}, {}, {}
    kernel = launch.kernel
    for place, name in enumerate(kernel.arg_names):
        value = launch.arguments[name]
        signature[name] = _type(name, value)
        if signature[name] == "constexpr":
            constants[name] = value
        elif isinstance(value, Tensor) or (
            type(value) is int and value % 16 == 0
        ):  # Triton compiles for that by itself
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": WARPS})
    backend = TARGETS[target][0]
    code = made.asm["cubin" if backend == "cuda" else "hsaco"]
    registers, spilled = (
        _cuda_registers(code) if backend == "cuda" else _hip_registers(made.asm["amdgcn"])
    )
    shared = int(made.metadata.shared)
    return Compiled(launch.name, dtype, target, registers, shared, spilled, len(code))


def _type(name: str, value: Any) -> str:
    if name.isupper() or value is None or (type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _cuda_registers(code: bytes) -> tuple[int, int]:
    """Registers and spilled bytes, as the tool that comes with Triton reads them."""
    tool = Path(inspect.getfile(triton)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", told), _number(r"STACK:(\d+)", told)


def _hip_registers(code: str) -> tuple[int, int]:
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", code)
    return _number(r"\.vgpr_count:\s*(\d+)", code), 4 * spilled


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"There is no {pattern} in what the compiler wrote: {text[:200]!r}")
    return int(found[1])
