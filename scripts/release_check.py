"""Checks what would be released: wheel and sdist, what they hold, and that they install and run.

Builds both, runs `twine check`, installs each into an empty environment without extras, and runs
`scripts/smoke.py` there with no compiler to be found. `--extras` installs the wheel with each of
these extras as well, and `--transformers` with each of these versions, where types are checked too.

    pip install build twine
    python scripts/release_check.py [--extras plot test] [--transformers 5.16.0]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Must be in the sdist; all that is under src/tide must be in the wheel too.
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "src/TIDE.py",
          "src/tide/py.typed", "tests/tiny.py", "scripts/smoke.py")  # fmt: skip


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    if code := subprocess.run([str(part) for part in command], env=env, cwd=cwd).returncode:
        raise SystemExit(code)


def build(out: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """The wheel and the sdist; the wheel is built from the sdist, as others would."""
    run(sys.executable, "-m", "build", "--outdir", out, source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Raise if a file is missing, or one is there that should not be."""
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    of_package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/tide").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = [n for n in NEEDED if n not in packed] + sorted(of_package - installed)
    extra = [
        name for name in installed
        if not name.startswith("tide/") and name != "TIDE.py" and ".dist-info/" not in name
    ]  # fmt: skip
    if missing or extra:
        raise SystemExit(f"missing: {missing}; should not be in the wheel: {extra}")


def install(what: str, folder: Path, *more: str) -> Path:
    """Install into an empty environment where no compiler is found, and run the smoke test.

    Returns:
        The interpreter of the environment.
    """
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    # torch for CPUs, where the index has it: the smoke test needs no more.
    environment = {**os.environ, "PATH": str(folder / "bin"), "CC": "false", "CXX": "false"}
    environment.pop("PYTHONPATH", None)
    run(python, "-m", "pip", "install", "--quiet", what, *more, env=environment)
    run(python, "-m", "pip", "check", env=environment)
    run(python, ROOT / "scripts" / "smoke.py", env=environment, cwd=folder)
    run(folder / "bin" / "tide", "--version", env=environment, cwd=folder)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extras", nargs="*", default=[], help="also install with these")
    parser.add_argument("--transformers", nargs="*", default=[], help="also with these versions")
    parser.add_argument("--build-only", action="store_true", help="install nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder / "dist")
        check_contents(wheel, sdist)
        if not args.build_only:
            install(str(wheel), folder / "wheel")
            install(str(sdist), folder / "sdist")
        for extra in args.extras:
            install(f"{wheel}[{extra}]", folder / f"extra-{extra}")
        for version in args.transformers:
            python = install(str(wheel), folder / f"with-{version}", f"transformers=={version}")
            run(python, "-m", "pip", "install", "--quiet", "mypy")
            run(python, "-m", "mypy")
    print(f"{wheel.name} and {sdist.name} are fit to be released.")


if __name__ == "__main__":
    main()
