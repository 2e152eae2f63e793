"""What the decode loop is built from: parts that outlive a call, and who is told how it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tide.config import TIDEConfig
from tide.decode.drafter import Drafter
from tide.decode.exit_stage import Exits
from tide.decode.sequence import SequenceState
from tide.models.runner import DepthRunner


@dataclass
class Machinery:
    """What decoding needs beside the batch; it outlives calls.

    Attributes:
        runner: attached to the model.
        exits: of the model; none in mode "off".
        config: settings.
        drafter: remembers between calls.
    """

    runner: DepthRunner
    exits: Exits
    config: TIDEConfig
    drafter: Drafter

    def at_full_depth(self, mode: str = "lossless") -> Machinery:
        """The same without exits: "lossless" may still draft, "off" commits token by token."""
        config = self.config.with_(mode=mode, kv_cache_strategy="deferred", prefill_exit=False)
        exits = replace(self.exits, checkpoints=()) if mode == "off" else self.exits
        return replace(self, config=config, exits=exits)


@dataclass
class Listener:
    """Who is told how decoding goes.

    Attributes:
        on_step: called after each step, to stream.
        on_finished: called with sequences that have ended, once all is known of them; returns
            whether exits may go on.
    """

    on_step: Callable[[], None] = lambda: None
    on_finished: Callable[[Sequence[SequenceState]], bool] = lambda sequences: True
