"""Whether gates pay in vLLM, from made-up costs."""

from __future__ import annotations

import pytest

from tide.vllm.payoff import ExitCosts, Payoff

SIZES = (1, 4, 16, 64)


def costs(gate: float = 0.05, flat: bool = True, read: float = 0.0) -> ExitCosts:
    """Two segments of the same cost: bound by reading weights, or by arithmetic."""
    segment = [1.0 if flat else float(size) for size in SIZES]
    store = [0.1 * seconds for seconds in segment]
    whole = [2 * seconds for seconds in segment]
    return ExitCosts(
        SIZES, whole, [segment, segment], [[0.0] * 4, store], [[gate] * 4], [[read] * 4]
    )


def test_expected_seconds() -> None:
    one = costs()
    assert one.full_depth(1) == pytest.approx(2.0)
    # The exit saves a segment, and stores its KV.
    assert one.with_exits(1, [1.0]) == pytest.approx(1.0 + 0.05 + 0.1)
    assert one.with_exits(1, [0.5]) == pytest.approx(1.0 + 0.05 + 0.5 * 0.1 + 0.5 * 1.0)
    # The exit head is read for tokens that pass.
    assert costs(read=0.2).with_exits(1, [0.5]) == pytest.approx(1.7)
    # Of two requests, one that continues takes the step through all layers.
    assert one.with_exits(2, [0.5]) == pytest.approx(1.05 + 0.75 * 0.1 + 0.75 * 1.0)
    # Arithmetic is saved in proportion; beyond what was measured, it goes on growing.
    many = costs(flat=False)
    assert many.with_exits(32, [0.5]) == pytest.approx(32 + 0.05 + 16 * 0.1 + 16, rel=1e-6)
    assert many.full_depth(128) == pytest.approx(256)


def test_break_even() -> None:
    assert costs().break_even(1) == pytest.approx(0.06)  # 0.05 / (1 - 0.1), rounded up
    assert costs().break_even(32) > 0.9  # as long as one continues, all is read
    assert costs(gate=2.0).break_even(1) is None
    text = Payoff(costs(gate=2.0)).summary(8)
    assert text == "gates pay never at 1 request, never at 8 requests."


def test_gates_are_evaluated_where_they_pay() -> None:
    payoff = Payoff(costs())
    assert payoff.pays(1)
    assert [payoff.pays(32) for _ in range(3)] == [True, False, False]  # the first step is a try
    for _ in range(300):
        payoff.add(0, 0, 10)  # no token exits
        payoff.pays(1)
    assert payoff.share(0) < 0.02
    assert not payoff.pays(1)
    never = Payoff(costs(gate=2.0))
    assert not never.costs.could_pay(1) and payoff.costs.could_pay(1)
    assert not any(never.pays(1) for _ in range(1000))


def test_gates_are_switched_on_again_when_tokens_exit_again() -> None:
    payoff = Payoff(costs())

    def steps(exits: int) -> list[bool]:
        evaluated = []
        for _ in range(40_000):
            evaluated.append(payoff.pays(1))
            if evaluated[-1]:
                payoff.add(0, exits, 1)
        return evaluated

    assert all(steps(exits=1))
    without = steps(exits=0)
    assert not all(without[20_000:]) and sum(without[20_000:]) / 20_000 < 0.01
    assert all(steps(exits=1)[-1000:])


def test_a_choice_near_break_even_stays() -> None:
    payoff = Payoff(costs(gate=0.448))  # gains 0.2 % at the share of one half that is assumed
    chosen = []
    for step in range(4000):
        payoff.pays(1)
        payoff.add(0, step % 2, 1)
        chosen.append(payoff._chosen[1])
    assert chosen == [True] * 4000
