"""The pipeline `calibrate`: from a frozen model to an artifact, in stages that can be resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide.calibration.answers import Answers
from tide.calibration.choose import choose
from tide.calibration.collect import Collection, CollectPlan, process
from tide.calibration.components import FitPlan, fit_components
from tide.calibration.confidence import fit_confidence_model, fit_prefilter
from tide.calibration.costs import CANDIDATES, load_or_measure
from tide.calibration.data import load_prompts, split_documents
from tide.calibration.fit import HeadFit, RouterFit
from tide.calibration.replays import expected, fastest, record
from tide.calibration.report import (
    RISKS,
    SCORERS,
    UNTRAINED,
    data_record,
    exit_table,
    gate_table,
    head_table,
)
from tide.calibration.scores import require_parts
from tide.config import TIDEConfig
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.files import ONE_FILE, require_writable
from tide.exits.heads import ExitHead
from tide.exits.table import ContinuationTable
from tide.models.attach import attach
from tide.models.fingerprint import dtype_name, fingerprint, model_name
from tide.progress import Stages, bars

MAX_PROMPT = 512  # tokens
LABELS = ("agreement", "cosine")
_REPLAYED = 6  # choices of each number of exits that are replayed


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
    batch: int = 4,
    vocabulary: int = 8192,
    table_bytes: int = 4 << 20,
    new_tokens: int = 160,
    max_prompt: int = MAX_PROMPT,
    epochs: int = 2,
    seed: int = 0,
    work: str | Path | None = None,
    answers: Answers | None = None,
    quiet: bool = False,
) -> Artifact | None:
    """Fit exit heads, routers and a draft table for `model`, and save them.

    If interrupted, it resumes where it stopped when called again with the same arguments. Under
    `torchrun` or `accelerate launch` the processes share the collection, in a folder that all of
    them see; the first then fits alone, and the others return None.

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode; not changed.
        tokenizer: its tokenizer.
        save_path: a folder, or a `.safetensors` or `.pt` file.
        config: uses `checkpoint_interval`, `min_layers`, `router_bottleneck_dim`, `exit_strategy`,
            `calibration_samples`, `calibration_dataset` and `convergence_threshold`.
        data: prompts, if not `calibration_dataset`: a file, a data set, or the texts.
        on_policy: let the model answer the prompts and calibrate on its own answers.
        label: what a router learns: "agreement" of the token, or "cosine" as published.
        risk: share of wrong tokens for which thresholds are chosen. Not a guarantee: see certify.
        batch: sequences decoded together; exits are chosen for that many, and for one.
        vocabulary: tokens that exit heads read; 0 for all.
        table_bytes: most bytes of the draft table.
        new_tokens: longest answer.
        max_prompt: longest prompt.
        epochs: passes over the collected states when fitting heads.
        seed: of the split, the sampling and the fitting.
        work: folder for collected states; by default next to `save_path`, removed at the end.
        answers: answers the prompts in place of the model itself: see `tide.vllm.answers`.
        quiet: show no progress.

    Raises:
        DataError: if the data is not available.
    """
    config = config or TIDEConfig()
    save_path = Path(save_path).absolute()
    require_writable(save_path)
    work_folder = Path(work) if work is not None else save_path.with_name(save_path.name + ".work")
    runner = attach(model)
    n_layers, hidden_size = runner.n_layers, runner.config.hidden_size
    layers = checkpoint_layers(config, n_layers)
    _check(config, layers, n_layers, label, risk)
    if batch < 1 or vocabulary < 0:
        raise ConfigError(f"Got batch={batch} and vocabulary={vocabulary}: at least 1 and 0.")
    prompts = load_prompts(
        data if data is not None else config.calibration_dataset, config.calibration_samples
    )
    documents = split_documents(prompts, seed=seed)
    require_parts(np.array(documents.tuning_document))
    identity = fingerprint(model, runner.parts)
    collect_plan = CollectPlan(
        layers=layers,
        on_policy=on_policy,
        new_tokens=new_tokens,
        max_tokens=max_prompt,
        # A server answers this many prompts together, and more of them in less time.
        unit=32 if answers is None else 64,
        seed=seed,
        documents=documents.fingerprint,
        model=f"{identity.head}{identity.layers}",
        dtype=dtype_name(model),
        engine="transformers" if answers is None else type(answers).__name__,
    )
    fit_plan = FitPlan(
        vocabulary=vocabulary,
        candidates=min(CANDIDATES, vocabulary or CANDIDATES),
        table_bytes=table_bytes,
        strategy=config.exit_strategy,
        heads=HeadFit(epochs=epochs, seed=seed),
        routers=RouterFit(
            hidden_size=hidden_size,
            bottleneck=config.router_bottleneck_dim,
            label=label,
            convergence_threshold=config.convergence_threshold,
            seed=seed,
        ),
    )
    collection = Collection(work_folder, collect_plan, documents)
    stages = Stages()
    with bars(quiet) as bar, frozen(model), torch.random.fork_rng():
        with stages.stage("collect"):
            tick = bar("Answers and states")
            collection.collect(runner, tokenizer, answers=answers, progress=tick)
        if process()[0]:
            return None
        with stages.stage("costs"):
            costs, loops = load_or_measure(
                work_folder / "costs.json", runner, vocabulary, config, batch
            )
        fitted = fit_components(collection, runner, fit_plan, stages, bar)
        with stages.stage("gates"):
            tick = bar("Gates")
            tick(0, 1)
            scores = fitted.scores(collection)
            confidence_models = [fit_confidence_model(at, seed=seed) for at in scores]
            prefilters = [fit_prefilter(at, seed=seed) for at in scores]
            to_choose = [at.part("choose") for at in scores]
            choices = {
                at_risk: choose(to_choose, at_risk, costs, n_layers)
                for at_risk in sorted({*RISKS, risk})
            }
            tick(1, 1)
        with stages.stage("replays"):
            tick = bar("Replays")
            tick(0, 1)
            table = ContinuationTable(fitted.table)
            options = choose(to_choose, risk, costs, n_layers, keep=_REPLAYED)
            tried = record(collection, scores, n_layers, "choose")
            served = config if runner.takes_trees else config.with_(max_tree=0)
            chosen = fastest(options, tried, loops, table, served)
            if chosen not in choices[risk]:
                choices[risk].append(chosen)
            recording = record(collection, scores, n_layers, "report").only(chosen.layers)
            speeds = expected(chosen, recording, loops, table, served)
            tick(1, 1)
        untrained = fitted.scores(collection, [ExitHead("identity", hidden_size) for _ in layers])
    notes = {
        "model": model_name(model),
        "dtype": dtype_name(model),
        **data_record(collection),
        "on_policy": on_policy,
        "min_layers": config.min_layers,
        "label": label,
        "seed": seed,
        "heads": head_table(scores, untrained, collection, fitted.vocabulary),
        "costs": costs.to_dict(),
        "gates": [
            *gate_table("identity", untrained, UNTRAINED, costs, n_layers),
            *gate_table(config.exit_strategy, scores, SCORERS, costs, n_layers),
        ],
        "exits": exit_table(choices, chosen, scores, costs, n_layers),
        "loop_costs": [at.to_dict() for at in loops],
        "expected": speeds,
        "risk": risk,
        "seconds": stages.seconds,
        "peak_mb": stages.peak_mb,
    }
    index = {layer: i for i, layer in enumerate(layers)}
    artifact = Artifact(
        fingerprint=identity,
        hidden_size=hidden_size,
        checkpoints=[
            Checkpoint(
                layer=layer,
                head=fitted.heads[index[layer]],
                router=fitted.routers[index[layer]],
                thresholds=thresholds,
                confidence_model=confidence_models[index[layer]],
                prefilter=prefilters[index[layer]],
            )
            for layer, thresholds in zip(chosen.layers, chosen.thresholds, strict=True)
        ],
        config=config,
        vocabulary=fitted.vocabulary,
        candidates=fitted.candidates,
        table=fitted.table,
        record=notes,
        recording=recording,
    )
    if save_path.suffix in ONE_FILE:
        artifact.save(save_path)
    else:
        artifact.save_pretrained(save_path)
    if work is None:
        shutil.rmtree(work_folder)
    return artifact


def _check(
    config: TIDEConfig, layers: Sequence[int], n_layers: int, label: str, risk: float
) -> None:
    """Refuse what cannot be calibrated, before anything is collected."""
    if not layers:
        raise ConfigError(
            f"checkpoint_interval={config.checkpoint_interval} and min_layers={config.min_layers} "
            f"allow no checkpoint before the last of {n_layers} layers. Lower them."
        )
    if label not in LABELS:
        raise ConfigError(f"label is {label!r}; it must be one of {', '.join(LABELS)}.")
    if not 0 < risk < 1:
        raise ConfigError(f"risk is {risk!r}; it must be between 0 and 1.")


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Let no gradient reach the model's own weights, and restore their `requires_grad` after."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
