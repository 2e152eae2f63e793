"""`tide serve` passes signals on to its server, and ends what a killed one had started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a death signal")

# A server with an engine in another process; it writes both ids, and ends when told to.
SERVER = """
import pathlib, signal, subprocess, sys, time
def end(*_):
    engine.terminate()
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which whoever runs the tests may have ignored
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
here = pathlib.Path(sys.argv[1])
(here / "new").write_text(f"{engine.pid}")
(here / "new").rename(here / "engine")
while True:
    time.sleep(0.1)
"""
SUPERVISE = """
import sys
from tide.cli.serve import supervise
sys.exit(supervise([sys.executable, "-c", sys.argv[1], sys.argv[2]]))
"""


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon(what: object) -> None:
    """Wait until something holds."""
    for _ in range(1200):
        if what():  # type: ignore[operator]
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen in a minute")


class Running:
    """A supervised server with its engine."""

    def __init__(self, folder: Path) -> None:
        self.outer = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, SERVER, str(folder)], stdout=subprocess.PIPE,
            text=True, env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        soon((folder / "engine").exists)
        self.engine = psutil.Process(int((folder / "engine").read_text()))
        parent = self.engine.parent()
        assert parent is not None
        self.server = parent


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path)
    yield found
    for process in (found.outer, found.server, found.engine):
        if isinstance(process, subprocess.Popen) or not ended(process):
            process.kill()
    found.outer.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on(running: Running, number: int, tmp_path: Path) -> None:
    running.outer.send_signal(number)
    out, _ = running.outer.communicate(timeout=30)
    assert running.outer.returncode == 0
    assert ("drained" in out) == (number == signal.SIGTERM)  # the other one ends it at once
    assert ended(running.server)
    soon(lambda: ended(running.engine))
    assert not list(tmp_path.glob("tide-metrics-*"))


def test_a_killed_server_is_an_error_and_takes_its_engine_along(running: Running) -> None:
    running.server.kill()
    assert running.outer.wait(30) == 128 + signal.SIGKILL
    soon(lambda: ended(running.engine))


def test_the_server_ends_if_its_supervisor_is_killed(running: Running) -> None:
    running.outer.kill()
    soon(lambda: ended(running.server) and ended(running.engine))


def test_a_server_that_ends_untold_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", SUPERVISE, "pass", ""])
    assert done.returncode == 1
