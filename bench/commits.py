"""Two commits side by side: are the tokens the same, is the speed?

    git worktree add OLD c154cfd
    PYTHONPATH=OLD/src python bench/commits.py artifact MODEL --artifact DIR
    python bench/commits.py tokens MODEL --artifact DIR --source OLD/src --out OLD.json
    python bench/commits.py tokens MODEL --artifact DIR --against OLD.json --out NEW.json
    python bench/commits.py speed MODEL --artifact DIR --old OLD/src --out SPEED.json

`artifact` calibrates once, so that both commits decode with the same exit heads; the new commit
renames the keys of the old schema while reading. `tokens` stores what a commit generates on 24
Spec-Bench prompts of 64 tokens, `speed` times two commits in turn, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS, NEW_TOKENS, LONGEST = 24, 64, 256
MODES = ("off", "lossless", "exit")


def questions(count: int = PROMPTS) -> list[str]:
    """First turns of Spec-Bench, spread evenly over the file."""
    lines = (Path(os.environ["TIDE_DATA"]) / "spec_bench/question.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:: len(lines) // count]][:count]


def make_artifact(model: Any, tokenizer: Any, out: Path) -> None:
    """The recipe of the artifact: a small budget, three checkpoints, a reduced vocabulary."""
    import tide

    lines = (Path(os.environ["TIDE_DATA"]) / "gsm8k/train.jsonl").read_text().splitlines()[:48]
    turns = (Path(os.environ["TIDE_DATA"]) / "mt_bench/question.jsonl").read_text().splitlines()
    texts = [json.loads(line)["question"] for line in lines]
    texts += [json.loads(line)["turns"][0] for line in turns[:48]]
    config = tide.TIDEConfig(checkpoint_interval=4, min_layers=20)
    tide.calibrate(
        model, tokenizer, out, config, data=texts, new_tokens=96, vocabulary=8192, epochs=8
    )


def read_artifact(path: Path) -> Any:
    """An artifact of either schema."""
    from tide.exits import artifact, files

    header, tensors = files.read(path)
    if artifact.SCHEMA > 1 and header["schema"] == 1:
        header["schema"] = artifact.SCHEMA
        header["config"].pop("fixed_drafts")
        for row in header["checkpoints"]:
            del row["tail_layers"]
            row["thresholds"], row["confidence_model"] = row.pop("gate"), row.pop("blend")
            row["thresholds"]["confidence"] = row["thresholds"].pop("blend")
        tensors = {name.replace(".blend.", ".confidence_model."): t for name, t in tensors.items()}
    return artifact.Artifact._from(header, tensors)


class Worker:
    """Loads a model once and decodes what it is sent, one JSON line each."""

    def __init__(self, model: str, artifact: Path, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import tide

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        made = read_artifact(artifact)
        configs = {
            "off": tide.TIDEConfig(mode="off"),
            "lossless": tide.TIDEConfig(mode="lossless", min_layers=20),
            "exit": tide.TIDEConfig(exit_threshold=0.7, min_layers=20),
        }
        self.engines = {mode: tide.TIDE(self.model, made, c) for mode, c in configs.items()}

    def encode(self, texts: list[str]) -> Any:
        """A left-padded batch of chat prompts."""
        ids = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"][-LONGEST:]
            for text in texts
        ]
        return self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")

    def decode(self, mode: str, texts: list[str], seed: int | None, new: int) -> dict[str, Any]:
        """Token ids of each sequence, and the seconds it took."""
        batch = self.encode(texts)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": seed is not None}
        if seed is not None:
            self.torch.manual_seed(seed)
            options |= {"temperature": 0.8, "top_p": 0.95, "top_k": 0}
        began = time.perf_counter()
        out = self.engines[mode].generate(**batch, **options)
        seconds = time.perf_counter() - began
        return {"ids": out[:, batch["input_ids"].shape[1] :].tolist(), "seconds": seconds}


class Process:
    """A worker that runs the code of one commit."""

    def __init__(self, args: argparse.Namespace, source: Path | None, dtype: str) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if source is not None:
            environment["PYTHONPATH"] = str(source.resolve())
        command = [
            sys.executable, __file__, "worker", args.model, "--artifact", str(args.artifact),
            "--dtype", dtype, "--threads", str(args.threads),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.commit = self._answer()["source"]

    def decode(self, *request: Any) -> dict[str, Any]:
        """See `Worker.decode`."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("The worker ended; its error stands above.")


