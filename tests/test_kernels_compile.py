"""Kernels compile for GPUs that are not here, and the choice between them and the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tide.errors import ConfigError, MissingPackageError
from tide.kernels import dispatch, reference
from tide.kernels.cases import OPERATIONS, TINY, make_cases

NEEDS_TRITON = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter compiles nothing"
)


# A second and a half for each kernel: TIDE_TEST_SWEEP=1 has every dtype for every target.
SOME = ("sm_80", "sm_90", "gfx942")


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kernel_compiles_for_every_target(dtype: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from tide.kernels.targets import DTYPES, TARGETS, compile_all, launches_of

    assert set(TARGETS) >= {"sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100",
                            "sm_120", "gfx90a", "gfx942"}  # fmt: skip
    whole = dtype == "bfloat16" or os.environ.get("TIDE_TEST_SWEEP")
    targets = list(TARGETS) if whole else [target for target in TARGETS if target in SOME]
    found = list(compile_all([dtype], targets))
    kernels = {launch.name for _, launch in launches_of(DTYPES[dtype])}
    assert len(kernels) == 9 and {operation for operation, _ in launches_of(DTYPES[dtype])} == set(
        OPERATIONS
    )
    assert {(c.kernel, c.target) for c in found} == {(k, t) for k in kernels for t in targets}
    for compiled in found:
        assert compiled.size > 1000 and 8 <= compiled.registers <= 512, compiled
        assert compiled.shared <= 48 * 1024, compiled  # what every GPU has without asking


@NEEDS_TRITON
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_a_single_token_compiles_too(target: str) -> None:
    """Triton makes other code where a size is 1, as it is in most steps."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tide.kernels.cases import Sizes
    from tide.kernels.targets import compile_one, launches_of

    launches = launches_of(torch.bfloat16, Sizes(tokens=1, sequences=1))
    assert any(launch.arguments.get("n") == 1 for _, launch in launches)
    for launch in {launch.name: launch for _, launch in launches}.values():
        assert compile_one(launch, "bfloat16", target).size > 1000


def test_what_is_wanted_by_name_loads_or_raises(monkeypatch: Any) -> None:
    cpu, dtype = torch.device("cpu"), torch.float32
    monkeypatch.delenv("TIDE_KERNELS", raising=False)
    assert dispatch.choose(cpu, dtype)[0] == "reference"
    monkeypatch.setenv("TIDE_KERNELS", "reference")
    assert dispatch.choose(cpu, dtype) == ("reference", "TIDE_KERNELS=reference")
    monkeypatch.setenv("TIDE_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="auto, triton, reference"):
        dispatch.choose(cpu, dtype)
    monkeypatch.setenv("TIDE_KERNELS", "triton")
    with pytest.raises(MissingPackageError, match="float64"):
        dispatch.choose(cpu, torch.float64)
    if not os.environ.get("TRITON_INTERPRET"):
        with pytest.raises(MissingPackageError, match=r"TRITON_INTERPRET|pip install"):
            dispatch.choose(cpu, dtype)
    monkeypatch.setattr(dispatch, "_missing", lambda: "triton cannot be imported")
    with pytest.raises(MissingPackageError, match="cannot be imported"):
        dispatch.choose(torch.device("cuda"), dtype)
    monkeypatch.setenv("TIDE_KERNELS", "auto")
    backend, reason = dispatch.choose(torch.device("cuda"), dtype)
    assert backend == "reference" and "cannot be imported" in reason


def test_a_gpu_gets_kernels_unless_it_is_too_old_or_the_product_too_large(monkeypatch: Any) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from tide.kernels import triton as fused

    monkeypatch.delenv("TIDE_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 3)
    backend, reason = dispatch.choose(device, torch.bfloat16)  # here nothing runs on it
    assert backend == "reference" and "a first kernel failed" in reason
    monkeypatch.setattr(dispatch, "_failing", lambda device: None)
    assert dispatch.choose(device, torch.bfloat16) == ("triton", "cuda, a GPU")

    class There:
        dtype = torch.bfloat16

        def __init__(self, n: int) -> None:
            self.n, self.device = n, device

        def __len__(self) -> int:
            return self.n

    few, many = There(dispatch.MOST_TOKENS), There(dispatch.MOST_TOKENS + 1)
    assert dispatch.implementation("top_token", few) is fused.top_token
    assert dispatch.implementation("top_token", many) is reference.top_token
    assert dispatch.implementation("append_kv", many) is fused.append_kv
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    dispatch._too_old.cache_clear()
    backend, reason = dispatch.choose(device, torch.bfloat16)
    assert backend == "reference" and "(6, 1)" in reason
    dispatch._too_old.cache_clear()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators_run_the_reference_without_triton(operation: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("TIDE_KERNELS", "reference")
    case = {c.operation: c for c in make_cases(torch.float32, "cpu", TINY)}[operation]
    flat: list[Any] = []
    for argument in case.copied():
        flat += argument if hasattr(argument, "_fields") else [argument]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        getattr(torch.ops.tide, operation).default, tuple(flat), test_utils=checks
    )
