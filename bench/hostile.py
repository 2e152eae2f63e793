"""Hostile files: everything TIDE reads from a stranger, changed in thousands of ways, and read.

Each case either loads to something valid or raises the documented error, within 2 s of processor
time and 512 MB, and writes, runs and connects nothing. An artifact is valid if it comes back the
same when saved and loaded again, and an engine made from it generates the model's own tokens in
mode "lossless", and tokens of its vocabulary in mode "exit", or refuses it with an error of TIDE's.

    python bench/hostile.py --cases 10000 --out bench/results/hostile.json
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hostile_surfaces import SURFACES, Ground
from measure import write

SECONDS, MEGABYTES, HANGS = 2.0, 512.0, 20
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that reading a file has no reason to cause.
FORBIDDEN = (
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "pickle.find_class",
    "shutil.unpack_archive", "socket.bind", "socket.connect", "socket.getaddrinfo",
    "subprocess.Popen", "urllib.Request",
)  # fmt: skip
CHANGES = ("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
           "os.truncate")  # fmt: skip

LINKS = ("os.link", "os.rename", "os.symlink")  # what they change comes second


class Sentry:
    """Notes every event of the interpreter that writes outside a folder, runs code or connects."""

    def __init__(self) -> None:
        self.inside: Path | None = None  # None while nothing is noted
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def noting(self, inside: Path) -> Iterator[list[str]]:
        """The events while a file is read; writing is allowed inside of a folder."""
        self.inside, self.seen = inside, []
        try:
            yield self.seen
        finally:
            self.inside = None

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in FORBIDDEN or (event in CHANGES and not self._is_inside(args[event in LINKS])):
            self.seen.append(f"{event} {str(args)[:100]}")
        elif event == "open" and isinstance(args[2], int) and args[2] & WRITES:
            if not isinstance(args[0], int) and not self._is_inside(args[0]):
                self.seen.append(f"write {args[0]}")
        elif event in ("exec", "compile") and self._of_case(event, args):
            self.seen.append(f"{event} {str(args)[:100]}")

    def _is_inside(self, path: Any) -> bool:
        given = Path(os.fsdecode(path))
        whole = Path(os.path.realpath(given.parent)) / given.name
        return self.inside is not None and whole.is_relative_to(os.path.realpath(self.inside))

    def _of_case(self, event: str, args: tuple[Any, ...]) -> bool:
        name = getattr(args[0], "co_filename", None) if event == "exec" else args[1]
        return str(self.inside) in str(name)


@dataclass
class Tally:
    """What became of the cases of one surface."""

    cases: int = 0
    loaded: int = 0
    refused: int = 0
    most_seconds: float = 0.0
    most_megabytes: float = 0.0
    faults: list[str] = field(default_factory=list)


def hostile(
    cases: range, seed: int, sentry: Sentry, each: Callable[[int], Any] = lambda number: None
) -> dict[str, Tally]:
    """Read the cases with these numbers; the tally of every surface."""
    names = list(SURFACES)
    tallies = {name: Tally() for name in names}
    weights = [SURFACES[name].weight for name in names]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ground = Ground(Path(folder))
        # What is imported and made once is not what a file costs.
        for surface in SURFACES.values():
            surface.read(surface.warm_up(ground), ground)
        gc.freeze()  # nor is looking for garbage among all that the process has made before
        try:
            for number in cases:
                rng = random.Random(f"{seed} {number}")
                name = rng.choices(names, weights)[0]
                _read(tallies[name], name, number, rng, ground, sentry)
                each(number)
        finally:
            gc.unfreeze()
    return tallies


def _read(
    tally: Tally, name: str, number: int, rng: random.Random, ground: Ground, sentry: Sentry
) -> None:
    """Read one case, and note what became of it."""
    surface, inside = SURFACES[name], ground.clean()
    path, what = surface.write(rng, ground)
    faults, outcome = [], "refused"
    _forget_peak()
    before, began = _memory("VmRSS"), time.process_time()
    with sentry.noting(inside) as seen, _alarm():
        try:
            surface.read(path, ground)
            outcome = "loaded"
        except surface.errors as error:
            if len(str(error)) < 20:
                faults.append(f"says only {error}")
        except BaseException as error:  # also what a hang is interrupted by
            faults.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    seconds, megabytes = time.process_time() - began, _memory("VmHWM") - before
    if seconds > SECONDS:
        faults.append(f"took {seconds:.1f} s")
    if megabytes > MEGABYTES:
        faults.append(f"took {megabytes:.0f} MB")
    faults += [*seen, *ground.damage()]
    tally.cases += 1
    tally.loaded += outcome == "loaded" and not faults
    tally.refused += outcome == "refused" and not faults
    tally.most_seconds = max(tally.most_seconds, seconds)
    tally.most_megabytes = max(tally.most_megabytes, megabytes)
    tally.faults += [f"case {number}, {name}, {what}: {fault}" for fault in faults]


@contextmanager
def _alarm() -> Iterator[None]:
    """Interrupt what hangs."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError(f"hangs for {HANGS} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _forget_peak() -> None:
    """Let the peak of the memory in use start from now; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory(what: str) -> float:
    """Megabytes in use, or at most so far."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # A bomb must not take the machine with it.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, resource.RLIM_INFINITY))

    def each(number: int) -> None:
        if (number + 1) % 500 == 0:
            print(f"{number + 1} cases", file=sys.stderr)

    cases = range(args.first, args.first + args.cases)
    tallies = hostile(cases, args.seed, Sentry(), each)
    document = {
        "what": "hostile files, read",
        "conditions": {
            "cases": args.cases, "first": args.first, "seed": args.seed, "torch": torch.__version__,
            "seconds_allowed": SECONDS, "megabytes_allowed": MEGABYTES,
        },
        "surfaces": {
            SURFACES[name].title: {
                "cases": t.cases, "loaded": t.loaded, "refused": t.refused,
                "most_seconds": round(t.most_seconds, 2), "most_megabytes": round(t.most_megabytes),
                "faults": len(t.faults),
            }
            for name, t in tallies.items()
        },
    }  # fmt: skip
    write(document, args.out)
    faults = [fault for tally in tallies.values() for fault in tally.faults]
    print("\n".join(faults), file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
