"""Exits chosen with drafts: by replays of the decode loop on answers of the tuning split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tide.calibration.choose import Choice
from tide.calibration.collect import Collection
from tide.calibration.scores import Scores, in_part
from tide.config import TIDEConfig
from tide.decode.player import Setting
from tide.decode.replay import replay, replay_ways, speedups, ways_of
from tide.exits.heads import SUCCESSORS
from tide.exits.recording import Recording
from tide.exits.table import ContinuationTable
from tide.models.costs import LoopCosts

_POSITIONS = 1536  # of a recording: a replay of so many takes one or two seconds
_LONGEST = 96  # tokens of an answer: more documents tell more than longer ones


def record(collection: Collection, scores: Sequence[Scores], n_layers: int, part: str) -> Recording:
    """The answers of the tuning split for `part`, up to `_POSITIONS` positions.

    The greedy ones, as they are served: sampled text repeats itself less, and is drafted worse.
    """
    units = enumerate(collection.texts_by_unit("tuning"))
    texts = [(*text, collection.plan.temperature_of(k) == 0) for k, unit in units for text in unit]
    lengths = np.array([len(tokens) - prompt for tokens, prompt, _ in texts])
    here = in_part(np.array(collection.documents.tuning_document), part) & (lengths > 0)
    greedy = here & [is_greedy for *_, is_greedy in texts]
    taken = greedy if greedy.any() else here
    inside = np.repeat(taken, lengths)
    answered = [text for text, take in zip(texts, taken, strict=True) if take]
    names = ("router", "prefilter", "confidence")
    following = torch.cat([unit[:, :SUCCESSORS] for unit in collection.top_tokens("tuning")])
    made = Recording(
        n_layers,
        tuple(at.layer for at in scores),
        [tokens for tokens, *_ in answered],
        [prompt for _, prompt, _ in answered],
        {name: np.stack([getattr(at, name)[inside] for at in scores]) for name in names},
        np.stack([at.correct[inside] for at in scores]),
        following.numpy()[inside],
    )
    return made.cut(_LONGEST).first(_POSITIONS)


def expected(
    choice: Choice,
    recording: Recording,
    loops: Sequence[LoopCosts],
    table: ContinuationTable,
    config: TIDEConfig,
) -> dict[str, dict[str, float]]:
    """Speed-ups of lossless, of exits alone and of both, by sequences of a batch."""
    setting = _with_exits(choice, config)
    return {
        str(at.sequences): speedups(replay_ways(recording, setting, loops[: k + 1], table))
        for k, at in enumerate(loops)
    }


def fastest(
    choices: Sequence[Choice],
    recording: Recording,
    loops: Sequence[LoopCosts],
    table: ContinuationTable,
    config: TIDEConfig,
) -> Choice:
    """The choice that makes decoding with exits and drafts fastest, over all sizes of batch."""

    def seconds(choice: Choice) -> float:
        setting, sizes = _with_exits(choice, config), [loops[: k + 1] for k in range(len(loops))]
        return math.prod(replay(recording, setting, some, table).seconds for some in sizes)

    return min(choices, key=seconds)


def _with_exits(choice: Choice, config: TIDEConfig) -> Setting:
    """A choice as it is replayed, whatever mode it will be served with."""
    both = ways_of(config.with_(exit_threshold=None))["both"]
    return Setting(both, choice.layers, choice.thresholds)
