"""Gives `calibrate`: from a frozen model to an artifact, in stages that can be interrupted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from tide.calibration.collect import Collection, CollectPlan
from tide.calibration.costs import measure_costs
from tide.calibration.data import load_texts, split_documents
from tide.calibration.fit import agreement, choose_vocabulary, coverage, fit_heads, fit_router
from tide.calibration.gates import best_gate, score
from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.heads import ExitHead, Readout
from tide.models.attach import attach
from tide.models.fingerprint import fingerprint

RISKS = (0.01, 0.02, 0.05)


def checkpoint_layers(config: TIDEConfig, n_layers: int) -> tuple[int, ...]:
    """Checkpoints every `checkpoint_interval` layers from `min_layers` on; never the last layer."""
    ends = range(config.checkpoint_interval, n_layers, config.checkpoint_interval)
    return tuple(end - 1 for end in ends if end >= max(1, config.min_layers))


def calibrate(
    model: Any,
    tokenizer: Any,
    save_path: str | Path = "router.pt",
    config: TIDEConfig | None = None,
    *,
    data: str | Path | Iterable[str] | None = None,
    on_policy: bool = True,
    label: str = "agreement",
    risk: float = 0.02,
    vocabulary: int = 8192,
    new_tokens: int = 160,
    max_prompt: int = 512,
    epochs: int = 2,
    seed: int = 0,
    work: str | Path | None = None,
    quiet: bool = False,
) -> Artifact:
    """Fit exit heads, routers and a draft table for `model`, and save them.

    Interrupted, it goes on where it stopped when it is called again with the same arguments.

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode; not changed.
        tokenizer: its tokenizer.
        save_path: a folder, or a `.safetensors` or `.pt` file.
        config: `checkpoint_interval`, `min_layers`, `router_bottleneck_dim`, `exit_strategy`,
            `calibration_samples`, `calibration_dataset` and `convergence_threshold` count here.
        data: prompts, if not `calibration_dataset`: a file, a data set, or the texts.
        on_policy: let the model answer the prompts and calibrate on its own answers.
        label: what a router learns: "agreement" of the token, or "cosine" as published.
        risk: share of wrong tokens at which thresholds are chosen. Not a promise: see certify.
        vocabulary: tokens that exit heads read; 0 for all.
        new_tokens: longest answer.
        max_prompt: longest prompt.
        epochs: passes over the collected states when fitting heads.
        seed: of the split, the sampling and the fitting.
        work: folder for collected states; by default beside `save_path`, removed at the end.
        quiet: show no progress.

    Raises:
        DataError: if the data cannot be had.
    """
    config = config or TIDEConfig()
    save_path = Path(save_path)
    work_folder = Path(work) if work is not None else save_path.with_name(save_path.name + ".work")
    runner = attach(model)
    parts, text = runner.parts, runner.config
    layers = checkpoint_layers(config, runner.n_layers)
    texts = load_texts(
        data if data is not None else config.calibration_dataset, config.calibration_samples
    )
    documents = split_documents(texts, seed=seed)
    identity = fingerprint(model, parts)
    plan = CollectPlan(
        layers, on_policy, new_tokens, max_prompt, 0.7, 32, 16, seed, documents.fingerprint,
        f"{identity.head}{identity.layers}",
    )  # fmt: skip
    collection = Collection(work_folder, plan)
    seconds: dict[str, float] = {}
    with _bars(quiet) as bars, runner, frozen(model):
        with _stage(seconds, "collect"):
            collection.collect(runner, tokenizer, documents, progress=bars("Answers and states"))
        with _stage(seconds, "vocabulary"):
            chosen = (
                choose_vocabulary(collection, vocabulary, text.vocab_size) if vocabulary else None
            )
            readout = Readout(parts.norm, parts.head, text, chosen)
        with _stage(seconds, "heads"):
            strategies = [config.exit_strategy] * len(layers)
            heads = fit_heads(
                collection, readout, strategies, text.hidden_size, epochs=epochs, seed=seed,
                progress=bars("Exit heads"),
            )  # fmt: skip
        with _stage(seconds, "routers"):
            routers, bar = [], bars("Routers")
            for i in range(len(layers)):
                bar(i, len(layers))
                routers.append(
                    fit_router(
                        collection, readout, heads, i, text.hidden_size,
                        config.router_bottleneck_dim, label=label,
                        convergence_threshold=config.convergence_threshold, seed=seed,
                    )
                )  # fmt: skip
            bar(len(layers), len(layers))
        with _stage(seconds, "gates"):
            scores = score(collection, "gate", readout, heads, routers)
            costs = measure_costs(runner, readout, routers[0])
            choices = {r: [best_gate(s, r, costs, runner.n_layers) for s in scores] for r in RISKS}
            wanted = [best_gate(s, risk, costs, runner.n_layers) for s in scores]
            best = max(range(len(layers)), key=lambda i: wanted[i].speedup)
        identities = [ExitHead("identity", text.hidden_size) for _ in layers]
        record = {
            "documents": {"fit": len(documents.fit), "gate": len(documents.gate),
                          "certify": len(documents.certify), "fingerprint": documents.fingerprint},
            "on_policy": on_policy,
            "label": label,
            "seed": seed,
            "layers": list(layers),
            "agreement": {
                "split": "gate",
                "head": agreement(collection, "gate", readout, heads),
                "identity": agreement(collection, "gate", readout, identities),
            },
            "auc": [s.auc for s in scores],
            "coverage": 1.0 if chosen is None else coverage(collection, "gate", chosen),
            "costs": costs.to_dict(),
            "choices": {str(r): [c.to_dict() for c in row] for r, row in choices.items()},
            "chosen": wanted[best].to_dict(),
            "seconds": {name: round(s, 1) for name, s in seconds.items()},
        }  # fmt: skip
        table = build_table(list(collection.answers("fit")), text.vocab_size)
    artifact = Artifact(
        identity,
        text.hidden_size,
        [Checkpoint(layers[best], heads[best], routers[best], wanted[best].gate)],
        config,
        chosen,
        table,
        record,
    )
    artifact.save(save_path)
    if work is None:
        shutil.rmtree(work_folder)
    return artifact


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """No gradient reaches the model's own weights; what they asked for before is put back."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def _stage(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


@contextmanager
def _bars(quiet: bool) -> Iterator[Any]:
    """Progress bars with the time remaining, one per stage."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        disable=quiet,
    ) as shown:  # fmt: skip

        def bar(name: str) -> Any:
            task = shown.add_task(name, total=None)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield bar
