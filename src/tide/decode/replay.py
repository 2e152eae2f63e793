"""The replay: the decode loop over recorded answers, without the model, at measured costs.

The loop, the modes, the drafter and the draft sources are the real ones. Only the model is not: its
predictions are those of the recording, and a pass takes as long as such a pass was measured to
take. What full depth predicts after a rejected node of a tree is not recorded, and so not recycled.
A token that exits wrongly is counted and replaced by the recorded one, since nothing is
recorded of another text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tide.config import TIDEConfig
from tide.decode.player import Player, Setting
from tide.exits.recording import Recording
from tide.exits.table import ContinuationTable
from tide.models.costs import LoopCosts


@dataclass(frozen=True)
class Expected:
    """What a replay has found.

    Attributes:
        tokens: that were decoded.
        seconds: that it took, prompts not counted.
        exit_rate: share of the tokens that exited.
        error_rate: share of all tokens that exited with another token than full depth predicts.
        tokens_per_step: tokens of all sequences for each step of the loop.
    """

    tokens: int
    seconds: float
    exit_rate: float
    error_rate: float
    tokens_per_step: float


def replay(
    recording: Recording,
    setting: Setting,
    costs: Sequence[LoopCosts],
    table: ContinuationTable | None,
) -> Expected:
    """Decode recorded answers in batches, as large as the last of `costs`.

    What the host does between passes costs about as much in every mode, and is not counted.

    Args:
        costs: by sequences of a batch, from 1 on; those between are interpolated.
        table: the artifact's, for drafts.
    """
    player = Player(recording, setting, costs, table)
    size, documents = costs[-1].sequences, range(len(recording.prompts))
    # Whole batches only, if there is one: smaller ones would favour drafts.
    for first in range(0, max(len(documents) // size * size, 1), size):
        player.decode(documents[first : first + size])
    stats = player.stats
    wrong = sum(score == 0 for scores in stats.scores for score in scores)
    return Expected(
        tokens=stats.total_tokens,
        seconds=player.seconds,
        exit_rate=stats.exit_rate,
        error_rate=wrong / stats.total_tokens,
        tokens_per_step=stats.total_tokens / max(1, stats.steps),
    )


def ways_of(config: TIDEConfig) -> dict[str, TIDEConfig]:
    """The ways to decode that are compared, from settings of exits with drafts.

    Their KV is deferred, whatever KV is served: that is what was recorded.
    """
    exact = config.with_(mode="exit", kv_cache_strategy="deferred", prefill_exit=False)
    return {
        "off": exact.with_(mode="off"),
        "lossless": exact.with_(mode="lossless"),
        "exit": exact.with_(drafts=()),
        "both": exact,
    }


def replay_ways(
    recording: Recording,
    setting: Setting,
    costs: Sequence[LoopCosts],
    table: ContinuationTable | None,
) -> dict[str, Expected]:
    """What each way to decode would do: "off" (full depth, token by token), "lossless", "exit"
    (without drafts) and "both". "Perfect" is "both" with gates that are never wrong, and read
    the exit head only for tokens that exit: the most that these exits can give beside drafts.

    Args:
        setting: of exits with drafts.
    """
    ways = ways_of(setting.config)
    settings = {name: replace(setting, config=way) for name, way in ways.items()}
    settings["off"] = Setting(ways["off"])
    found = {name: replay(recording, of, costs, table) for name, of in settings.items()}
    perfect = replace(settings["both"], perfect=True)
    return found | {"perfect": replay(recording, perfect, costs, table)}


def speedups(found: Mapping[str, Expected]) -> dict[str, float]:
    """How much faster than "off" each other way would be."""
    off = found["off"].seconds
    return {name: off / of.seconds for name, of in found.items() if name != "off"}
