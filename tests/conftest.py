"""Fixtures for real weights and prompts, with a reason where a test is skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

import tide
from tide.calibration.costs import Costs
from tide.config import TIDEConfig
from tide.exits.artifact import Artifact
from tide.models.costs import _REPEATS, LoopCosts

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups first, the longest before the others: a worker that ends early has the rest to do.

    In a group, what needs the calibrated artifact comes last: another worker is making it.
    """
    order = ["vllm", "smollm2", "docs"]

    def place(item: pytest.Item) -> tuple[int, bool]:
        group = item.get_closest_marker("xdist_group")
        waits = group is not None and group.args[0] == "vllm" and "small_artifact" in names(item)
        return order.index(group.args[0]) if group else len(order), waits

    def names(item: pytest.Item) -> list[str]:
        return getattr(item, "fixturenames", [])

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _fixed_threads() -> None:
    """Two threads in all: one for each of two workers, which would otherwise stall each other."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session", autouse=True)
def _timed_once() -> Iterator[None]:
    """What a pass costs decides how much is drafted, never which tokens: one timing will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tide.models.costs._REPEATS", (1, 1))
        yield


@pytest.fixture
def timed_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as without `_timed_once`."""
    monkeypatch.setattr("tide.models.costs._REPEATS", _REPEATS)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are made as always, and then run as they are: most of compiling is what follows."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compile(f, **o | {"backend": "eager"}))
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct, downloaded once per machine."""
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts" / "weights.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.obtain()


@pytest.fixture(scope="session")
def model(smollm2_path: Path) -> Any:
    """SmolLM2 in fp32."""
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Any:
    """Its tokenizer, for batches."""
    return AutoTokenizer.from_pretrained(smollm2_path, padding_side="left")


def questions(things: str) -> list[str]:
    """Eight questions about each of some things."""
    templates = (
        "Explain {} to a child.", "What is {}?", "Write a short story about {}.",
        "List five facts about {}.", "Why does {} matter?", "Describe the history of {}.",
        "Give me advice on {}.", "How does {} work?",
    )  # fmt: skip
    return [t.format(thing) for thing in things.split(", ") for t in templates]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder in whichever worker wants it first; the others wait, and get the same one."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.made"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def small_artifact(model: Any, tokenizer: Any, once: Callable[..., Path]) -> Path:
    """SmolLM2 calibrated on a small budget."""
    data = questions(
        "the sea, bread, a bicycle, the moon, chess, rain, gold, a violin, trade, the heart, "
        "maps, glass"
    )

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # What exits is to be the same on a busy machine.
            costs = Costs(
                layer=1e-3, start=5e-4, head=8e-3, exit_head=1.5e-3, router=2e-4, prefilter=3e-4
            )
            patch.setattr("tide.calibration.costs.measure_costs", lambda *args: costs)
            # A layer takes a tenth more for each further token.
            sizes, ms = (1, 2, 4, 8, 16), 1e-3
            loops = [
                LoopCosts(
                    size, {n: 30 * ms * (0.9 + n / 10) + 8 * ms for n in sizes},
                    {n: ms * (0.9 + n / 10) for n in sizes}, dict.fromkeys(sizes, ms),
                    dict.fromkeys(sizes, 1.5 * ms),
                )
                for size in (1, 4)
            ]  # fmt: skip
            patch.setattr("tide.calibration.costs.measure_loops", lambda *args: loops)
            tide.calibrate(
                model, tokenizer, folder, TIDEConfig(checkpoint_interval=8, min_layers=24),
                data=data, new_tokens=24, vocabulary=4096, epochs=16, quiet=True,
            )  # fmt: skip

    return once("small", make)


@pytest.fixture(scope="session")
def certified_artifact(
    model: Any, tokenizer: Any, small_artifact: Path, once: Callable[..., Path]
) -> Path:
    """The same with a certificate for vLLM, at a risk high enough for few sequences to show."""
    from tide.certification import certify

    def make(folder: Path) -> None:
        Artifact.load(small_artifact).save(folder)
        config = TIDEConfig(kv_cache_strategy="propagate", min_layers=24)
        texts = questions("a river, the sun, paper, a clock, salt, the wind, wool, bees")
        (_,) = certify(
            model, tokenizer, folder, texts, risk=0.2, config=config, threshold_scales=(1.0,),
            new_tokens=16, batch=32, quiet=True,
        )  # fmt: skip

    return once("certified", make)


@pytest.fixture(scope="session")
def data_path() -> Path:
    """The folder of real prompts."""
    if not (path := os.environ.get("TIDE_DATA")):
        pytest.skip("TIDE_DATA is unset; point it at a folder of prompts")
    return Path(path)
