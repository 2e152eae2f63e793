"""Gives `attach`, the one door from a Hugging Face model to its depth runner."""

from __future__ import annotations

from typing import Any

from tide.models.depth import DepthRunner
from tide.models.selfcheck import self_check


def attach(model: Any, *, check: bool = True) -> DepthRunner:
    """Make a depth runner for `model`, proven on it.

    ```python
    with attach(model) as runner:
        cache = runner.new_cache(rows=1)
        hidden = runner.run(input_ids, 0, 8, cache=cache)
    ```

    The model is changed only inside the `with`, which may be entered again and again.

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode.
        check: prove on a short random prompt that range-running equals the model's own forward
            pass.

    Raises:
        UnsupportedModelError, UnsupportedCacheError: if the model is of a kind that cannot be run
            by depth ranges.
        SelfCheckError: naming the first layer that differs, if the proof fails.
    """
    runner = DepthRunner(model)
    if check:
        self_check(runner)
    return runner
