"""Tests that every example runs unchanged and prints what it should."""

from __future__ import annotations

import io
import logging
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, BloomConfig

from conftest import questions
from tide.exits.artifact import Artifact
from vllm_cases import ENVIRONMENT

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.xdist_group("smollm2")
real = pytest.mark.real


def example(name: str, *arguments: Any, stdin: str = "") -> str:
    """What an example prints, in this process, which has imported what it needs."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(logging.root, "handlers", [])  # so that an example may configure it
        patch.setattr(logging.root, "level", logging.WARNING)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def test_every_example_is_listed_and_short() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in readme
        text = path.read_text()
        assert f"python examples/{path.name}" in text.split('"""')[1]
        assert len(text.splitlines()) <= 60


@real
def test_quickstart(smollm2_path: Path, small_artifact: Path) -> None:
    out = example("quickstart.py", "--model", smollm2_path, "--artifact", small_artifact)
    assert out.count("One, two, three, four, one, two,") == 2
    exited = [int(n) for n in re.findall(r"Total tokens: 48, Exited: (\d+)", out)]
    assert exited[0] == 0 and exited[1] > 0
    assert re.search(r"Audit: \d+ of \d+ exited tokens differed", out)


@real
def test_any_model(smollm2_path: Path, tmp_path: Path) -> None:
    out = example("any_model.py", "--model", smollm2_path, "--new-tokens", 6)
    assert re.search("LlamaForCausalLM: 30 layers, runner: (segments|shims)", out)
    assert "Half of the tokens agree with full depth after" in out
    config = BloomConfig(vocab_size=32, hidden_size=8, n_layer=2, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"Not this model: BloomForCausalLM .* ALiBi"):
        example("any_model.py", "--model", tmp_path)


@real
def test_tune_threshold(smollm2_path: Path, small_artifact: Path) -> None:
    out = example(
        "tune_threshold.py", "--model", smollm2_path, "--artifact", small_artifact,
        "--thresholds", 1.1, 0.1, "--threshold-scale", 0.1, 8, "--new-tokens", 16,
    )  # fmt: skip
    line = (
        r"(exit_threshold|threshold_scale) +([\d.]+) +([\d.]+)% +(-?[\d.]+)% +(\d+) of \d+ tokens"
    )
    never, low, cautious, aggressive = re.findall(line, out)
    assert never[2] == "0.0" and never[4] == "0"  # no confidence is that high
    assert float(low[2]) > 0 and float(low[3]) > float(never[3])
    assert float(aggressive[2]) > float(cautious[2]) and int(aggressive[4]) > int(cautious[4])


@real
def test_pipeline(smollm2_path: Path, small_artifact: Path) -> None:
    out = example(
        "pipeline.py", "--model", smollm2_path, "--artifact", small_artifact, "--exits",
        "--new-tokens", 24,
    )  # fmt: skip
    sea, colours, stats = out.split("--\n")
    assert "sea" in sea and colours.strip()
    assert re.search(r"Exited: [1-9]", stats)


@real
def test_chat(smollm2_path: Path, small_artifact: Path) -> None:
    out = example(
        "chat.py", "--model", smollm2_path, "--artifact", small_artifact, "--new-tokens", 24,
        stdin="Why is the sea salty?\nTell me more.\n",
    )  # fmt: skip
    assert re.search("sea|salt", out)
    answers = re.findall(r"\n\[(\d+) tokens in (\d+) steps\]", out)
    assert len(answers) == 2
    assert all(0 < int(steps) <= int(tokens) <= 24 for tokens, steps in answers)


@real
def test_certify_your_task(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(questions("tea, a map, wool, ink, snow")))
    out = example(
        "certify_your_task.py", "--model", smollm2_path, "--prompts", prompts, "--out",
        tmp_path / "router", "--risk", 0.2, "--new-tokens", 8,
    )  # fmt: skip
    assert re.search(r"% of tokens differed over 20 prompts; p 0\.0", out)
    (certificate,) = Artifact.load(tmp_path / "router").certificates
    assert certificate.risk == 0.2 and certificate.p_value <= 0.05
    assert "Total tokens: 8, Exited: " in out


@real
def test_audit_in_production(smollm2_path: Path, certified_artifact: Path, tmp_path: Path) -> None:
    """Exits that are far too aggressive for their bound, so that drift is detected."""
    made = Artifact.load(certified_artifact)
    (certificate,) = made.certificates
    made.certificates = [
        replace(
            certificate, risk=0.001, threshold_scale=50.0, kv_cache_strategy="deferred", dtype=dtype
        )
        for dtype in ("float32", "bfloat16")  # whichever the stored model has
    ]
    made.save(tmp_path / "aggressive")
    (tmp_path / "requests.txt").write_text("\n".join(questions("ice, a drum")))
    out = example(
        "audit_in_production.py", "--model", smollm2_path, "--artifact", tmp_path / "aggressive",
        "--risk", 0.001, "--prompts", tmp_path / "requests.txt", "--new-tokens", 16,
    )  # fmt: skip
    before, after = out.split("WARNING drift: ")
    assert re.search(r"[1-9]\d* exited, [1-9]\d* differed", before)
    assert "tide certify" in after
    exited = re.findall(r"INFO \d+ tokens, (\d+) exited", after)
    assert len(exited) > 1 and set(exited[1:]) == {"0"}  # the first request is the one that drifted


@real
@pytest.mark.vllm
@pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="vLLM is not installed; see docs/vllm.md",
)
def test_vllm_offline(smollm2_path: Path, certified_artifact: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "vllm_offline.py", "--model", smollm2_path, "--artifact",
         certified_artifact, "--risk", "0.2", "--dtype", "float32", "--new-tokens", "24"],
        env={**os.environ, **ENVIRONMENT, "VLLM_CPU_CI_ENV": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    counted = dict(re.findall(r"tide:tokens_total (\w+) (\d+)", out))
    assert int(counted["24"]) > 0 and int(counted["full"]) > 0
    assert out.count("--\n") == 4
