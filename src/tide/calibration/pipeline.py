"""Gives `calibrate`: from a frozen model to an artifact, in stages that can be interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tide.calibration.collect import Answers, Collection, CollectPlan, process
from tide.calibration.costs import Costs, measure_costs
from tide.calibration.data import load_texts, split_documents, text_key
from tide.calibration.fit import as_served, choose_vocabulary, coverage, fit_heads, fit_router
from tide.calibration.gates import (
    Choice,
    Scores,
    choose,
    fit_blend,
    follow,
    gate_documents,
    in_part,
    observe,
    one_judge,
)
from tide.calibration.progress import Stages, bars
from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.errors import ConfigError
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.files import write_whole
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.models.attach import attach
from tide.models.depth import DepthRunner
from tide.models.fingerprint import dtype_name, fingerprint, model_name

RISKS = (0.01, 0.02, 0.05)
LABELS = ("agreement", "cosine")
# Name of a gate, the judge that decides, and whether a router goes first.
JUDGES = (
    ("router", "router", False),
    ("top probability", "top_probability", False),
    ("two stages", "top_probability", True),
    ("blend", "blend", False),
    ("router, then blend", "blend", True),
)


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
    table_bytes: int = 4 << 20,
    new_tokens: int = 160,
    max_prompt: int = 512,
    epochs: int = 2,
    seed: int = 0,
    work: str | Path | None = None,
    answers: Answers | None = None,
    quiet: bool = False,
) -> Artifact | None:
    """Fit exit heads, routers and a draft table for `model`, and save them.

    Interrupted, it goes on where it stopped when it is called again with the same arguments. Under
    `torchrun` or `accelerate launch` the processes share the collection, in a folder that all of
    them see; the first then fits alone, and the others return None.

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
        table_bytes: most bytes of the draft table.
        new_tokens: longest answer.
        max_prompt: longest prompt.
        epochs: passes over the collected states when fitting heads.
        seed: of the split, the sampling and the fitting.
        work: folder for collected states; by default beside `save_path`, removed at the end.
        answers: who answers the prompts, if not the model itself: see `tide.vllm.answers`.
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
    _check(config, layers, runner.n_layers, label, risk)
    texts = load_texts(
        data if data is not None else config.calibration_dataset, config.calibration_samples
    )
    documents = split_documents(texts, seed=seed)
    identity = fingerprint(model, parts)
    plan = CollectPlan(
        layers, on_policy, new_tokens, max_prompt, 0.7, 32, 32, seed, documents.fingerprint,
        f"{identity.head}{identity.layers}", dtype_name(model),
        "transformers" if answers is None else type(answers).__name__,
    )  # fmt: skip
    collection = Collection(work_folder, plan)
    stages = Stages()
    with bars(quiet) as bar, runner, frozen(model), torch.random.fork_rng():
        with stages.stage("collect"):
            tick = bar("Answers and states")
            collection.collect(runner, tokenizer, documents, answers=answers, progress=tick)
        if process()[0]:
            return None
        with stages.stage("costs"):
            costs = _costs(work_folder / "costs.json", runner, vocabulary, config)
        with stages.stage("vocabulary and table"):
            chosen = None
            if vocabulary:
                chosen = choose_vocabulary(collection, vocabulary, text.vocab_size)
            readout = Readout(parts.norm, parts.head, text, chosen)
            table = build_table(collection.answers("fit"), text.vocab_size, budget=table_bytes)
        with stages.stage("heads"):
            heads = fit_heads(
                collection, readout, [config.exit_strategy] * len(layers), text.hidden_size,
                epochs=epochs, seed=seed, progress=bar("Exit heads"),
            )  # fmt: skip
        with stages.stage("routers"):
            routers, tick = [], bar("Routers")
            served = as_served(heads, readout)
            stop_on = [
                torch.from_numpy(in_part(numbers, "fit")) for numbers in gate_documents(collection)
            ]
            for i, head in enumerate(served):
                tick(i, len(layers))
                routers.append(
                    fit_router(
                        collection, readout, head, i, text.hidden_size,
                        config.router_bottleneck_dim, stop_on, label=label,
                        convergence_threshold=config.convergence_threshold, seed=seed,
                    )
                )  # fmt: skip
            tick(len(layers), len(layers))
        with stages.stage("gates"):
            tick = bar("Gates")
            tick(0, 1)
            scores = observe(collection, readout, served, routers, ContinuationTable(table))
            blends = [fit_blend(at, seed=seed) for at in scores]
            choices = {
                at_risk: choose([s.part("choose") for s in scores], at_risk, costs, runner.n_layers)
                for at_risk in sorted({*RISKS, risk})
            }
            wanted = best(choices[risk])
            tick(1, 1)
        # Routers were fitted to the other heads, so of the judges only these heads count.
        identities = [ExitHead("identity", text.hidden_size) for _ in layers]
        identities = as_served(identities, readout)
        plain = observe(collection, readout, identities, routers, ContinuationTable(table))
        record = {
            "model": model_name(model),
            "dtype": dtype_name(model),
            "documents": {"fit": len(documents.fit), "gate": len(documents.gate),
                          "certify": len(documents.certify), "fingerprint": documents.fingerprint},
            "tokens": {"fit": sum(map(len, collection.answers("fit"))),
                       "gate": len(scores[0].right)},
            "used": [text_key(text) for text in (*documents.fit, *documents.gate)],
            "on_policy": on_policy,
            "label": label,
            "seed": seed,
            "heads": {
                "layers": list(layers),
                "agreement": [float(at.right.mean()) for at in scores],
                "identity": [float(at.right.mean()) for at in plain],
                "coverage": 1.0 if chosen is None else coverage(collection, "gate", chosen),
            },
            "costs": costs.to_dict(),
            "gates": [
                *gate_table("identity", plain, JUDGES[1:2], costs, runner.n_layers),
                *gate_table(config.exit_strategy, scores, JUDGES, costs, runner.n_layers),
            ],
            "exits": {
                str(at_risk): [
                    {**report(c, scores, costs, runner.n_layers), "best": c == best(found)}
                    for c in found
                ]
                for at_risk, found in choices.items()
            },
            "risk": risk,
            "seconds": stages.seconds,
            "peak_mb": stages.peak_mb,
        }  # fmt: skip
    by_layer = {layer: i for i, layer in enumerate(layers)}
    artifact = Artifact(
        identity,
        text.hidden_size,
        [
            Checkpoint(layer, heads[i], routers[i], gate, blends[i])
            for layer, gate in zip(wanted.layers, wanted.gates, strict=True)
            for i in (by_layer[layer],)
        ],
        config,
        chosen,
        table,
        record,
    )
    if save_path.suffix in (".pt", ".safetensors"):
        artifact.save(save_path)
    else:
        artifact.save_pretrained(save_path)
    if work is None:
        shutil.rmtree(work_folder)
    return artifact


