"""vLLM's models with exits: subclasses of vLLM's own whose decoder runs segment by segment.

Without "tide" in the additional configuration they behave exactly as vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tide.errors import UnsupportedModelError
from tide.vllm import ARCHITECTURES

if TYPE_CHECKING:
    from tide.vllm.depth import DepthForward
    from tide.vllm.settings import Settings


def _with_exits(base: Any) -> Any:
    class WithExits(base):
        tide: DepthForward | None = None

        def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            self._vllm_config = vllm_config
            self._settings: Settings | None = None  # in mode "exit"; drafts need no change here
            if "tide" in (vllm_config.additional_config or {}):
                from tide.vllm.settings import Settings

                found = Settings.read(vllm_config)
                self._settings = found if found is not None and found.mode == "exit" else None

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            if self.tide is not None:
                raise UnsupportedModelError(
                    "The weights cannot be replaced while exits are on: the artifact is for the "
                    "old ones. Restart vLLM."
                )
            loaded = super().load_weights(weights)
            if self._settings is not None:
                from tide.vllm.depth import DepthForward

                self.tide = DepthForward(self, self._vllm_config, self._settings)
            return loaded

        def forward(
            self,
            input_ids: Tensor | None,
            positions: Tensor,
            intermediate_tensors: Any = None,
            inputs_embeds: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            if self._settings is not None and self.tide is None:
                raise UnsupportedModelError(
                    "This load format does not call load_weights, so exits cannot be set up. Use "
                    "--load-format auto."
                )
            if self.tide is None:
                return super().forward(
                    input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
                )
            return self.tide(input_ids, positions, inputs_embeds)

    WithExits.__name__ = WithExits.__qualname__ = f"Tide{base.__name__}"
    WithExits.__module__ = __name__
    return WithExits


def __getattr__(name: str) -> Any:
    """The class of an architecture; imports the vLLM class that it extends, and no other."""
    base = name.removeprefix("Tide")
    if base not in ARCHITECTURES:
        raise AttributeError(name)
    globals()[name] = made = _with_exits(getattr(import_module(ARCHITECTURES[base]), base))
    return made
