"""Every Python block of the README runs, with the local copy of the model in the hub's place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.real
@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(
    block: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = block.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(smollm2_path)))
    assert str(smollm2_path) in code
    exec(compile(code, "README.md", "exec"), {})
