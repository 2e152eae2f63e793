"""From an artifact to the exits of a model: loaded, checked, on the model's device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tide.config import TIDEConfig
from tide.decode.exit_stage import Exits
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.candidates import candidate_readout
from tide.exits.checkpoint import Checkpoint
from tide.exits.gate import ExitGate, OpenGate
from tide.exits.heads import Readout, SuccessorHead, TargetHead
from tide.exits.policy import ScriptedPolicy
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.models.compiled import CompiledRunner
from tide.models.fingerprint import fingerprint
from tide.models.runner import DepthRunner


class TreeWarning(UserWarning):
    """A model drafts chains although trees were wanted."""


def load_artifact(
    source: str | Path | Artifact | None, runner: DepthRunner, *, allow_mismatch: bool
) -> Artifact:
    """The artifact for a model, checked against it; an empty one if `source` is None."""
    identity, hidden_size = fingerprint(runner.model, runner.parts), runner.config.hidden_size
    if source is None:
        return Artifact(identity, hidden_size)
    made = source if isinstance(source, Artifact) else Artifact.from_pretrained(source)
    made.require(identity, force=allow_mismatch)
    made.require_sizes(hidden_size, runner.config.vocab_size)
    return made


def require_effect(config: TIDEConfig, threshold_scale: float | None) -> None:
    """Raise if a threshold scale was given and no calibrated threshold would be scaled."""
    fixed = config.mode in ("exit", "auto") and config.exit_threshold is not None
    if threshold_scale is not None and fixed:
        raise ConfigError(
            f"threshold_scale is {threshold_scale}, and scales the calibrated thresholds; got "
            f"exit_threshold={config.exit_threshold} in their place. Set exit_threshold=None."
        )


def _wanted_nodes(config: TIDEConfig) -> int:
    """Most nodes of a draft tree, where a model takes trees; 0 if no tree is drafted."""
    drafts = config.max_draft and set(config.drafts) - {"exit"}
    exact = config.mode != "off" and config.kv_cache_strategy == "deferred"
    return config.max_tree if drafts and exact else 0


def tree_nodes(config: TIDEConfig, runner: Any) -> int:
    """Most nodes of a draft tree; 0 where chains are drafted, or nothing is."""
    return _wanted_nodes(config) if runner.takes_trees else 0


def recycles(config: TIDEConfig, runner: Any) -> bool:
    """Whether full depth's predictions are drafted again, which is in trees."""
    return bool(tree_nodes(config, runner)) and "recycled" in config.drafts


def make_exits(
    runner: DepthRunner,
    artifact: Artifact,
    threshold_scale: float,
    policy: ScriptedPolicy | None,
    config: TIDEConfig,
) -> Exits:
    """The exits that are used, by depth.

    Checkpoints whose thresholds no token can reach are dropped: a gate that never lets a token
    exit would only cost time. So are all of them where exit heads would only draft and predictions
    are recycled: exit heads draft where nothing else does, and recycled predictions always draft.

    Args:
        threshold_scale: of the calibrated thresholds; see `Thresholds.scaled`.
        policy: decides in place of the artifact's gates, at every checkpoint.
    """
    parts = runner.parts
    table = ContinuationTable(artifact.table) if artifact.table else None
    checkpoints: list[Checkpoint] = []
    recycling = recycles(config, runner)
    unused = recycling and config.mode == "lossless" and policy is None
    if config.mode != "off" and not unused:
        # Copies: the caller's artifact may serve another engine, on another device.
        checkpoints = copy.deepcopy(artifact.checkpoints_from(config.min_layers))
    _check_layers(checkpoints, runner.n_layers, config)
    gates: list[ExitGate]
    kept: list[tuple[Checkpoint, Thresholds]] = []
    if policy is None:
        wanted = [_thresholds(c, config, threshold_scale) for c in checkpoints]
        kept = [(c, w) for c, w in zip(checkpoints, wanted, strict=True) if not w.unreachable]
        checkpoints = [checkpoint for checkpoint, _ in kept]
    # Without exits no part of the head is copied, and one that cannot be read in part will do.
    vocabulary = artifact.vocabulary if checkpoints else None
    readout = Readout(parts.norm, parts.head, runner.config, vocabulary)
    if policy is None:
        candidates = candidate_readout(readout, artifact.candidates if checkpoints else None)
        gates = [ExitGate.of(c, readout, w, candidates) for c, w in kept]
    else:
        gates = [OpenGate(c.head, readout) for c in checkpoints]
    for checkpoint in checkpoints:
        checkpoint.to(runner.input_device, runner.model.dtype)
    if _wanted_nodes(config) and not runner.takes_trees:
        warnings.warn(
            f"{runner.model.__class__.__name__} drafts chains only: in its self-check, a draft "
            "tree gave other states than the text does. The output is the same. Set max_tree=0 "
            "to silence this warning.",
            TreeWarning,
            stacklevel=3,
        )
    make_head = SuccessorHead if recycling else TargetHead
    target_head = make_head(Readout(parts.norm, parts.head, runner.config))
    for gate in gates:
        gate.fuse(compiled=isinstance(runner, CompiledRunner))
    target_head.readout.fuse()
    script = None if policy is None else policy.script
    return Exits(checkpoints, gates, readout, target_head, script, table)


def _thresholds(checkpoint: Checkpoint, config: TIDEConfig, threshold_scale: float) -> Thresholds:
    """The calibrated thresholds; in mode "exit", `exit_threshold` for the stage that decides.

    The stage that decides is the confidence model where there is one; else the exit head's top
    probability where it has a threshold or there is no router; else the router.
    """
    wanted, threshold = checkpoint.thresholds, config.exit_threshold
    if wanted != Thresholds() and (config.mode not in ("exit", "auto") or threshold is None):
        return wanted.scaled(threshold_scale)
    threshold = 0.85 if threshold is None else threshold
    if wanted.router is not None and wanted.router > 1:  # calibration found that no exit pays
        wanted = Thresholds()
    if checkpoint.confidence_model is not None:
        # What comes before the stage that decides is no stricter than it.
        before = None if wanted.prefilter is None else min(wanted.prefilter, threshold)
        return replace(wanted, confidence=threshold, prefilter=before)
    if checkpoint.router is None or wanted.top_probability is not None:
        return replace(wanted, top_probability=threshold)
    return Thresholds(router=threshold)


def _check_layers(checkpoints: Sequence[Checkpoint], depth: int, config: TIDEConfig) -> None:
    if config.mode == "exit" and not checkpoints:
        raise ConfigError(
            f"mode='exit' needs an exit, and the artifact has none from layer {config.min_layers} "
            "on. Calibrate the model, lower min_layers, or use mode='lossless'."
        )
    layers = [c.layer for c in checkpoints]
    if layers != sorted(set(layers)) or any(not 0 <= layer < depth - 1 for layer in layers):
        raise ConfigError(
            f"Checkpoints after layers {layers}; they must be ascending and before the last of "
            f"{depth} layers."
        )
