"""`attach`: the way from a Hugging Face model to its depth runner."""

from __future__ import annotations

import warnings
from typing import Any

from tide.errors import ConfigError, SelfCheckError, TideError, UnsupportedModelError
from tide.models.compiled import CompiledRunner, CompileWarning
from tide.models.runner import DepthRunner
from tide.models.segments import SegmentRunner
from tide.models.selfcheck import self_check
from tide.models.shims import ShimRunner

RUNNERS: dict[str, type[DepthRunner]] = {
    "segments": SegmentRunner,
    "compiled segments": CompiledRunner,
    "shims": ShimRunner,
}


def attach(
    model: Any, *, check: bool = True, runner: str | None = None, compile: bool = False
) -> DepthRunner:
    """Make a depth runner for `model`, proven on it.

    ```python
    runner = attach(model)
    cache = runner.new_cache(sequences=1)
    hidden = runner.run(TokenBatch(input_ids), 0, 8, cache=cache)
    ```

    Segments, which do not touch the model, are tried first. Where no slice of the decoder can be
    made, or none that is proven equal, layer shims do the same; `runner.name` tells which it is.

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode.
        check: prove on a short random prompt that range-running equals the model's own forward
            pass.
        runner: "segments", "compiled segments" or "shims": require this one.
        compile: compile segments; where there are none, with a warning.

    Raises:
        UnsupportedModelError, UnsupportedCacheError: if the model is of a type that cannot be run
            by depth ranges.
        SelfCheckError: naming the first layer that differs, if the proof fails.
    """
    if runner is not None and runner not in RUNNERS:
        raise ConfigError(f"runner is {runner!r}; it must be one of {', '.join(RUNNERS)}.")
    if runner is not None:
        return _attach(model, RUNNERS[runner], check)
    try:
        return _attach(model, CompiledRunner if compile else SegmentRunner, check)
    except (UnsupportedModelError, SelfCheckError) as error:
        made = _attach(model, ShimRunner, check)
        if compile:
            warnings.warn(
                f"{model.__class__.__name__} runs uncompiled, since its decoder cannot be cut "
                f"into segments: {error}",
                CompileWarning,
                stacklevel=2,
            )
        return made


def _attach(model: Any, runner: type[DepthRunner], check: bool) -> DepthRunner:
    try:
        made = runner(model)
        if check:
            with made.lock:
                self_check(made)
    except TideError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{model.__class__.__name__} cannot be run by depth ranges: its own code failed with "
            f"{type(error).__name__}: {error}. TIDE runs decoder-only models loaded with "
            "AutoModelForCausalLM, with KV in every layer."
        ) from error
    return made
