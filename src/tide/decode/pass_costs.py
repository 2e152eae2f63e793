"""What steps cost, by the tokens they begin with: measured before the first, then followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tide.decode.batch import BatchState

_SHORT = 8  # contexts of up to 2 ** 8 tokens cost about the same
_Bucket = tuple[int, int]  # bits of the number of sequences, and of the longest context


@dataclass
class PassCosts:
    """What a step costs, by the new tokens that each sequence has in it.

    Kept by bucket, since a pass costs more with more sequences and longer contexts. A bucket starts
    from what was measured before the first batch of that size, and follows what steps really take.
    Others start from the nearest bucket of that size, or of a larger one: batches shrink while they
    are decoded.
    """

    _seconds: dict[_Bucket, dict[int, float]] = field(default_factory=dict)
    _measured: set[int] = field(default_factory=set)  # sizes of batches
    _borrowed: set[_Bucket] = field(default_factory=set)  # from larger batches, not yet seen
    _seen: dict[_Bucket, set[int]] = field(default_factory=dict)  # numbers of tokens
    _started: dict[int, dict[int, float]] = field(default_factory=dict)  # by size of batch

    def known(self, sequences: int) -> bool:
        """Whether passes of batches of about this size were measured."""
        return sequences.bit_length() in self._measured

    def start(self, sequences: int, seconds: Mapping[int, float]) -> None:
        """Start from seconds by tokens, for batches of about this size and short contexts."""
        size = sequences.bit_length()
        self._seconds = {bucket: s for bucket, s in self._seconds.items() if bucket[0] != size}
        self._seconds[size, _SHORT], self._started[size] = dict(seconds), dict(seconds)
        self._borrowed = {bucket for bucket in self._borrowed if bucket[0] != size}
        self._seen = {bucket: seen for bucket, seen in self._seen.items() if bucket[0] != size}
        self._measured.add(size)

    def of(self, batch: BatchState) -> dict[int, float]:
        """Seconds by tokens, for batches and contexts of about this size."""
        bucket = _bucket(batch)
        if bucket not in self._seconds:
            larger = [other for other in self._seconds if other[0] >= bucket[0]]
            near = min(larger, key=lambda other: _distance(other, bucket), default=None)
            self._seconds[bucket] = {} if near is None else dict(self._seconds[near])
            if near is not None and near[0] > bucket[0]:
                self._borrowed.add(bucket)
        return self._seconds[bucket]

    def add(self, batch: BatchState, tokens: int, seconds: float) -> None:
        """Record what a step over `tokens` tokens of each sequence took."""
        if seconds <= 0:  # the clock jumped back
            return
        known, bucket = self.of(batch), _bucket(batch)
        if bucket in self._borrowed and 1 in known:
            # How costs grow with length is kept; a smaller batch costs no more.
            self._borrowed.discard(bucket)
            level = min(seconds / pass_cost(known, tokens), 1.0)
            known.update({length: level * cost for length, cost in known.items()})
        if tokens not in known:
            # Of the first as of others: it may have been a jump of the clock.
            known[tokens] = min(seconds, 2 * pass_cost(known, tokens)) if 1 in known else seconds
        old = known[tokens]
        # A slow outlier is the machine, not the step: it moves the estimate less. But of steps that
        # mostly end at a gate, some go deep.
        started = self._started.get(bucket[0])
        usual = max(old, pass_cost(started, tokens)) if started else old
        known[tokens] += 0.1 * (min(seconds, 2 * usual) - old)
        seen = self._seen.setdefault(bucket, set())
        seen.add(tokens)
        if tokens == 1:  # for what is not seen yet, how costs grow with length is kept
            for length in known.keys() - seen:
                known[length] *= known[1] / old


def _bucket(batch: BatchState) -> _Bucket:
    return len(batch.sequences).bit_length(), max(batch.longest.bit_length(), _SHORT)


def _distance(one: _Bucket, other: _Bucket) -> int:
    return 100 * abs(one[0] - other[0]) + abs(one[1] - other[1])


def pass_cost(known: Mapping[int, float], tokens: float) -> float:
    """Seconds of a step: as measured at this length, else from the nearest lengths measured.

    Never more than a longer one takes: what is seldom used may rest on one slow step.
    """
    below = max((t for t in known if t <= tokens), default=1)
    above = min((t for t in known if t >= tokens), default=None)
    if above is None:
        # Beyond what was measured, assume that a longer pass costs a little more.
        return known[below] * (1 + 0.02 * (tokens - below))
    share = (tokens - below) / max(above - below, 1)
    found = (1 - share) * known[below] + share * known[above]
    return min(found, *(seconds for longer, seconds in known.items() if longer >= above))
