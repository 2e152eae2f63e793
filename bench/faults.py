"""Faults: `tide calibrate` and `tide certify` are killed at random moments, and run again.

After each kill, what is there is the old artifact, the new one, or none. Run again, calibration
resumes to the bit-identical artifact, and certification to the same certificates. Half of the kills
come near the end, where files are written. The model is tiny, and is loaded in a process that is
then forked for each run, so that a kill can hit the work and not the imports.

    python bench/faults.py --kills 20 --out bench/results/faults.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
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
        "--data", str(data), "--interval", "2", "--min-layers", "2", "--bottleneck", "8",
        "--vocabulary", "64", "--new-tokens", "8", "--batch", "1", "--threads", "1",
    ]  # fmt: skip


def certify(model: Path, data: Path, folder: Path) -> list[str]:
    """The command; it writes into the artifact that is there."""
    return [
        "certify", str(model), str(folder / "router"), "--data", str(data), "--risk", "0.5", "0.9",
        "--new-tokens", "6", "--samples", "24", "--threads", "1",
    ]  # fmt: skip


def start(arguments: list[str], log: Path) -> int:
    """Run a command in a fork of this process; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
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


def content(path: Path) -> tuple[str, dict[str, bytes]]:
    """All of an artifact but its timings: the header, and the bytes of its tensors."""
    made = Artifact.load(path)
    header = made._header()
    header["record"] = {k: v for k, v in header["record"].items() if k not in TIMINGS}
    raw = {n: t.view(-1).view(torch.uint8).numpy().tobytes() for n, t in made._tensors().items()}
    return json.dumps(header, sort_keys=True), raw


def kills(
    name: str, count: int, rng: random.Random, folder: Path, command: Callable[[Path], list[str]],
    prepare: Callable[[Path], Any],
) -> dict[str, Any]:  # fmt: skip
    """Kill a command some times and run it again; raises if anything is lost.

    Args:
        prepare: writes into a folder what the command starts from.
    """
    log, whole = folder / "log", folder / f"{name} whole"
    prepare(whole)
    before = content(whole / "router") if (whole / "router").exists() else None
    seconds = finish(command(whole), log)
    expected, found = content(whole / "router"), Counter[str]()
    for number in range(count):
        here = folder / f"{name} {number}"
        prepare(here)
        child = start(command(here), log)
        time.sleep(seconds * (rng.random() if number % 2 else rng.uniform(0.85, 1.05)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after = content(here / "router") if (here / "router").exists() else None
        if after not in (before, expected):
            raise SystemExit(f"{name}, kill {number}: the artifact is neither the old nor the new")
        found["new" if after == expected else "old" if after else "none"] += 1
        finish(command(here), log)
        if content(here / "router") != expected:
            raise SystemExit(f"{name}, kill {number}: the result differs from an undisturbed run")
        shutil.rmtree(here)
    print(f"{name}: {dict(found)}", file=sys.stderr)
    return {"kills": count, "found_after_kill": dict(found), "same_result_after": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each command")
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data, costs = folder / "model", folder / "data.txt", folder / "costs.json"
        tiny_model("llama").save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
        texts = ["".join(rng.choices("abcdefgh", k=12)) for _ in range(args.prompts)]
        data.write_text("\n".join(texts))
        unused = folder / "unused.txt"
        unused.write_text("\n".join("".join(rng.choices("ijklmnop", k=12)) for _ in range(40)))
        # Costs are measured, so no two runs share them unless they are there.
        finish(calibrate(model, data, folder / "first"), folder / "log")
        shutil.move(folder / "first/work/costs.json", costs)

        def with_costs(here: Path) -> None:
            (here / "work").mkdir(parents=True)
            shutil.copy(costs, here / "work")

        results = {
            "calibrate": kills(
                "calibrate", args.kills, rng, folder,
                lambda here: calibrate(model, data, here), with_costs,
            ),
            "certify": kills(
                "certify", args.kills, rng, folder,
                lambda here: certify(model, unused, here),
                lambda here: shutil.copytree(folder / "first/router", here / "router"),
            ),
        }  # fmt: skip
    document = {
        "what": "commands killed at random moments, and run again",
        "conditions": {
            "kills_of_each": args.kills, "prompts": args.prompts, "seed": args.seed,
            "torch": torch.__version__,
        },
        "results": results,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
