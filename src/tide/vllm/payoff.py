"""Whether evaluating the gates pays, from what units and gates cost on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from tide.models.costs import medians
from tide.models.tokens import NOTES

_SIZES = (1, 4, 16, 64, 256)
_ASSUMED, _WEIGHT = 0.5, 64  # share of exits before any is seen, and after how many that fades
_GAIN = 0.01  # by which the gates must pay to be switched on again
_STEPS = 256  # after which a choice is looked at again
_MEMORY = 4096  # tokens after which those seen so far count half


@dataclass(frozen=True)
class ExitCosts:
    """Seconds, by number of tokens.

    Attributes:
        sizes: the numbers of tokens, `[s]`.
        whole: the model as vLLM runs it, `[s]`.
        segments: running each segment, `[segments][s]`.
        stores: storing its KV only; zeros for the first.
        gates: evaluating each gate, `[segments - 1][s]`.
        reads: reading its exit head, for the tokens that pass; zeros where all are read anyway.
    """

    sizes: Sequence[int]
    whole: Sequence[float]
    segments: Sequence[Sequence[float]]
    stores: Sequence[Sequence[float]]
    gates: Sequence[Sequence[float]]
    reads: Sequence[Sequence[float]]

    @classmethod
    def measure(
        cls,
        units: Any,
        whole: Callable[[int], Any],
        gates: Sequence[Any],
        positions: Tensor,
        hidden: Tensor,
        most: int,
    ) -> ExitCosts:
        """Time all units and gates, in a forward context without attention.

        Args:
            units: the `Units` of the decoder.
            whole: runs the model as vLLM does, for so many tokens.
            gates: the gates between them.
            positions, hidden: of any pass, `[t]` and `[t, hidden]`.
            most: tokens at most.
        """
        sizes = [size for size in _SIZES if size < most] + [most]
        parts: dict[tuple[str, int, int], Any] = {}
        for size in sizes:
            where = positions[:1].expand(size).contiguous()
            state = hidden[:1].expand(size, -1).contiguous()
            parts["whole", 0, size] = partial(whole, size)
            for k in range(len(units.layers)):
                states = (state, state) if k else (state,)
                parts["segment", k, size] = lambda k=k, where=where, states=states: units.run(
                    k, where, *(state.clone() for state in states)
                )
                if k:
                    parts["store", k, size] = lambda k=k, where=where, state=state: units.store(
                        k, where, state
                    )
                    gate = gates[k - 1]
                    read = gate.head_timer() if gate.screens else None
                    parts["read", k - 1, size] = partial(read or _nothing, size)
                    # Where the head is read only for tokens that pass, none do.
                    notes = torch.full((size, NOTES), int(read is None), device=state.device)
                    parts["gate", k - 1, size] = lambda gate=gate, state=state, notes=notes: gate(
                        state, notes
                    ).tolist()
        # Ranks run the same number of times: a unit may wait for the others.
        seconds: Any = medians(parts, repeats=5)

        def curves(what: str, count: int, first: int = 0) -> list[list[float]]:
            return [
                [seconds[what, k, size] if k >= first else 0.0 for size in sizes]
                for k in range(count)
            ]

        count = len(units.layers)
        return cls(
            sizes, curves("whole", 1)[0], curves("segment", count), curves("store", count, 1),
            curves("gate", count - 1), curves("read", count - 1),
        )  # fmt: skip

    def full_depth(self, requests: int) -> float:
        """Seconds of a pass of so many tokens without gates."""
        return self._expected(self.whole, requests, 1.0)

    def with_exits(self, requests: int, shares: Sequence[float]) -> float:
        """Expected seconds of a pass with gates.

        Args:
            requests: tokens of the pass.
            shares: of the tokens that reach each gate, how many exit there.
        """
        remaining = 1.0
        seconds = self._expected(self.segments[0], requests, remaining)
        for k, share in enumerate(shares):
            seconds += self._expected(self.gates[k], requests, remaining)
            seconds += self._expected(self.reads[k], requests, remaining * share)
            for store in self.stores[k + 1 :]:
                seconds += self._expected(store, requests, remaining * share)
            remaining *= 1 - share
            seconds += self._expected(self.segments[k + 1], requests, remaining)
        return seconds

    def could_pay(self, requests: int) -> bool:
        """Whether gates pay if all tokens exit."""
        return self.with_exits(requests, [1.0] * len(self.gates)) <= self.full_depth(requests)

    def break_even(self, requests: int) -> float | None:
        """The least share of exits at every gate that pays; None if none does."""
        full = self.full_depth(requests)
        for percent in range(1, 101):
            if self.with_exits(requests, [percent / 100] * len(self.gates)) <= full:
                return percent / 100
        return None

    def _expected(self, curve: Sequence[float], requests: int, share: float) -> float:
        """Mean of a curve, if each of so many tokens is in the pass with this chance."""
        counts = np.arange(1, requests + 1)
        last = self.sizes[-1]
        seconds = np.interp(counts, self.sizes, curve) * np.maximum(counts / last, 1.0)
        return float(binom.pmf(counts, requests, share) @ seconds)


def _nothing(tokens: int) -> None:
    """In place of reading a head that was read already."""


@dataclass
class Payoff:
    """Chooses, by number of requests, whether to evaluate the gates.

    All or none of them, so that what is served stays what the certificate is for, or full depth.

    Attributes:
        costs: measured.
        audit_rate: share of requests that run at full depth whatever their gates decide.
    """

    costs: ExitCosts
    audit_rate: float = 0.0
    _exits: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)
    _chosen: dict[int, bool] = field(default_factory=dict)
    _uses: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, exits: int, tokens: int) -> None:
        """Record what a gate decided."""
        self._exits[number] = self._exits.get(number, 0) + exits
        self._seen[number] = self._seen.get(number, 0) + tokens
        if self._seen[number] > _MEMORY:
            self._exits[number] /= 2
            self._seen[number] /= 2

    def share(self, number: int) -> float:
        """Of the tokens that reach a gate, how many exit, as far as is known."""
        exits = self._exits.get(number, 0) + _ASSUMED * _WEIGHT
        return exits / (self._seen.get(number, 0) + _WEIGHT)

    def pays(self, requests: int) -> bool:
        """Whether to evaluate the gates for so many requests."""
        uses = self._uses[requests] = self._uses.get(requests, 0) + 1
        if requests not in self._chosen or uses % _STEPS == 0:
            served = 1 - self.audit_rate
            shares = [served * self.share(number) for number in range(len(self.costs.gates))]
            gain = self.costs.full_depth(requests) / self.costs.with_exits(requests, shares) - 1
            self._chosen[requests] = gain > (0.0 if self._chosen.get(requests, True) else _GAIN)
            if not self._chosen[requests]:  # one step with gates shows whether more exit by now
                return self.costs.could_pay(requests)
        return self._chosen[requests]

    def summary(self, most: int) -> str:
        """For people: from which share of exits on the gates pay."""
        found = []
        for requests in sorted({1, min(8, most), min(32, most)}):
            least = self.costs.break_even(requests)
            when = "never" if least is None else f"from {least:.0%} of tokens that exit"
            found.append(f"{when} at {requests} request{'s' if requests > 1 else ''}")
        return f"gates pay {', '.join(found)}."
