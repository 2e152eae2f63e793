"""Gives `attach`, the one door from a Hugging Face model to its depth runner."""

from __future__ import annotations

from typing import Any

from tide.errors import TideError, UnsupportedModelError
from tide.models.depth import DepthRunner
from tide.models.selfcheck import self_check


def attach(model: Any, *, check: bool = True) -> DepthRunner:
    """Make a depth runner for `model`, proven on it.

    ```python
    with attach(model) as runner:
        cache = runner.new_cache(rows=1)
        hidden = runner.run(input_ids, 0, 8, cache=cache)
    ```

    The `with` may be entered again and again. The model is changed only while a pass runs.

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode.
        check: prove on a short random prompt that range-running equals the model's own forward
            pass.

    Raises:
        UnsupportedModelError, UnsupportedCacheError: if the model is of a kind that cannot be run
            by depth ranges.
        SelfCheckError: naming the first layer that differs, if the proof fails.
    """
    try:
        runner = DepthRunner(model)
        with runner.lock, runner:  # the first entry learns what the layers return
            if check:
                self_check(runner)
    except TideError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run by depth ranges: its own code failed with "
            f"{type(error).__name__}: {error}. TIDE runs decoder-only models loaded with "
            "AutoModelForCausalLM, with K and V in every layer."
        ) from error
    return runner
