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
        step_costs: dict[int, float] | None = None  # seconds by tokens, for the proposer
        _measures = False  # whether to measure them in the first pass

        def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
            self._vllm_config = vllm_config
            self._settings: Settings | None = None  # in mode "exit"
            if "tide" in (vllm_config.additional_config or {}):
                from tide.vllm.settings import Settings

                found = Settings.read(vllm_config)
                self._settings = found if found is not None and found.mode == "exit" else None
                drafts = vllm_config.speculative_config is not None
                self._measures = self._settings is None and drafts

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
            if self.tide is not None:
                return self.tide(input_ids, positions, inputs_embeds)
            found = super().forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
            )
            if self._measures:
                self._measures = False
                one_stage = intermediate_tensors is None and isinstance(found, Tensor)
                if input_ids is not None and one_stage:
                    self._measure(input_ids, positions)
            return found

        def _measure(self, input_ids: Tensor, positions: Tensor) -> None:
            """Measure steps, if this is vLLM's pass to warm up."""
            from tide.vllm.costs import measure_steps

            def step(n: int) -> None:
                hidden = super(WithExits, self).forward(input_ids[:n], positions[..., :n])
                self.compute_logits(hidden)

            self.step_costs = measure_steps(step, len(input_ids))

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