def serve(args: argparse.Namespace) -> None:
    """Answer the requests of a `Process`."""
    import tide

    worker = Worker(args.model, args.artifact, args.dtype, args.threads)
    print(json.dumps({"source": Path(tide.__file__).parts[-4]}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.decode(*json.loads(line))), flush=True)


def tokens(args: argparse.Namespace) -> None:
    """Store what one commit generates; with `--against`, list where it differs."""
    process, texts = Process(args, args.source, args.dtype), questions(args.prompts)
    found: dict[str, list[list[int]]] = {}
    for mode in MODES:
        for size in (1, 4):
            for sampled in (False, True):
                name = f"{mode}, batch {size}, {'sampled' if sampled else 'greedy'}"
                found[name] = []
                for start in range(0, len(texts), size):
                    some = texts[start : start + size]
                    seed = start if sampled else None
                    found[name] += process.decode(mode, some, seed, NEW_TOKENS)["ids"]
                print(name, "done", file=sys.stderr, flush=True)
    process.close()
    document: dict[str, Any] = {"prompts": args.prompts, "dtype": args.dtype, "ids": found}
    if args.against is not None:
        old = json.loads(args.against.read_text())["ids"]
        document["differs"] = {
            name: [i for i, ids in enumerate(found[name]) if ids != old[name][i]] for name in found
        }
        print(json.dumps(document["differs"]))
    if args.out:
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
        head = {k: v for k, v in document.items() if k != "ids"}
        args.out.write_text(json.dumps(head)[:-1] + ', "ids": {\n' + lines + "\n}}\n")


def speed(args: argparse.Namespace) -> None:
    """Time two commits in turn: which goes first changes with every prompt."""
    from measure import report

    results = []
    for dtype in args.dtypes:
        workers = {"old": Process(args, args.old, dtype), "new": Process(args, None, dtype)}
        for size in args.batches:
            texts = questions(args.prompts * size)
            for mode in args.modes:
                rates: dict[str, list[float]] = {name: [] for name in workers}
                for turn in range(-1, args.prompts):  # the first is to warm up
                    start = max(turn, 0) * size
                    names = list(workers) if turn % 2 else list(workers)[::-1]
                    for name in names:
                        some = texts[start : start + size]
                        done = workers[name].decode(mode, some, None, NEW_TOKENS)
                        if turn >= 0:
                            count = sum(map(len, done["ids"]))
                            rates[name].append(count / done["seconds"])
                ratios = [new / old for new, old in zip(rates["new"], rates["old"], strict=True)]
                results.append({
                    "dtype": dtype, "batch": size, "mode": mode,
                    "old_tokens_per_second": round(statistics.median(rates["old"]), 2),
                    "new_tokens_per_second": round(statistics.median(rates["new"]), 2),
                    "speedup_p20_p50_p80": [
                        round(q, 3)
                        for q in (lambda d: (d[1], d[4], d[7]))(
                            statistics.quantiles(ratios, n=10, method="inclusive")
                        )
                    ],
                })  # fmt: skip
                print(results[-1], file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.close()
    report(
        "a commit against an older one, interleaved", args, results, prompts=args.prompts,
        new_tokens=NEW_TOKENS,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("artifact", "tokens", "speed", "worker"))
    parser.add_argument("model", help="a model folder or hub id")
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--source", type=Path, help="tokens: src folder of the commit to run")
    parser.add_argument("--against", type=Path, help="tokens: what another commit has stored")
    parser.add_argument("--old", type=Path, help="speed: src folder of the older commit")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="speed: which")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="speed: which")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="speed: which")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "artifact":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
        make_artifact(model, AutoTokenizer.from_pretrained(args.model), args.artifact)
        return
    {"tokens": tokens, "speed": speed, "worker": serve}[args.what](args)


if __name__ == "__main__":
    main()
