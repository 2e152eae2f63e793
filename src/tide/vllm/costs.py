"""What a step costs by its number of tokens, measured while vLLM warms up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context

from tide.models.costs import medians, synchronize
from tide.vllm.stepcost import StepCost

_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 256)
_SECONDS = 1.0  # that measuring may take, as far as three repeats allow
logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown


def measure_steps(step: Callable[[int], Any], most: int) -> dict[int, float]:
    """Median seconds of a step by its tokens; empty unless this is a pass to warm up.

    Args:
        step: runs the model and its head over the first so many tokens of the pass.
        most: tokens of the pass.
    """
    if get_forward_context().attn_metadata is not None:
        return {}
    steps: dict[int, Callable[[], Any]] = {n: partial(step, n) for n in _TOKENS if n <= most}
    began = time.perf_counter()
    for run in steps.values():
        run()
    synchronize()
    elapsed = max(time.perf_counter() - began, 1e-6)  # a clock may stand still
    repeats = int(_SECONDS / elapsed) - 2  # two warm up
    # Ranks run a step together, so all must run as many.
    repeats = get_tp_group().broadcast_object(min(max(repeats, 3), 9))
    found = medians(steps, repeats=repeats)
    if get_tp_group().is_first_rank:
        logger.info("TIDE: %s", describe(found))
    return found


def describe(costs: dict[int, float]) -> str:
    """What was measured, and which share of drafted tokens must be accepted for them to pay."""
    cost = StepCost(costs)
    some = ", ".join(f"{n}: {1000 * seconds:.1f} ms" for n, seconds in costs.items())
    needed = {n: float(cost.ratio(n, 2 * n)) - 1 for n in (1, 8, 32)}
    # Half is what is assumed of drafts before any was verified.
    pays = ", ".join(
        f"at {n}: {'yes' if share < 0.5 else 'no'} (above {share:.0%} accepted)"
        for n, share in needed.items()
    )
    return f"a step by its tokens, {some}. Drafts pay by requests, {pays}."
