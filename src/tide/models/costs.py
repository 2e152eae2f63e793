"""What passes cost on this device, measured: the one clock that all others go by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from tide.models.runner import DepthRunner, Then
from tide.models.tokens import NOTES, TokenBatch

_Name = TypeVar("_Name", bound=Hashable)

# New tokens of each sequence for which passes are timed. A product of 4 may cost twice one of 3.
LENGTHS = (1, 2, 3, 4, 6, 8)
_CONTEXT = 64
_REPEATS = 2, 5  # at least, however long they take, and at most


@dataclass(frozen=True)
class _Way:
    """A way through the layers that is to be timed.

    Attributes:
        stages: layers `(lo, hi)` and what follows them, if anything; together the whole depth.
        lengths: new tokens of each sequence.
        reads: for each stage, whether what follows it is to decide for the tokens.
    """

    stages: Sequence[tuple[tuple[int, int], Then | None]]
    lengths: Sequence[int]
    reads: Sequence[bool]


@torch.no_grad()
def _time_in_turn(
    runner: DepthRunner, ways: Sequence[_Way], sequences: int, seconds: float
) -> list[dict[int, list[list[float]]]]:
    """Seconds of each stage in every repeat, by way and new tokens, after a short prompt."""
    lengths = sorted({length for way in ways for length in way.lengths})
    limit = getattr(runner.config, "max_position_embeddings", None) or _CONTEXT + max(lengths)
    context = max(1, min(_CONTEXT, limit - max(lengths)))
    generator = torch.Generator().manual_seed(0)
    shape = (sequences, context + max(lengths))
    ids = torch.randint(0, runner.config.vocab_size, shape, generator=generator)
    cache = runner.new_cache(sequences)

    def timed(way: _Way, length: int) -> list[float]:
        cache.rollback([context] * sequences)
        hidden, times = None, []
        for (layers, then), read in zip(way.stages, way.reads, strict=True):
            notes = np.zeros((sequences, length, NOTES), np.int64)
            notes[..., 0] = read
            tokens = TokenBatch(ids[:, context : context + length], notes=notes)
            synchronize()
            began = time.perf_counter()
            hidden, _ = runner.run_then(then, tokens, layers, cache=cache, hidden=hidden)
            synchronize()
            times.append(time.perf_counter() - began)
        return times

    found: list[dict[int, list[list[float]]]] = [{n: [] for n in way.lengths} for way in ways]
    least, most = _REPEATS
    with runner.uncounted():
        runner.run(TokenBatch(ids[:, :context]), 0, runner.n_layers, cache=cache)
        began = time.perf_counter()
        for done in range(most + 1):
            for length in lengths:
                for k in range(len(ways))[:: -1 if done % 2 else 1]:  # none is always the first
                    if length in found[k]:
                        times = timed(ways[k], length)
                        if done:  # the first is to warm up
                            found[k][length].append(times)
            if done >= least and time.perf_counter() - began > seconds:
                break
    return found


def measure_passes(
    runner: DepthRunner,
    stages: Sequence[tuple[tuple[int, int], Then | None]],
    sequences: int = 1,
    *,
    lengths: Sequence[int] = LENGTHS,
    wanted: Sequence[bool] | bool = True,
    seconds: float = 1.0,
) -> dict[int, list[float]]:
    """Median seconds of each stage, by new tokens of each sequence, after a short prompt.

    Args:
        runner: attached to the model, ready for such a batch.
        stages: layers `(lo, hi)` and what follows them, if anything; together the whole depth.
        sequences: of the batch.
        lengths: new tokens of each sequence.
        wanted: whether what follows a stage is to decide for the tokens; for all, or for each.
        seconds: after which no more repeats are begun.
    """
    reads = [wanted] * len(stages) if isinstance(wanted, bool) else wanted
    (found,) = _time_in_turn(runner, [_Way(stages, lengths, reads)], sequences, seconds)
    return {
        length: [_typical(times) for times in zip(*repeats, strict=True)]
        for length, repeats in found.items()
    }


@dataclass(frozen=True)
class LoopCosts:
    """What the passes of the decode loop cost here, for one size of batch.

    Seconds by new tokens of each sequence.

    Attributes:
        sequences: of the batch.
        whole: a pass through all layers, and the head.
        layer: each layer of a pass.
        start: a pass to a checkpoint beside its layers, with a gate that reads no exit head.
        read: an exit head, by tokens of all sequences; 0 where it is read for all anyway.
    """

    sequences: int
    whole: dict[int, float]
    layer: dict[int, float]
    start: dict[int, float]
    read: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """As JSON, whose keys are text."""
        times = {name: value for name, value in asdict(self).items() if name != "sequences"}
        as_text = {name: {str(n): s for n, s in by.items()} for name, by in times.items()}
        return {"sequences": self.sequences, **as_text}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoopCosts:
        """From JSON."""
        return cls(
            values["sequences"],
            *(
                {int(n): s for n, s in values[name].items()}
                for name in ("whole", "layer", "start", "read")
            ),
        )


@torch.no_grad()
def measure_loop(
    runner: DepthRunner,
    stages: Sequence[tuple[tuple[int, int], Then | None]],
    read: Callable[[int], Any] | None,
    sequences: int = 1,
    *,
    trees: Sequence[int] = (),
    seconds: float = 4.0,
) -> LoopCosts:
    """Measure what passes cost.

    Args:
        stages: at least two, as `measure_passes` takes them, the last with the head.
        read: reads an exit head for some tokens; None where that is part of the stages.
        trees: new tokens for which passes are timed beside the usual ones.
        seconds: after which no more repeats are begun.
    """
    (lo, n), target_head = stages[-1]
    lengths = (*LENGTHS, 16, *trees)
    reads = [False] * (len(stages) - 1)
    staged, through = _time_in_turn(
        runner,
        [
            _Way(stages, lengths, [*reads, True]),
            _Way([((0, n), target_head)], lengths, [True]),
        ],
        sequences,
        seconds,
    )
    whole = {length: _typical([s for (s,) in repeats]) for length, repeats in through.items()}
    layer, start = {}, {}
    for length in lengths:
        # As shares of the whole pass of the same repeat: the load may change between repeats.
        pairs = zip(through[length], staged[length], strict=True)
        shares = [[s / max(all_layers, 1e-9) for s in times] for (all_layers,), times in pairs]
        *others, last = (statistics.median(stage) for stage in zip(*shares, strict=True))
        # What the last stage does not run is what it is faster by; never all of it.
        of_layer = min(max(1 - last, 0.0) / lo, 1 / n)
        of_start = statistics.mean(
            share - (b - a) * of_layer for ((a, b), _), share in zip(stages, others, strict=False)
        )
        layer[length] = of_layer * whole[length]
        start[length] = max(0.0, of_start) * whole[length]
    parts: dict[int, Callable[[], Any]] = {}
    if read is not None:
        parts = {m: partial(read, m) for m in lengths}
    return LoopCosts(sequences, whole, layer, start, medians(parts) or dict.fromkeys(lengths, 0.0))


def medians(parts: dict[_Name, Callable[[], Any]], *, repeats: int = 10) -> dict[_Name, float]:
    """Median seconds of each part, timed in turn so that all see the same load."""
    seconds: dict[_Name, list[float]] = {name: [] for name in parts}
    for repeat in range(-2, repeats):
        for name, run in parts.items():
            synchronize()
            began = time.perf_counter()
            run()
            synchronize()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    return {name: _typical(values) for name, values in seconds.items()}


def _typical(seconds: Sequence[float]) -> float:
    """The median; of two, the lower: the other may be a pause. Not those during a jump back."""
    forward = [s for s in seconds if s > 0]
    return statistics.median_low(forward) if forward else 1e-9


def synchronize() -> None:
    """Wait for an accelerator to finish its queue, so that work is timed where it belongs."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
