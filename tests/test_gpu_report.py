"""The GPU kit on a CPU: it runs to its end, resumes, and its page tells what was skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT


def test_the_kit_runs_to_its_end_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py")]
    command += ["--device", "cpu", "--tiny", "-o", str(tmp_path)]
    plain = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}  # compiling takes most of the time
    first = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    page = (tmp_path / "gpu_report.md").read_text()
    assert first.returncode == 0, first.stdout + first.stderr + page
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    assert report["parts"].keys() == {
        "environment", "kernels", "kernel_tests", "families", "equality", "calibrate", "bench",
        "published", "vllm",
    }  # fmt: skip
    assert report["parts"]["vllm"]["skipped"] == "there is no GPU"
    assert "- vllm: there is no GPU" in page and "proves nothing about a GPU" in page
    assert set(report["parts"]["families"]["result"].values()) == {"equal"}
    assert report["parts"]["equality"]["result"]["float32"]["exact_match_outputs"] == "2/2"
    assert len(report["parts"]["published"]["result"]) == 6
    del report["parts"]["families"]
    (tmp_path / "gpu_report.json").write_text(json.dumps(report))
    again = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    second = again.stdout
    assert second.count("done before") == 8 and "families: result" in second


def test_the_kit_calls_the_benchmark_of_vllm_as_it_wants_to_be_called(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu_report
    import vllm_speed

    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    args = Namespace(model=str(tmp_path), data="starter", out=tmp_path)
    for what, method in gpu_report.VLLM:
        words = gpu_report.vllm_command(args, what, method, tmp_path / "out.json")
        monkeypatch.setattr(sys, "argv", words)
        assert method in vllm_speed.methods_of(vllm_speed.options())
