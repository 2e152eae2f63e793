"""The GPU kit on a CPU: it runs to its end, resumes, and its page tells what was skipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT


def test_the_kit_runs_to_its_end_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py")]
    command += ["--device", "cpu", "--tiny", "-o", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
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
    second = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert second.count("done before") == 8 and "families: result" in second
