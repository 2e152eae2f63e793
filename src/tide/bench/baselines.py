"""The ways in which people run a model without us."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import CompileConfig


def compiled_generate(model: Any, options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """`generate` as transformers documents it for speed: a static cache, and a compiled forward.

    The cache of a call is as long as that call needs, which is what favours `generate` most: a
    longer one costs attention over slots that hold nothing. Its length is a symbol in the graph, so
    that prompts of all lengths are compiled once.

    Args:
        model: whose `generate` is called.
        options: of `generate`.
    """
    settings: Any = CompileConfig(
        fullgraph=True,
        dynamic=True,
        mode="reduce-overhead" if model.device.type == "cuda" else "default",
    )
    settings._compile_all_devices = True  # CPUs too, where `generate` does not compile by itself

    def run(prompt: Mapping[str, Any]) -> Any:
        model._previous_max_cache_length = -1  # else the cache is as long as the longest before
        return model.generate(
            **prompt, **options, cache_implementation="static", compile_config=settings
        )

    return run
