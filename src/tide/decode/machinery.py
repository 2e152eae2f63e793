"""What the decode loop is built from: parts that outlive a call, and who is told how it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tide.config import TIDEConfig
from tide.decode.drafter import Drafter
from tide.decode.exit_stage import Exits
from tide.decode.exits import recycles, tree_nodes
from tide.decode.recycled import RecycledPredictions
from tide.decode.sequence import SequenceState
from tide.decode.sources import CrossRequestNGrams
from tide.models.costs import LENGTHS, measure_passes
from tide.models.runner import DepthRunner
from tide.progress import bars

_TIMED = 512  # tokens of all sequences in the largest pass that is timed


def tree_lengths(nodes: int, sequences: int) -> list[int]:
    """New tokens of passes over trees of up to `nodes` nodes that are timed.

    In large batches smaller trees only, which is then all that is drafted.
    """
    return [1 + n for n in (16, 32, 64) if n <= min(nodes, _TIMED // sequences - 1)]


@dataclass
class Machinery:
    """What decoding needs beside the batch; it outlives calls.

    Attributes:
        runner: attached to the model.
        exits: of the model; none in mode "off".
        config: settings.
        drafter: remembers between calls.
        recycled: what full depth predicted lately, where calls share it.
        answers: of earlier calls, if calls are to draft from them.
        costs: by sequences of a batch, what passes cost here; see `measure_passes`.
        clock: by which steps are timed.
    """

    runner: DepthRunner
    exits: Exits
    config: TIDEConfig
    drafter: Drafter
    recycled: RecycledPredictions = field(default_factory=RecycledPredictions)
    answers: CrossRequestNGrams = field(default_factory=CrossRequestNGrams)
    costs: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def prepare(self, sequences: int) -> None:
        """Compile what a batch needs, if it is to be compiled, and time it if drafts may pay.

        Done at the first batch of each size.
        """
        self.compile(sequences)
        stages = self.exits.stages(self.runner.n_layers)
        drafts = self.config.mode != "off" and self.config.max_draft and self.config.drafts
        if drafts and not self.drafter.fixed and not self.drafter.costs.known(sequences):
            # In lossless mode, a pass that verifies drafts evaluates no gate.
            gates = [self.config.mode == "exit"] * (len(stages) - 1)
            measured = self.costs[sequences] = measure_passes(
                self.runner,
                stages,
                sequences,
                wanted=[*gates, True],
                lengths=self._lengths(sequences),
            )
            whole = {length: sum(seconds) for length, seconds in measured.items()}
            self.drafter.costs.start(sequences, whole)

    @property
    def nodes(self) -> int:
        """Most nodes of a draft tree; 0 for chains."""
        return tree_nodes(self.config, self.runner)

    @property
    def recycles(self) -> bool:
        """Whether full depth's predictions are drafted again."""
        return recycles(self.config, self.runner)

    def recycled_for(self, indices: Iterable[int]) -> dict[int, RecycledPredictions] | None:
        """Recycled predictions by index of a sequence; None where nothing is recycled."""
        if not self.recycles:
            return None
        shared = self.recycled if self.config.share_recycled else None
        return {index: shared or type(self.recycled)() for index in indices}

    def _lengths(self, sequences: int) -> Sequence[int]:
        """New tokens for which passes are timed: up to a tree and the token before it."""
        return [*LENGTHS, *tree_lengths(self.nodes, sequences)]

    def compile(self, sequences: int) -> None:
        """Compile what a batch needs, if it is to be compiled, with a progress bar."""
        compiling = self.runner.prepare(self.exits.stages(self.runner.n_layers), sequences)
        if first := next(compiling, None):  # no bar where there is nothing to wait for
            with bars(quiet=not sys.stderr.isatty()) as bar:
                tick = bar("Compiling")
                for done, total in chain([first], compiling):
                    tick(done, total)

    def at_full_depth(self, mode: str = "lossless") -> Machinery:
        """Nothing is committed before full depth: "lossless" may still draft, "off" does not."""
        # Trees only if head and measured costs are made for them.
        config = self.config.with_(
            mode=mode, kv_cache_strategy="deferred", prefill_exit=False, max_tree=self.nodes
        )
        exits = replace(self.exits, checkpoints=(), gates=()) if mode == "off" else self.exits
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
