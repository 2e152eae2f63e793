"""What goes wrong around a run: a kill, a full disk, no memory in a pass, a clock that jumps."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ROOT
from tide import cli
from tide.config import TIDEConfig
from tide.decode.drafter import OnlineComparison
from tide.drift import DriftMonitor
from tide.engine import TIDE
from tide.errors import StorageError, TideError
from tide.exits import files
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy
from tide.exits.thresholds import Thresholds
from tide.models.costs import measure_passes
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.vllm.stepcost import StepCost
from tiny import tiny_model

FORMS = ("router", "router.safetensors", "router.pt")
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def artifact(model: Any) -> Artifact:
    exits = [Checkpoint(layer, ExitHead("affine", 32), None, Thresholds(top_probability=0.1))
             for layer in (1, 3)]  # fmt: skip
    return Artifact(fingerprint(model, locate(model)), 32, exits, record={"made": "before"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_commands_lose_nothing() -> None:
    """The short form of bench/faults.py."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/faults.py"), "--kills", "2", "--prompts", "40",
         "--full"],
        capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert {name: of["same_result_after"] for name, of in results.items()} == {
        "calibrate": 2, "certify": 2,
    }  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_keeps_what_was_there(form: str, model: Any, tmp_path: Path) -> None:
    made, path = artifact(model), tmp_path / form
    made.save(path)
    made.record["made"] = "after"
    made.checkpoints[0].head.affine.weight.data += 1  # type: ignore[union-attr]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # further bytes are an error
    try:
        with pytest.raises(StorageError, match=rf"{form}.*could not be written.*Free some space"):
            made.save(path)
        with pytest.raises(OSError, match="unchanged"):
            made.save(tmp_path / f"fresh-{form}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Artifact.load(path).record["made"] == "before"
    assert [found.name for found in tmp_path.iterdir()] == [form]  # no scratch file is there
    made.save(path)
    assert Artifact.load(path).record["made"] == "after"


def test_a_disk_that_may_not_be_written_is_named(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = artifact(model)
    made.save(tmp_path / "router")

    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "replace", "write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, read_only)
            with pytest.raises(StorageError, match=r"Read-only file system.*name another place"):
                made.save(tmp_path / ("fresh" if name == "mkdir" else "router"))
        assert Artifact.load(tmp_path / "router").record["made"] == "before"
    monkeypatch.setattr("tide.cli.env.run", lambda args: made.save(Path("/proc/nowhere/router")))
    assert cli.main(["env"]) == 1
    assert "tide env: /proc/nowhere/router could not be written" in capsys.readouterr().err


def no_memory(where: Any, after: int) -> Any:
    """Let a layer run out of memory once, after some calls."""
    calls = [after]

    def hook(*_: Any) -> None:
        calls[0] -= 1
        if calls[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return where.register_forward_pre_hook(hook)


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (TIDEConfig(mode="off"), None),
        (TIDEConfig(mode="lossless"), None),
        (TIDEConfig(mode="lossless", max_tree=8), None),
        (TIDEConfig(min_layers=0), ScriptedPolicy.share(0.5)),
        (TIDEConfig(min_layers=0, kv_cache_strategy="propagate"), ScriptedPolicy.share(0.5)),
    ],
    ids=["off", "lossless", "trees", "exit", "propagate"],
)
def test_an_engine_that_ran_out_of_memory_is_usable(
    config: TIDEConfig, policy: Any, model: Any
) -> None:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(0))
    # Nine passes and more, even if the drafts of an answer seen before are all accepted.
    config, options = config.with_(max_draft=4), {**OPTIONS, "max_new_tokens": 50}
    engine = TIDE(model, artifact(model), config, policy=policy, check=False)
    expected = engine.generate(ids, **options)
    layer = model.model.layers[4]
    for after in (1, 2, 5, 9):
        hook = no_memory(layer, after)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            engine.generate(ids, **options)
        hook.remove()
        assert torch.equal(engine.generate(ids, **options), expected)
        assert len(engine.last_stats.depths) == 2
    fresh = TIDE(model, artifact(model), config, policy=policy, check=False)
    assert torch.equal(fresh.generate(ids, **options), expected)


def jumping(seed: int, tick: float = 1e-3) -> Callable[[], float]:
    """A clock that goes on by `tick` with every look, and often jumps by up to a day."""
    draw, now = random.Random(seed), [1e6]

    def clock() -> float:
        now[0] += tick
        if draw.random() < 0.2:
            now[0] += draw.choice((-86400.0, -5.0, -tick, 5.0, 86400.0))
        return now[0]

    return clock


@pytest.mark.usefixtures("timed_as_always")
def test_a_clock_that_jumps_does_not_upset_draft_lengths(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    options = {**OPTIONS, "max_new_tokens": 60}
    expected = model.generate(ids, **options)
    for seed in range(3):
        monkeypatch.setattr("tide.models.costs.time.perf_counter", jumping(seed))
        engine = TIDE(model, artifact(model), TIDEConfig(mode="lossless"), check=False)
        engine._machinery.clock = jumping(seed + 10)
        for _ in range(3):
            assert torch.equal(engine.generate(ids, **options), expected)
        for known in engine.drafter.costs._seconds.values():
            # Steps seem to take a tick or two, where the clock does not jump.
            assert all(0 < seconds < 1 for seconds in known.values()), known


@pytest.mark.usefixtures("timed_as_always")
def test_costs_measured_by_a_clock_that_jumps_are_those_without(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = TIDE(model, check=False).runner
    draw, now = random.Random(0), [0.0]

    def clock() -> float:
        now[0] += 1e-3 + (draw.random() < 0.1) * draw.choice((-3600.0, 3600.0))
        return now[0]

    monkeypatch.setattr("tide.models.costs.time.perf_counter", clock)
    found = measure_passes(runner, [((0, runner.n_layers), None)])
    assert all(seconds == pytest.approx(1e-3) for (seconds,) in found.values())


@pytest.mark.parametrize("first", [0.0, -3600.0, 86400.0, 1e-3])
def test_a_clock_that_jumps_does_not_upset_the_costs_of_vllm_steps(first: float) -> None:
    cost = StepCost()
    cost.add(4, 4, first)
    for _ in range(50):
        for seconds in (1e-3, 0.0, -3600.0, 86400.0, 1e-3):
            cost.add(4, 4, seconds)
        for seconds in (2e-3, 0.0, -3600.0, 86400.0, 2e-3):
            cost.add(4, 8, seconds)
    assert cost.undrafted(4) == pytest.approx(1e-3)
    assert cost.ratio(4, 8) == pytest.approx(2, rel=0.1)


def test_a_comparison_survives_a_clock_that_stands_still_or_goes_back() -> None:
    comparison = OnlineComparison()
    for _ in range(50):
        comparison.record(True, 4, 2e-3)
        comparison.record(False, 4, 1e-3)
        for seconds in (0.0, -5.0, 1e-12, 86400.0):
            comparison.record(True, 4, seconds)
        comparison.record(True, 4, 2e-3)
    assert comparison._rate[True] < comparison._rate[False]


def test_the_drift_monitor_knows_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    losses = [draw.random() < 0.05 for _ in range(300)]
    one, other = DriftMonitor(0.05), DriftMonitor(0.05)
    for loss in losses:
        one.add(loss)
    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(f"time.{name}", jumping(0))
    for loss in losses:
        other.add(loss)
    assert one == other


def test_a_storage_error_is_ours_and_an_oserror() -> None:
    assert issubclass(StorageError, (TideError, OSError))
    with pytest.raises(StorageError):
        files.write_whole(Path("/proc/nowhere/file"), lambda path: path.write_text(""))
