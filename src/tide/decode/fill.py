"""KV above an exit, where it is not deferred: exited tokens write it at once, and are done."""

from __future__ import annotations

from tide.decode.batch import BatchState
from tide.decode.pack import pack_tokens
from tide.models.runner import DepthRunner


def fill_above(runner: DepthRunner, batch: BatchState, segment: int, strategy: str) -> None:
    """Write KV of tokens that have exited, in all segments above `segment`.

    Args:
        strategy: "propagate" (from the state in which they exited) or "zero_pad" (zeros).
    """
    spans = []
    for i, sequence in enumerate(batch.sequences):
        start = batch.passed(i, segment + 1)
        done = min(batch.passed(i, segment), sequence.committed - 1)
        spans.append(range(start, max(start, done)))
    if not any(spans):
        return
    states = batch.take(segment + 1, spans)
    assert states is not None
    lo, hi = batch.segments[segment][1], runner.n_layers
    if strategy == "propagate":
        tokens = pack_tokens(batch.sequences, spans)
        runner.fill_kv(tokens, lo, hi, cache=batch.cache, hidden=states)
    else:
        batch.cache.append_zeros(lo, hi, [len(span) for span in spans])
    batch.advance(segment + 1, batch.last, spans)
