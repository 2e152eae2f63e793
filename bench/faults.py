"""Faults: commands and servers are killed at random moments, and run again.

`commands` (by default) kills `tide calibrate` and `tide certify`. After each kill, what is there is
the old artifact, the new one, or none. Run again, calibration resumes to the bit-identical
artifact, and certification to the same certificates. Half of the kills come near the end, where
files are written. The model is tiny, and is loaded in a process that is then forked for each run,
so that a kill can hit the work and not the imports.

`server` and `worker` kill processes of `tide serve`; see `server_faults.py`.

    python bench/faults.py --kills 20 --out bench/results/faults.json
    TIDE_DATA=... python bench/faults.py server --model $(python scripts/weights.py) \\
        --out bench/results/faults_server.json
    TIDE_DATA=... python bench/faults.py worker --model $(python scripts/weights.py) \\
        --out bench/results/faults_worker.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import write

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

from tide.cli import main as tide  # noqa: E402
from tide.exits.artifact import Artifact  # noqa: E402
from tiny import tiny_model, tiny_tokenizer  # noqa: E402

TIMINGS = ("seconds", "peak_mb")  # of a record: the rest is the same in every run


def calibrate(model: Path, data: Path, folder: Path) -> list[str]:
    """The command; its work folder is kept by its name alone."""
    return [
        "calibrate", str(model), "-o", str(folder / "router"), "--work", str(folder / "work"),
        "--data", str(data), "--interval", "3", "--min-layers", "3", "--bottleneck", "8",
        "--vocabulary", "64", "--new-tokens", "8", "--batch", "1", "--threads", "1",
    ]  # fmt: skip


def certify(model: Path, data: Path, folder: Path) -> list[str]:
    """The command; it writes into the artifact that is there."""
    return [
        "certify", str(model), str(folder / "router"), "--data", str(data), "--risk", "0.5", "0.9",
        "--new-tokens", "6", "--samples", "24", "--threads", "1",
    ]  # fmt: skip


def start(arguments: list[str], log: Path, most_bytes: int | None = None) -> int:
    """Run a command in a fork of this process; returns its id.

    Args:
        most_bytes: of a file; what is beyond is an error, as on a full disk.
    """
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        torch.set_num_threads(1)
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
        with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = tide(arguments)
    finally:
        os._exit(code)


def finish(arguments: list[str], log: Path) -> float:
    """Run a command to its end; returns the seconds."""
    began = time.monotonic()
    _, status = os.waitpid(start(arguments, log), 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{log.read_text()[-2000:]}")
    return time.monotonic() - began


class Reference:
    """A run that nobody disturbs.

    Args:
        command: the arguments, given a folder to work in.
        folder: to work in.
    """

    def __init__(self, command: Callable[[Path], list[str]], folder: Path) -> None:
        self.command, self.folder = command, folder
        self.seconds = finish(command(folder), folder.parent / "log")
        self.result = content(folder / "router")


def content(path: Path) -> tuple[str, dict[str, bytes]]:
    """All of an artifact but its timings: the header, and the bytes of its tensors."""
    made = Artifact.load(path)
    header = made._header()
    header["record"] = {k: v for k, v in header["record"].items() if k not in TIMINGS}
    raw = {n: t.view(-1).view(torch.uint8).numpy().tobytes() for n, t in made._tensors().items()}
    return json.dumps(header, sort_keys=True), raw


def kills(
    name: str, count: int, rng: random.Random, reference: Reference, prepare: Callable[[Path], Any]
) -> dict[str, Any]:
    """Kill a command some times and run it again; raises if anything is lost.

    Args:
        reference: what the command does if nobody kills it.
        prepare: writes into a folder what the command starts from.
    """
    found, folder, killed = Counter[str](), reference.folder.parent, 0
    while killed < count:
        here = folder / name
        prepare(here)
        before = content(here / "router") if (here / "router").exists() else None
        child = start(reference.command(here), folder / "log")
        moment = rng.random() if killed % 2 else rng.uniform(0.85, 1.05)
        time.sleep(reference.seconds * moment)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):  # otherwise the command was faster
            killed += 1
            after = content(here / "router") if (here / "router").exists() else None
            if after not in (before, reference.result):
                raise SystemExit(f"{name}: after kill {killed}, the artifact is a third one")
            found["new" if after == reference.result else "old" if after else "none"] += 1
        finish(reference.command(here), folder / "log")
        if content(here / "router") != reference.result:
            raise SystemExit(f"{name}: after kill {killed}, the result is not that of a whole run")
        shutil.rmtree(here)
    print(f"{name}: {dict(found)}", file=sys.stderr)
    return {"kills": count, "found_after_kill": dict(found), "same_result_after": count}


def full_disk(
    sizes: list[int], reference: Reference, prepare: Callable[[Path], Any]
) -> dict[str, Any]:
    """Let a command meet a full disk, and run it again with space; raises if anything is lost."""
    folder = reference.folder.parent
    for size in sizes:
        here, log = folder / f"full at {size}", folder / f"full at {size}.log"
        prepare(here)
        _, status = os.waitpid(start(reference.command(here), log, size), 0)
        if os.waitstatus_to_exitcode(status) != 1 or "could not be written" not in log.read_text():
            raise SystemExit(f"a disk full at {size} bytes was not named:\n{log.read_text()}")
        if (here / "router").exists():
            raise SystemExit(f"a disk full at {size} bytes gave an artifact")
        finish(reference.command(here), log)
        if content(here / "router") != reference.result:
            raise SystemExit(f"after a disk full at {size} bytes, the result differs")
    return {"full_at_bytes": sizes, "named": len(sizes), "same_result_after": len(sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="?", choices=("commands", "server", "worker"), default="commands"
    )
    parser.add_argument("--kills", type=int, default=20, help="of each command, or of a server")
    parser.add_argument("--model", help="a model folder, to serve")
    parser.add_argument("--threads", type=int, default=2, help="of a server")
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument(
        "--full", type=int, nargs="*", default=[4096, 20_000, 60_000],
        help="bytes of a file at which the disk is full, for calibrate",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    if args.what != "commands":
        import server_faults

        server_faults.run(args)
        return
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = folder / "model", folder / "data.txt"
        tiny_model("llama").save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
        texts = ["".join(rng.choices("abcdefgh", k=12)) for _ in range(args.prompts)]
        data.write_text("\n".join(texts))
        unused = folder / "unused.txt"
        unused.write_text("\n".join("".join(rng.choices("ijklmnop", k=12)) for _ in range(40)))
        calibration = Reference(lambda here: calibrate(model, data, here), folder / "calibrated")
        made = shutil.copytree(folder / "calibrated/router", folder / "certified/router")
        certification = Reference(lambda here: certify(model, unused, here), made.parent)

        def with_costs(here: Path) -> None:
            """Costs are measured, so no two runs share them unless they are there."""
            (here / "work").mkdir(parents=True)
            shutil.copy(folder / "calibrated/work/costs.json", here / "work")

        def with_artifact(here: Path) -> None:
            shutil.copytree(folder / "calibrated/router", here / "router")

        results = {
            "calibrate": kills("calibrate", args.kills, rng, calibration, with_costs),
            "certify": kills("certify", args.kills, rng, certification, with_artifact),
        }
        disk = full_disk(args.full, calibration, with_costs)
    document = {
        "what": "commands killed at random moments, and run again",
        "conditions": {
            "kills_of_each": args.kills, "prompts": args.prompts, "seed": args.seed,
            "torch": torch.__version__,
        },
        "results": results,
        "full_disk": disk,
    }  # fmt: skip
    write(document, args.out)


if __name__ == "__main__":
    main()
