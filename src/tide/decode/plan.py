"""The plan: whether exits, drafts or both are fastest here, decided once, at start.

Decided by a replay of the artifact's recording at the costs measured on this device, with the
thresholds that are served. What is decided stays, so a call does what the one before it did.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tide.config import TIDEConfig
from tide.decode.machinery import Machinery, tree_lengths
from tide.decode.player import Setting
from tide.decode.replay import replay_ways, speedups, ways_of
from tide.exits.recording import Recording
from tide.models.costs import measure_loop

# By how much exits must be ahead of drafts alone: costs are not known better. For one sequence,
# replays expect too much of exits where predictions are recycled: what rejected nodes teach is not
# recorded.
_CLEARLY, _CLEARLY_RECYCLING = 1.02, 1.10


@dataclass(frozen=True)
class Plan:
    """What an engine does, and why.

    Attributes:
        config: its settings; the mode is never "auto".
        reason: why, in short.
        expected: speed-ups over full depth, token by token, of "lossless", "exit" (no
            drafts), "both" and "perfect" (both, with gates that are never wrong); empty if nothing
            was compared.
        tokens_per_step: that each of them is expected to decode.
    """

    config: TIDEConfig
    reason: str = "as requested"
    expected: dict[str, float] = field(default_factory=dict)
    tokens_per_step: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """In one line."""
        way = self.config.mode
        if way == "exit":
            way = "exit with drafts" if self.config.drafts else "exit without drafts"
        return f"{way}: {self.reason}"


def make_plan(machinery: Machinery, recording: Recording | None, batch: int) -> Plan:
    """Decide what mode "auto" is here; any other mode is what it is.

    Args:
        machinery: with the exits that are served.
        recording: of the artifact; None if it has none.
        batch: sequences of a usual call.
    """
    config, exits, runner = machinery.config, machinery.exits, machinery.runner
    if config.mode != "auto":
        return Plan(config)
    ways = ways_of(config)
    del ways["off"]
    layers = tuple(checkpoint.layer for checkpoint in exits.checkpoints)
    if not layers:
        return Plan(ways["lossless"], "the artifact has no exit that a token can take")
    thresholds = tuple(gate.thresholds for gate in exits.gates)
    if config.kv_cache_strategy != "deferred":
        reason = f"exits with kv_cache_strategy={config.kv_cache_strategy!r} are not compared"
        return Plan(ways["lossless"], f"{reason}; mode='exit' takes them")
    if (
        recording is None
        or exits.script is not None
        or not set(layers) <= set(recording.layers)
        or any(limit.top_probability is not None for limit in thresholds)
    ):
        reason = "nothing is recorded of these exits to compare them by"
        return Plan(ways["lossless"], f"{reason}; mode='exit' takes them")
    nodes = config.max_tree if runner.takes_trees else 0
    costs = []
    read, stages = exits.gates[0].head_timer(), exits.stages(runner.n_layers)
    with runner.lock:
        for sequences in sorted({1, batch}):
            machinery.compile(sequences)
            costs.append(
                measure_loop(runner, stages, read, sequences, trees=tree_lengths(nodes, sequences))
            )
    setting = Setting(config.with_(max_tree=nodes), layers, thresholds)
    replayed = replay_ways(recording, setting, costs, exits.table)
    found = speedups(replayed)
    # Unless exits are clearly ahead, the way that changes no token.
    lead = _CLEARLY_RECYCLING if batch == 1 and machinery.recycles else _CLEARLY
    way = max(ways, key=lambda name: found[name] * (lead if name == "lossless" else 1.0))
    gives = f"{found[way]:.2f}x"
    if way == "lossless":
        other = max(found["exit"], found["both"])
        reason = f"exits would give {other:.2f}x here, drafts alone {gives}"
        if other > found[way]:
            reason += ", which is too small a lead"
    else:
        reason = f"this would give {gives} here, drafts alone {found['lossless']:.2f}x"
    reason += " (expected from the calibration prompts)"
    return Plan(ways[way], reason, found, {name: replayed[name].tokens_per_step for name in found})
