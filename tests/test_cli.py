"""The command line does what it says, and says what went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tide.cli import COMMANDS, main
from tide.exits.artifact import Artifact
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text(
        "\n".join(f"{'abcdefgh'[i % 8]}{i:03}abc" for i in range(40))
    )
    return tmp_path


def last_line(capsys: Any) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_assess(folder: Path, capsys: Any) -> None:
    words = ["assess", str(folder / "model"), "--data", str(folder / "texts.txt"), "--samples", "4"]
    assert main([*words, "--new-tokens", "6", "--json"]) == 0
    found = last_line(capsys)
    assert found["documents"] == 4 and found["agreement"][-1] == 1.0 and "verdict" in found


def calibrate(folder: Path) -> Path:
    model, texts, out = (str(folder / name) for name in ("model", "texts.txt", "router"))
    words = ["calibrate", model, "-o", out, "--data", texts, "--new-tokens", "6", "--json"]
    words += ["--interval", "2", "--min-layers", "2", "--vocabulary", "64", "--bottleneck", "8"]
    assert main(words) == 0
    return folder / "router"


def test_bench(folder: Path, capsys: Any) -> None:
    words = ["bench", str(folder / "model"), str(calibrate(folder))]
    words += ["--data", str(folder / "texts.txt"), "--new-tokens", "6", "--json"]
    assert main([*words, "--samples", "2", "--out", str(folder / "bench.json")]) == 0
    found = last_line(capsys)
    assert json.loads((folder / "bench.json").read_text()) == found
    sides = [row["side"] for row in found["results"]]
    assert sides == ["generate", "prompt lookup", "off", "lossless", "exit"]
    assert found["results"][3]["layers_run"] > 0
    assert main([*words, "--samples", "4", "--attack", "--rounds", "1"]) == 0
    assert [row["goal"] for row in last_line(capsys)["results"]] == ["wrong", "deep"]


def test_calibrate(folder: Path, capsys: Any) -> None:
    out = calibrate(folder)
    assert last_line(capsys)["documents"]["fit"] == 26
    made = Artifact.from_pretrained(out)
    assert made.config.checkpoint_interval == 2
    card = (out / "README.md").read_text()
    assert "# TIDE artifact for model" in card and str(folder) not in card


def test_errors_say_what_to_do(folder: Path, capsys: Any) -> None:
    assert main(["assess", str(folder / "model"), "--data", str(folder / "nowhere.txt")]) == 1
    assert "ame a local .txt or .jsonl file" in capsys.readouterr().err
    assert main(["assess", str(folder / "nowhere")]) == 1
    assert "cannot be loaded as a causal language model" in capsys.readouterr().err
    for words, message in ((["calibrat"], "Did you mean `tide calibrate`"), ([], "COMMAND")):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "--json" in text and "default: auto" in text


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from tide.cli import main\n"
        "try: main(['calibrate', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip().endswith("set()")
