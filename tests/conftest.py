"""Gives fixtures for real weights and prompts, and the reason where a test is skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def _fixed_threads() -> None:
    """Two threads in all: one for each of two workers, which would else stall each other."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct, obtained once per machine."""
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts" / "weights.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.obtain()


@pytest.fixture(scope="session")
def data_path() -> Path:
    """The folder of real prompts."""
    if not (path := os.environ.get("TIDE_DATA")):
        pytest.skip("TIDE_DATA is unset; point it at a folder of prompts")
    return Path(path)
