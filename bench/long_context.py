"""Long contexts: time and memory of a generated token against the length of the context.

A tiny model with 32,768 positions, so that what the loop adds to attention shows, or the model of a
folder; beside it HF generate at the same lengths. In a second run of each, every tensor that an
operation makes is looked at: how many rows of logits there are at most, and how many entries the
largest mask has.

    python bench/long_context.py --out bench/results/long_context.json
    python bench/long_context.py --model $(python scripts/weights.py) --lengths 1024 4096 8000 \\
        --new-tokens 32 --out bench/results/long_context_smollm2.json
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import write
from soak import free_memory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tide
from tide.cli.loading import processor
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate

VOCABULARY, POSITIONS, HIDDEN, LAYERS = 1009, 32_768, 64, 6  # a prime: no other size is a multiple
RANDOM = f"random, {LAYERS} layers of {HIDDEN}, {VOCABULARY} tokens"


class Largest(TorchDispatchMode):
    """Looks at every tensor that an operation makes.

    Args:
        model: its weights are not counted.
        length: of the context.

    Attributes:
        logits: most rows of a tensor over the vocabulary.
        mask: most entries of a tensor with more than one row over at least half of the context.
    """

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        # Of states inside the model, which masks are not.
        self._widths = {size for p in model.parameters() for size in p.shape}
        self._vocabulary, self._length = model.config.vocab_size, length
        self.logits = self.mask = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                self._look(tensor)
        return out

    def _look(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights:
            return
        entries = min(tensor.numel(), storage.nbytes() // tensor.element_size())
        if tensor.shape[-1] == self._vocabulary:
            self.logits = max(self.logits, entries // self._vocabulary)
        elif (
            tensor.ndim > 1 and tensor.shape[-2] > 1 and tensor.shape[-1] >= self._length // 2
            and tensor.shape[-1] not in self._widths
        ):  # fmt: skip
            self.mask = max(self.mask, entries)


def long_model(positions: int = POSITIONS) -> Any:
    """A tiny random model of many positions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=positions,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def methods(model: Any, **settings: Any) -> dict[str, Callable[..., Any]]:
    """HF generate, and an engine in each mode; half of the tokens exit, at a third of the depth."""
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    exits = [Checkpoint(layers // 3 - 1, ExitHead("identity", hidden))]
    made = Artifact(fingerprint(model, locate(model)), hidden, exits)
    found: dict[str, Callable[..., Any]] = {"HF generate": model.generate}
    for name, config in (
        ("off", TIDEConfig(mode="off")),
        ("lossless", TIDEConfig(mode="lossless")),
        ("exit", TIDEConfig(mode="exit", min_layers=0)),
    ):
        config = config.with_(share_recycled=False)  # or a repeat would draft from the one before
        policy = ScriptedPolicy.share(0.5) if name == "exit" else None
        engine = TIDE(model, made, config.with_(**settings), policy=policy, check=False)
        found[name] = engine.generate
    return found


def prompt(length: int) -> torch.Tensor:
    """Random token ids, `[1, length]`."""
    draw = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (1, length), generator=draw)


def measure(run: Callable[..., Any], length: int, new: int) -> tuple[float, float]:
    """Milliseconds of a token after a context, and megabytes of all."""
    ids, times = prompt(length), []

    class Clock:
        """A streamer: when tokens come."""

        def put(self, value: Any) -> None:
            times.extend([time.perf_counter()] * value.numel())

        def end(self) -> None:
            pass

    free_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    run(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=Clock())
    peak, decoding = _memory("VmHWM") - before, times[length:]
    return 1e3 * (decoding[-1] - decoding[0]) / (len(decoding) - 1), peak


def compare(
    model: Any, some: Mapping[str, Callable[..., Any]], length: int, new: int, repeats: int
) -> list[dict[str, Any]]:
    """All methods in turn, some times: medians, and the largest tensors of each."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in some}
    for _ in range(repeats):
        for name, run in some.items():
            found[name].append(measure(run, length, new))
    rows = []
    for name, run in some.items():
        with Largest(model, length) as largest:
            run(prompt(length), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        milliseconds, megabytes = zip(*found[name], strict=True)
        rows.append(
            {
                "method": name, "context": length,
                "ms_per_token": round(statistics.median(milliseconds), 3),
                "ms_per_token_range": [round(min(milliseconds), 3), round(max(milliseconds), 3)],
                "peak_mb": round(statistics.median(megabytes), 1),
                "rows_of_logits": largest.logits, "entries_of_mask": largest.mask,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _memory(what: str) -> float:
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder; otherwise a tiny random model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 32_000])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, results = long_model(), []
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    some = methods(model)
    for run in some.values():  # warm up
        run(prompt(64), max_new_tokens=8, do_sample=False)
    for length in args.lengths:
        results += compare(model, some, length, args.new_tokens, args.repeats)
    document = {
        "what": "time, memory and largest tensors against the length of the context",
        "conditions": {
            "model": Path(args.model).name if args.model else RANDOM,
            "positions": model.config.max_position_embeddings,
            "new_tokens": args.new_tokens, "repeats": args.repeats, "threads": args.threads,
            "processor": processor(), "torch": torch.__version__, "tide": tide.__version__,
        },
        "results": results,
    }  # fmt: skip
    write(document, args.out)


if __name__ == "__main__":
    main()
