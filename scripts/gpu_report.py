"""One command for whoever has a GPU: what works on it, and how fast, as one JSON and one page.

    python scripts/gpu_report.py --model Qwen/Qwen3-8B --data prompts.jsonl -o gpu_report
    python scripts/gpu_report.py --device cpu --tiny -o somewhere     # what CI runs

Each part is written when it is done; the same command again goes on with what is missing.
`--again NAME` runs a part once more. What a part prints is in its own file beside the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
NEEDS_GPU = "there is no GPU"
VLLM = (("drafts", "drafts"), ("exits", "calibrated exits"))
# Parts that load a model here. On a GPU each has a process of its own, whose end frees the memory.
LOADING = ("families", "equality", "published")


class Skipped(Exception):  # noqa: N818
    """A part cannot run here, for a reason."""


def command(args: argparse.Namespace, name: str, *words: str, **environment: str) -> str:
    """Run a command of ours; what it prints goes to a file, and what is no error comes back."""
    log = args.out / f"{name}.txt"
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment}, check=False,
    )  # fmt: skip
    log.write_text(ran.stdout + ran.stderr)
    if ran.returncode:
        end = (ran.stdout + ran.stderr)[-600:]
        raise RuntimeError(f"{' '.join(words[:3])} failed; see {log.name}: {end}")
    return ran.stdout


def tide(args: argparse.Namespace, name: str, *words: str) -> Any:
    """Run `tide`; its JSON."""
    return json.loads(command(args, name, "-m", "tide.cli", *words, "--json").splitlines()[-1])


def environment(args: argparse.Namespace) -> Any:
    return tide(args, "environment", "env")


def kernels(args: argparse.Namespace) -> Any:
    """Every operation against the reference; on a GPU, timed too."""
    timed = ["--time"] if args.device == "cuda" else []
    return tide(args, "kernels", "kernels", "--check", *timed)


def kernel_tests(args: argparse.Namespace) -> Any:
    """The tests of the kernels, on the device or in the interpreter."""
    chosen = ["-k", "anything or nothing"] if args.tiny else ["tests/test_kernels_engine.py"]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels.py", *chosen]
    interpreted = {"TRITON_INTERPRET": "1"} if args.device == "cpu" else {}
    return {"result": command(args, "kernel_tests", *words, **interpreted).splitlines()[-1]}


def families(args: argparse.Namespace) -> Any:
    """Every family on the device: self-check, and lossless tokens equal to `generate`'s."""
    import torch

    from tide.engine import TIDE
    from tiny import FAMILIES, tiny_model

    found = {}
    for family in ["llama", "gpt2"] if args.tiny else FAMILIES:
        model = tiny_model(family).to(args.device)
        ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
        given = {
            "input_ids": ids.to(args.device), "attention_mask": torch.ones_like(ids).to(args.device)
        }  # fmt: skip
        given |= {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        try:
            same = torch.equal(TIDE(model).generate(**given), model.generate(**given))
            found[family] = "equal" if same else "DIFFERENT TOKENS"
        except Exception as error:  # one family must not hide the others
            found[family] = f"{type(error).__name__}: {error}"
    return found


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    from tide.cli.loading import load

    words = argparse.Namespace(
        model=args.model, dtype=args.dtype, device=args.device, threads=None
    )  # fmt: skip
    return load(words)


def equality(args: argparse.Namespace) -> Any:
    """Self-check, then lossless against HF `generate`, in float32 and in the model's dtype."""
    import torch

    from tide.engine import TIDE

    model, tokenizer = _load(args)
    results = {}
    for dtype in dict.fromkeys((model.dtype, torch.float32)):
        try:
            model = model.to(dtype)
        except torch.OutOfMemoryError:
            results[str(dtype)[6:]] = "out of memory"
            continue
        engine = TIDE(model)  # raises where the self-check fails
        same, first = 0, []
        texts = _texts(args)[: 2 if args.tiny else 16]
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids.to(args.device)
            given = {"attention_mask": torch.ones_like(ids), "do_sample": False}
            given |= {"max_new_tokens": 8 if args.tiny else 96}
            own, expected = (e.generate(ids, **given)[0] for e in (engine, model))
            length = min(len(own), len(expected))
            differ = (own[:length] != expected[:length]).nonzero()
            same += torch.equal(own, expected)
            first += [int(differ[0]) - ids.shape[1]] if len(differ) else []
        name = str(dtype)[6:]
        results[name] = {"exact_match_outputs": f"{same}/{len(texts)}", "first_differences": first}
    return results


def _texts(args: argparse.Namespace) -> list[str]:
    from tide.calibration.data import load_by_category

    return [prompt.text for prompt in load_by_category(args.data, 64)]


def calibrate(args: argparse.Namespace) -> Any:
    """An artifact for the model, which the next parts use."""
    few = "--samples 32 --new-tokens 8 --vocabulary 0 --interval 2 --min-layers 2 --bottleneck 8"
    small = (few if args.tiny else "--samples 600").split()
    words = [args.model, "--data", args.data, "--device", args.device, "--dtype", args.dtype]
    began = time.perf_counter()
    command(args, "calibrate", "-m", "tide.cli", "calibrate", *words, *small, "-o",
            str(args.out / "artifact"))  # fmt: skip
    return {"seconds": round(time.perf_counter() - began, 1)}


def bench(args: argparse.Namespace) -> Any:
    """Every mode, compiled too (CUDA graphs on a GPU), against HF `generate`, compiled or not."""
    small = ["--samples", "1", "--new-tokens", "4"] if args.tiny else ["--samples", "32"]
    words = [args.model, str(args.out / "artifact"), "--data", args.data, "--device", args.device]
    compiled = [] if args.tiny else ["--compile"]
    found = tide(args, "bench", "bench", *words, "--dtype", args.dtype, *small, *compiled)
    return [
        {key: r[key] for key in ("method", "speedup", "speedup_over_eager", "ms_per_token")}
        for r in found["results"]
    ]


def published(args: argparse.Namespace) -> Any:
    """Prefill, and tokens per second at batch 1 and 8, as the published tables have them."""
    import torch

    from tide.config import TIDEConfig
    from tide.engine import TIDE

    model, tokenizer = _load(args)
    artifact = args.out / "artifact"
    # Sequences and rounds are the same, and must not draft for each other.
    lossless = TIDEConfig(mode="lossless", share_recycled=False)
    exits = lossless.with_(mode="exit", exit_threshold=0.85, min_layers=2 if args.tiny else 8)
    methods = {
        "HF generate": model,
        "lossless": TIDE(model, artifact, lossless),
        "exit, threshold 0.85": TIDE(model, artifact, exits),
    }
    text = " ".join(_texts(args)[:4])
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : 16 if args.tiny else 512]
    rounds, new = (1, 4) if args.tiny else (7, 128)
    found = []
    for batch in (1, 8):
        given = {"input_ids": ids.repeat(batch, 1).to(args.device), "do_sample": False}
        given |= {"attention_mask": torch.ones_like(given["input_ids"]), "eos_token_id": None}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for _ in range(rounds + 1):  # the first warms up; methods take turns
            for name, method in methods.items():
                took = []
                for tokens in (1, new):
                    _wait(args)
                    began = time.perf_counter()
                    method.generate(**given, max_new_tokens=tokens)
                    _wait(args)
                    took.append(time.perf_counter() - began)
                seconds[name].append((took[0], took[1]))
        for name, times in seconds.items():
            prefill, whole = (sorted(t[i] for t in times[1:])[rounds // 2] for i in (0, 1))
            found.append({
                "batch": batch, "method": name, "prefill_ms": round(1e3 * prefill, 2),
                "tokens_per_second": round(batch * (new - 1) / max(whole - prefill, 1e-9), 1),
            })  # fmt: skip
    return found


def _wait(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda":
        torch.cuda.synchronize()


def vllm(args: argparse.Namespace) -> Any:
    """vLLM with and without drafts and exits."""
    if args.device != "cuda":
        raise Skipped(NEEDS_GPU)
    found = {}
    for what, method in VLLM:
        out = args.out / f"vllm_{what}.json"
        command(args, f"vllm_{what}", *vllm_command(args, what, method, out))
        found[what] = json.loads(out.read_text())["results"]
    return found


def vllm_command(args: argparse.Namespace, what: str, method: str, out: Path) -> list[str]:
    """Two engines, vLLM as it is and with one method of ours, each with its share of the memory."""
    return [
        "bench/vllm_speed.py", args.model, "--data", args.data, "--artifact",
        str(args.out / "artifact"), "--min-layers", "0", "--what", what, "--only", method,
        "--memory", "0.42", "--batch", "1", "8", "--rounds", "8", "3", "--out", str(out),
    ]  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "environment": environment,
    "kernels": kernels,
    "kernel_tests": kernel_tests,
    "families": families,
    "equality": equality,
    "calibrate": calibrate,
    "bench": bench,
    "published": published,
    "vllm": vllm,
}


def make_tiny(folder: Path) -> None:
    """A tiny random model with a tokenizer, and prompts for it."""
    from tiny import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = ["the quick brown fox jumps", "over the lazy dog again", "a b c d e f", "one two"]
    (folder / "prompts.txt").write_text(
        "\n".join(f"{i} {line}" for i in range(8) for line in lines)
    )


def page(report: dict[str, Any]) -> str:
    """The report as markdown."""
    conditions = report["conditions"]
    lines = ["# GPU report", "", *(f"- {name}: {value}" for name, value in conditions.items()), ""]
    absent = [f"- {name}: {part['skipped']}" for name, part in report["parts"].items()
              if "skipped" in part]  # fmt: skip
    failed = [name for name, part in report["parts"].items() if "error" in part]
    lines += ["## Skipped", "", *(absent or ["Nothing."]), ""]
    if conditions["device"] == "cpu":
        lines += [
            "**This report was made on a CPU. It proves nothing about a GPU:** kernels ran as the "
            "reference or in Triton's interpreter, and no figure is one of a GPU.", "",
        ]  # fmt: skip
    lines += ["## Failed", "", *(f"- {name}" for name in failed), *([] if failed else ["Nothing."])]
    for name, part in report["parts"].items():
        shown = part.get("result", part)
        lines += ["", f"## {name}", "", f"*{part['seconds']} s*", "", *_shown(shown)]
    return "\n".join(lines) + "\n"


def _shown(result: Any) -> list[str]:
    if isinstance(result, list) and result and isinstance(result[0], dict):
        heads = list(result[0])
        lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
        return lines + [f"| {' | '.join(str(r.get(h)) for h in heads)} |" for r in result]
    return ["```json", json.dumps(result, indent=1), "```"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a hub id or a folder")
    parser.add_argument("--data", default="starter", help="prompts, as `tide bench` takes them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, to try the kit")
    parser.add_argument("--again", nargs="+", choices=PARTS, default=[], metavar="NAME")
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu_report"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU. To try the kit without one: --device cpu --tiny")
    if args.tiny:
        make_tiny(args.out)
        args.model, args.dtype = str(args.out / "model"), "float32"
        args.data = str(args.out / "prompts.txt")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    conditions = {"model": Path(args.model).name, "dtype": args.dtype, "device": args.device,
                  "gpu": gpu, "tiny": args.tiny}  # fmt: skip
    file = args.out / "gpu_report.json"
    report: dict[str, Any] = {"conditions": conditions, "parts": {}}
    if file.exists():
        before = json.loads(file.read_text())
        if before["conditions"] != conditions:
            parser.error(f"{file} is of {before['conditions']}; choose another folder with --out")
        report = before
    for name, part in PARTS.items():
        known = report["parts"].get(name, {})
        if name not in args.again and ("result" in known or "skipped" in known):
            print(f"{name}: done before")
            continue
        began, found = time.perf_counter(), {}
        try:
            if args.device == "cuda" and name in LOADING:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    found["result"] = process.submit(part, args).result()
            else:
                found["result"] = part(args)
        except Skipped as reason:
            found["skipped"] = str(reason)
        except Exception as error:  # the other parts are still worth having
            found["error"] = f"{type(error).__name__}: {error}"
        found["seconds"] = round(time.perf_counter() - began, 1)
        report["parts"][name] = found
        for path, text in ((file, json.dumps(report, indent=1) + "\n"),
                           (args.out / "gpu_report.md", page(report))):  # fmt: skip
            scratch = path.with_suffix(".part")
            scratch.write_text(text)
            scratch.replace(path)
        print(f"{name}: {next(k for k in found)} ({found['seconds']} s)", flush=True)
    if any("error" in part for part in report["parts"].values()):
        raise SystemExit("Some parts failed; run the same command again to repeat them.")


if __name__ == "__main__":
    main()
