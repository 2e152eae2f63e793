"""How long the commands of the README's second quick start take, as a result file.

    python scripts/quickstart_times.py MODEL

Runs them as the README has them, in an empty folder, except for `tide serve`: how long vLLM takes
to start is in the result of bench/vllm_load.py.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import RESULTS, ROOT

sys.path.insert(0, str(ROOT / "src"))

NAMES = ("calibrate", "show", "certify")
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def commands() -> dict[str, str]:
    """The commands of the README, by name."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return {
        name: next(line for line in lines if line.startswith(f"tide {name} ")) for name in NAMES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    args = parser.parse_args()
    import torch
    import transformers

    import tide
    from tide.cli.loading import processor

    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, line in commands().items():
            began = time.perf_counter()
            whole = line.replace(HUB, str(Path(args.model).resolve()))
            subprocess.run(whole, shell=True, cwd=folder, check=True)
            seconds[name] = round(time.perf_counter() - began)
    found = {
        "what": "the commands of the README, each in a process of its own, model loading included",
        "conditions": {
            "model": Path(args.model).name, "device": "cpu", "threads": torch.get_num_threads(),
            "processor": processor(), "torch": torch.__version__,
            "transformers": transformers.__version__, "tide": tide.__version__,
        },
        "results": seconds,
    }  # fmt: skip
    (RESULTS / "quickstart.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