def best(choices: Sequence[Choice]) -> Choice:
    """The choice with the least expected time."""
    return max(choices, key=lambda choice: choice.speedup)


def _check(
    config: TIDEConfig, layers: Sequence[int], n_layers: int, label: str, risk: float
) -> None:
    """Refuse what cannot be calibrated, before anything is collected."""
    if not layers:
        raise ConfigError(
            f"checkpoint_interval={config.checkpoint_interval} and min_layers={config.min_layers} "
            f"leave no checkpoint before the last of {n_layers} layers. Lower them."
        )
    if config.exit_strategy == "tail":
        raise ConfigError(
            "exit_strategy='tail' is for experiments and is not calibrated: its layers run before "
            "any gate can tell whether they pay (docs/log.md). Use 'affine' or 'identity'."
        )
    if label not in LABELS:
        raise ConfigError(f"label is {label!r}; it must be one of {', '.join(LABELS)}.")
    if not 0 < risk < 1:
        raise ConfigError(f"risk is {risk!r}; it must be between 0 and 1.")


def _costs(path: Path, runner: DepthRunner, vocabulary: int, config: TIDEConfig) -> Costs:
    """What layers and heads cost; measured once, so that a calibration goes on as it began."""
    asked = {
        "vocabulary": vocabulary,
        "bottleneck": config.router_bottleneck_dim,
        "strategy": config.exit_strategy,
    }
    if path.exists():
        known = json.loads(path.read_text())
        if known["asked"] == asked:
            return Costs(**known["costs"])
    text, parts = runner.config, runner.parts
    some = torch.arange(min(vocabulary, text.vocab_size)) if vocabulary else None
    found = measure_costs(
        runner,
        Readout(parts.norm, parts.head, text, some),
        ExitHead(config.exit_strategy, text.hidden_size),
        TokenRouter(text.hidden_size, config.router_bottleneck_dim),
    )
    note = json.dumps({"asked": asked, "costs": found.to_dict()})
    write_whole(path, lambda scratch: scratch.write_text(note))
    return found


def report(choice: Choice, scores: Sequence[Scores], costs: Costs, n_layers: int) -> dict[str, Any]:
    """What a choice does on documents that were used neither to fit nor to choose, as JSON."""
    held_out = [s.part("report") for s in scores if s.layer in choice.layers]
    found = follow(held_out, choice.gates, costs, n_layers).to_dict()
    return {**found, "wrong_where_chosen": choice.wrong}


def gate_table(
    head: str,
    scores: Sequence[Scores],
    judges: Sequence[tuple[str, str, bool]],
    costs: Costs,
    n_layers: int,
) -> list[dict[str, Any]]:
    """Each judge alone at each checkpoint: its AUC, and what leaves at a few risks, held out."""
    rows = []
    for at in scores:
        to_choose, to_report = at.part("choose"), at.part("report")
        for name, judge, veto in judges:
            row: dict[str, Any] = {
                "layer": at.layer, "head": head, "gate": name, "auc": to_report.auc(judge),
            }  # fmt: skip
            for risk in RISKS:
                picked = one_judge(to_choose, judge, risk, costs, n_layers, veto=veto)
                found = follow([to_report], picked.gates, costs, n_layers)
                row[str(risk)] = {
                    "leave": found.leave,
                    "wrong": found.wrong,
                    "depth_saved": found.depth_saved,
                    "speedup": found.speedup,
                }
            rows.append(row)
    return rows


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
