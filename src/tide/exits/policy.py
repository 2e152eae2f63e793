"""Scripted exits: decided by position, for tests and benchmarks, which need known decisions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenPosition:
    """Where a token stands: its sequence in the batch as given, and its position there."""

    sequence: int
    position: int


@dataclass(frozen=True)
class ScriptedPolicy:
    """Exits where a script decides, in place of the artifact's gates.

    Attributes:
        script: given the position of a token and the number of the checkpoint, whether it exits.
    """

    script: Callable[[TokenPosition, int], bool]

    @classmethod
    def share(cls, share: float, checkpoint: int = 0, seed: int = 0) -> ScriptedPolicy:
        """Let a share of the tokens, drawn by position and `seed`, exit at one checkpoint."""

        def script(at: TokenPosition, number: int) -> bool:
            draw = random.Random(f"{seed} {at.sequence} {at.position}").random()
            return number == checkpoint and draw < share

        return cls(script)
