"""Importing TIDE is cheap, and the published spelling works."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pkgutil import iter_modules

import pytest


def seconds(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def test_import_costs_at_most_a_fifth_more_than_torch() -> None:
    runs = [(seconds("import tide"), seconds("import torch")) for _ in range(5)]
    ours, torchs = (statistics.median(times) for times in zip(*runs, strict=True))
    assert ours <= 1.2 * torchs


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, tide; print({'torch', 'transformers', 'scipy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "set()"


def test_a_public_name_is_the_same_thing_each_time() -> None:
    code = "import tide; assert all(getattr(tide, n) is getattr(tide, n) for n in tide.__all__)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """As importing `tide.certify` would, if there were one."""
    import tide

    assert not {module.name for module in iter_modules(tide.__path__)} & set(tide.__all__)


def test_the_published_spelling() -> None:
    import TIDE
    import tide

    assert TIDE.attach is tide.attach
    assert TIDE.__version__ == tide.__version__
    with pytest.raises(AttributeError, match=r"no attribute 'atach'; it has TIDE"):
        _ = TIDE.atach
