"""A certified bound holds, and drift is noticed, as often as claimed: by simulation.

The simulations of `bench/`, with fewer runs.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
import pytest
from certify_simulation import NEW, TRUE_RISKS, Draw, certify, scripted_model
from risk_simulation import (
    DELTA,
    GOOD,
    RISK,
    alarms,
    best_looking,
    certified,
    sequences,
    violations,
)

import tide.certification
from tide.calibration.bounds import (
    betting,
    fewest_sequences,
    hoeffding_bentkus,
    learn_then_test,
)
from tide.drift import DriftMonitor


@pytest.mark.parametrize("p_value", [hoeffding_bentkus, betting])
def test_a_certified_threshold_exceeds_the_risk_at_most_as_often_as_delta(p_value: Any) -> None:
    share, _ = violations(certified(p_value), runs=150)
    assert share <= DELTA + 2 * np.sqrt(DELTA * (1 - DELTA) / 500)


def test_the_best_looking_threshold_exceeds_it_far_more_often() -> None:
    assert violations(best_looking, runs=150)[0] > 0.25


def test_betting_is_tighter_where_losses_are_small() -> None:
    losses = sequences(np.random.default_rng(1), np.array([0.008]), 300)[0]
    assert betting(losses, RISK) < hoeffding_bentkus(losses, RISK)
    assert betting(losses, RISK) < DELTA


def test_simulated_sequences_have_their_stated_risk() -> None:
    losses = sequences(np.random.default_rng(5), np.array([0.01, 0.04]), 20_000)
    assert losses.mean(1) == pytest.approx([0.01, 0.04], rel=0.05)
    assert (losses[1] >= losses[0]).all()
    # Errors within a sequence are correlated.
    assert losses[1].std() > 1.5 * np.sqrt(0.04 * 0.96 / 64)


def test_p_values_of_the_null_are_p_values() -> None:
    draw = np.random.default_rng(2)
    for p_value in (hoeffding_bentkus, betting):
        found = [p_value(sequences(draw, np.array([RISK]), 200)[0], RISK) for _ in range(400)]
        for level in (0.05, 0.2):
            assert np.mean(np.array(found) <= level) <= level + 2 * np.sqrt(level / 400)


def test_a_setting_after_the_first_that_fails_is_not_tested() -> None:
    losses = np.stack([np.zeros(300), np.full(300, 0.5), np.zeros(300)])
    assert learn_then_test(losses, RISK, DELTA) == 0
    assert learn_then_test(losses[1:], RISK, DELTA) is None


def test_the_drift_monitor_seldom_raises_a_false_alarm() -> None:
    assert sum(k is not None for k in alarms(RISK, 250, 2000)) / 250 <= DELTA


def test_the_drift_monitor_notices_when_the_risk_doubles() -> None:
    assert median(k or 1000 for k in alarms(2 * RISK, 100, 1000)) < 250
    monitor = DriftMonitor(RISK)
    assert monitor.add(1.0) or monitor.wealth > 1
    assert monitor.estimate == 1.0
    monitor.reset()
    assert not monitor.fired and monitor.wealth == 1.0 and monitor.estimate is None


@pytest.mark.parametrize("good", [0.0, RISK / 2])
def test_many_good_sequences_do_not_hide_a_drift(good: float) -> None:
    found = []
    for seed in range(20):
        draw, monitor = np.random.default_rng(seed), DriftMonitor(RISK)
        before = sequences(draw, np.array([good]), GOOD)[0] if good else np.zeros(GOOD)
        assert not any(monitor.add(loss) for loss in before.tolist())
        losses = sequences(draw, np.array([2 * RISK]), 2000)[0].tolist()
        found.append(next((k for k, loss in enumerate(losses, 1) if monitor.add(loss)), 10_000))
    assert median(found) < 600


@pytest.mark.parametrize(("risk", "n"), [(0.01, 312), (0.02, 155), (0.05, 61)])
def test_a_risk_needs_a_minimum_of_sequences_even_if_no_token_differs(risk: float, n: int) -> None:
    assert fewest_sequences(risk, 0.05) == n
    assert betting(np.zeros(n - 1), risk) > 0.05
    for k in range(n, 2 * n):
        assert betting(np.zeros(k), risk) <= 0.05


def test_the_engine_loses_what_scripted_gates_let_exit() -> None:
    """So the risk of a setting is known in `bench/certify_simulation.py`."""
    model, made = scripted_model()
    draw = Draw(np.random.default_rng(0), 24)
    certified, losses = tide.certification.measure_losses, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tide.certification, "measure_losses",
            lambda *args, **kwargs: losses.append(certified(*args, **kwargs)) or losses[-1],
        )  # fmt: skip
        assert certify(model, made, draw) is None  # so few show nothing
    safest = next(iter(TRUE_RISKS))
    assert losses[0].tolist() == (draw.exits(safest).sum(1) / NEW).tolist()
    many = Draw(np.random.default_rng(1), 20_000)
    for scale, risk in TRUE_RISKS.items():
        assert many.exits(scale).sum() / (NEW * 20_000) == pytest.approx(risk, rel=0.05)
    assert draw.exits(max(TRUE_RISKS)).sum() > draw.exits(safest).sum() > 0
