"""The command `tide kernels`: what runs here and why, what compiles, what is right, how fast."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--check", action="store_true",
        help="run every operation that can run here, and compare it with the reference",
    )  # fmt: skip
    parser.add_argument(
        "--target", action="append", metavar="NAME", default=[],
        help="compile every kernel for a GPU, such as sm_90 or gfx942, or for all; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--time", action="store_true", help="on a GPU: time, and bandwidth against bytes to move"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write the result as JSON here (default: nowhere)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print a table of each thing that is wanted."""
    import json

    import torch

    from tide.kernels.cases import OPERATIONS
    from tide.kernels.dispatch import DTYPES, choose

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = [dtype for dtype in DTYPES if dtype.is_floating_point]
    result: dict[str, Any] = {"device": str(device), "choices": [], "versions": _versions()}
    for dtype in dtypes:
        backend, reason = choose(device, dtype)
        found = {"dtype": str(dtype)[6:], "backend": backend, "reason": reason}
        result["choices"].append(found)
    _table([[*c.values()] for c in result["choices"]], ["dtype", "runs", "because"])
    print(f"operations: {', '.join(OPERATIONS)}")
    if args.check:
        result["checks"] = [c for dtype in dtypes for c in _check(device, dtype)]
        _table([[*c.values()] for c in result["checks"]], list(result["checks"][0]))
    if args.target:
        result["compiled"] = _compile(args.target)
        _table([[*c.values()] for c in result["compiled"]], list(result["compiled"][0]))
    if args.time:
        result["times"] = [t for dtype in dtypes for t in _time(device, dtype)]
        _table([[*t.values()] for t in result["times"]], list(result["times"][0]))
    if args.out:
        from tide.exits.files import write_whole

        write_whole(args.out, lambda path: path.write_text(json.dumps(result, indent=1) + "\n"))
    off = [c for c in result.get("checks", ()) if not c["error"] <= c["allowed"]]
    for check in off:
        print(
            f"{check['operation']} in {check['dtype']} is off by {check['error']:.3g}; at most "
            f"{check['allowed']:.3g} is allowed. Set TIDE_KERNELS=reference, and report what "
            "`tide kernels --check --json` prints."
        )
    result["exit_code"] = 1 if off else 0
    return result


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _check(device: Any, dtype: Any) -> list[dict[str, Any]]:
    """Every operation through dispatch, against the reference in float32."""
    import torch

    from tide.kernels import operators, reference
    from tide.kernels.cases import TINY, make_cases
    from tide.kernels.dispatch import choose

    backend, _ = choose(device, dtype)
    found = []
    for case in make_cases(dtype, device, TINY):
        errors = []
        exact = [_in_float32(argument) for argument in case.copied()]
        expected = _results(getattr(reference, case.operation)(*exact), exact)
        for module in (operators, reference):
            given = case.copied()
            got = _results(getattr(module, case.operation)(*given), given)
            errors.append(max(map(_error, got, expected)))
        found.append(
            {"operation": case.operation, "dtype": str(dtype)[6:], "ran": backend,
             "error": errors[0], "reference's": errors[1], "allowed": 2 * errors[1] + 1e-4}
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found


def _error(got: Any, expected: Any) -> float:
    """The largest difference; infinite where one is NaN and the other is not."""
    got, expected = got.float(), expected.float()
    if not (got.isnan() == expected.isnan()).all():
        return math.inf
    return float((got - expected).abs().nan_to_num().max())


def _in_float32(argument: Any) -> Any:
    import torch

    if isinstance(argument, torch.Tensor):
        return argument.float() if argument.is_floating_point() else argument
    if hasattr(argument, "_fields"):
        return type(argument)(*(_in_float32(a) for a in argument))
    return [_in_float32(a) for a in argument] if isinstance(argument, list) else argument


def _results(returned: Any, arguments: Sequence[Any]) -> list[Any]:
    """What an operation returned, or the tensors that it may have changed."""
    import torch

    if returned is not None:
        return [returned] if isinstance(returned, torch.Tensor) else list(returned)
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list):
            found += argument
    return found


def _compile(names: list[str]) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from tide.cli import did_you_mean
    from tide.errors import ConfigError, MissingPackageError

    try:
        from tide.kernels.targets import DTYPES, TARGETS, compile_all
    except ImportError as error:
        raise MissingPackageError(
            f"Compiling kernels needs triton ({error}): pip install 'tide-llm[triton]'."
        ) from error
    wanted = list(TARGETS) if "all" in names else names
    for name in wanted:
        if name not in TARGETS:
            raise ConfigError(
                f"Got target {name!r}; there are {', '.join(TARGETS)}, and all."
                f"{did_you_mean(name, TARGETS)}"
            )
    return [asdict(compiled) for compiled in compile_all(list(DTYPES), wanted)]


def _time(device: Any, dtype: Any) -> list[dict[str, Any]]:
    """Milliseconds of each operation, and bytes per second of what must move."""
    from tide.errors import ConfigError
    from tide.kernels import operators, reference
    from tide.kernels.cases import Sizes, make_cases

    if device.type != "cuda":
        raise ConfigError(
            "--time needs a GPU, and there is none here. `tide kernels --target all` shows what "
            "the kernels would need of one."
        )
    from functools import partial

    from triton.testing import do_bench

    found = []
    for case in make_cases(dtype, device, Sizes()):
        given = case.copied()
        times = [
            do_bench(partial(getattr(module, case.operation), *given))
            for module in (operators, reference)
        ]
        found.append(
            {"operation": case.operation, "dtype": str(dtype)[6:], "ms": round(times[0], 4),
             "reference ms": round(times[1], 4), "bytes": case.moved,
             "GB/s": round(case.moved / times[0] / 1e6, 1)}
        )  # fmt: skip
    return found


def _table(lines: Sequence[Sequence[Any]], heading: Sequence[str]) -> None:
    texts = [[f"{v:.2g}" if isinstance(v, float) else str(v) for v in line] for line in lines]
    widths = [max(len(line[i]) for line in [list(heading), *texts]) for i in range(len(heading))]
    for line in [list(heading), *texts]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))
