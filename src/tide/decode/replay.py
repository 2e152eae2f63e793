"""The replay: the decode loop over recorded answers, without the model, at measured costs.

The loop, the modes, the drafter and the draft sources are the real ones. Only the model is not: its
predictions are those of the recording, and a pass takes as long as such a pass was measured to
take. What full depth predicts after a rejected node of a tree is not recorded, and so not recycled.
A token that exits wrongly is counted and replaced by the recorded one, since nothing is
recorded of another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        tokens_per_pass: tokens of a sequence for each pass to full depth.
    """

    tokens: int
    seconds: float
    exit_rate: float
    error_rate: float
    tokens_per_pass: float


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
    size, documents = costs[-1].sequences, list(range(len(recording.prompts)))
    for first in range(0, len(documents), size):
        player.decode(documents[first : first + size])
    stats = player.stats
    wrong = sum(score == 0 for scores in stats.scores for score in scores)
    return Expected(
        tokens=stats.total_tokens,
        seconds=player.seconds,
        exit_rate=stats.exit_rate,
        error_rate=wrong / stats.total_tokens,
        tokens_per_pass=stats.total_tokens / max(1, player.deep),
    )


def speedups(
    recording: Recording,
    setting: Setting,
    costs: Sequence[LoopCosts],
    table: ContinuationTable | None,
) -> dict[str, float]:
    """How much faster than full depth, token by token, each way to decode would be.

    Args:
        setting: of exits with drafts, "both"; the others are without the one or the other.
    """
    config = setting.config.with_(kv_cache_strategy="deferred", prefill_exit=False)
    ways = {
        "off": config.with_(mode="off"),
        "lossless": config.with_(mode="lossless"),
        "exit": config.with_(mode="exit", drafts=()),
        "both": config.with_(mode="exit"),
    }
    seconds = {}
    for name, way in ways.items():
        exits = replace(setting, config=way) if name != "off" else Setting(way)
        seconds[name] = replay(recording, exits, costs, table).seconds
    return {name: seconds["off"] / s for name, s in seconds.items() if name != "off"}
