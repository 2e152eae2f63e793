"""Gives the exits of a model as the loop needs them: where they sit, who reads, who decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide.exits.artifact import Checkpoint
from tide.exits.heads import Readout
from tide.exits.policy import Policy
from tide.exits.table import ContinuationTable


@dataclass
class Exits:
    """The exits of a model, by depth; the table is for hints to the policy."""

    checkpoints: Sequence[Checkpoint]
    readout: Readout
    policy: Policy
    table: ContinuationTable | None = None

    def segments(self, n_layers: int) -> list[tuple[int, int]]:
        """The ranges `[lo, hi)` into which the checkpoints cut the depth."""
        cuts = [checkpoint.layer + 1 for checkpoint in self.checkpoints]
        return list(zip([0, *cuts], [*cuts, n_layers], strict=True))
