"""Segments of a decoder that vLLM compiles apart, with Python between them.

vLLM compiles a module as one graph, once and for all, so a decision cannot stand inside. A unit is
such a module: one segment of the decoder, or what stores the KV of one. With --enforce-eager
vLLM compiles none of them, and they run as they are.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context

from tide.vllm.stores import StoreKV, copy_of

logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown


class _Segment(nn.Module):
    """Layers, and the final norm behind the last of them."""

    def __init__(
        self, *, vllm_config: Any, prefix: str = "", layers: Sequence[Any], norm: Any = None
    ) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        assert residual is not None
        if self.norm is None:
            return hidden_states, residual
        return self.norm(hidden_states, residual)


class Attended(nn.Module):
    """In place of attention: returns, once, the output that was computed before."""

    output: Tensor | None = None

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """What attention would return."""
        output, self.output = self.output, None  # a long pass would keep one of each layer alive
        assert output is not None
        return output


def without_attention(layer: Any, attended: Attended) -> Any:
    """A copy of a layer, with its weights, whose attention is given."""
    made = copy_of(layer)
    made.self_attn = attended
    return made


class Units:
    """The segments of a decoder, and for each but the first what only stores its KV.

    Args:
        decoder: vLLM's.
        vllm_config: vLLM's.
        bounds: the layers at which segments begin, then the number of layers.

    Attributes:
        layers: of each segment, its first and the one after its last.
    """

    def __init__(self, decoder: Any, vllm_config: Any, bounds: Sequence[int]) -> None:
        self.layers = list(itertools.pairwise(bounds))
        self._config = vllm_config
        self._every = every = list(decoder.layers)
        self._segments = [
            self._make(
                _Segment, lo, hi, layers=every[lo:hi],
                norm=decoder.norm if hi == len(every) else None,
            )
            for lo, hi in self.layers
        ]  # fmt: skip
        self._stores = [
            self._make(StoreKV, lo, hi, layers=every[lo:hi]) for lo, hi in self.layers[1:]
        ]
        compilation = vllm_config.compilation_config
        graphs = compilation.cudagraph_mode.has_piecewise_cudagraphs()
        self._sizes = sorted(compilation.cudagraph_capture_sizes or ()) if graphs else []
        self._buffers: list[Tensor] = []

    @property
    def compiles(self) -> bool:
        """Whether vLLM compiles them."""
        return not self._segments[0].do_not_compile

    def run(self, number: int, positions: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Run a segment.

        Args:
            number: of the segment.
            positions: of the tokens, `[t]`.
            states: what vLLM's layers carry, `[t, hidden]` each: the embeddings for the first
                segment, hidden state and residual for the others.

        Returns:
            Hidden state and residual; of the last segment the normed state and the one before.
        """
        hidden, residual = self._call(self._segments[number], positions, *states)
        return hidden, residual

    def store(self, number: int, positions: Tensor, states: Tensor) -> None:
        """Store the KV of a segment, not the first, and run nothing else of it."""
        self._call(self._stores[number - 1], positions, states)

    def check(self, positions: Tensor, hidden: Tensor) -> None:
        """Compare KV computed for several layers at once with that of each layer."""
        for (lo, hi), store in zip(self.layers[1:], self._stores, strict=True):
            if not store.check(self._every[lo:hi], positions, hidden):
                logger.warning(
                    "TIDE: keys and values of layers %d to %d cannot be computed at once for this "
                    "model; they are computed layer by layer.", lo, hi - 1,
                )  # fmt: skip

    def warm_up(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run every unit, so that vLLM compiles all of them now; returns the normed states."""
        states: tuple[Tensor, ...] = (hidden,)
        for number in range(len(self.layers)):
            if number:
                self.store(number, positions, states[0] + states[1])
            states = self.run(number, positions, *states)
        return states[0]

    def _call(self, unit: Any, *given: Tensor) -> Any:
        """Run a unit; in front of CUDA graphs, from static buffers and at a captured size."""
        if not self._sizes:
            return unit(*given)
        tokens = len(given[0])
        at = bisect.bisect_left(self._sizes, tokens)
        size = self._sizes[at] if at < len(self._sizes) else tokens
        if not self._buffers:  # positions, hidden state, residual
            most = self._config.scheduler_config.max_num_batched_tokens
            shapes = (given[0], given[1], given[1])
            self._buffers = [one.new_zeros((most, *one.shape[1:])) for one in shapes]
        used = self._buffers[: len(given)]
        for buffer, tensor in zip(used, given, strict=True):
            buffer[:tokens].copy_(tensor)
        context = get_forward_context()
        before = context.batch_descriptor
        if before is not None:  # it names the graph to replay
            context.batch_descriptor = dataclasses.replace(before, num_tokens=size)
        try:
            out = unit(*(buffer[:size] for buffer in used))
        finally:
            context.batch_descriptor = before
        # The graph's own memory is written again by the next replay.
        return [tensor[:tokens].clone() for tensor in out]

    def _make(self, base: type[nn.Module], lo: int, hi: int, **parts: Any) -> Any:
        """A unit of its own class and code.

        vLLM finds compiled code by the code object, and on disk by the qualified name and the first
        line of `forward`; units that shared them would run each other's graph.
        """
        name = f"{base.__name__.strip('_')}_{lo}_{hi}"
        forward: Any = base.forward
        own = types.FunctionType(
            forward.__code__.replace(co_name=name), forward.__globals__, name, forward.__defaults__
        )
        own.__annotations__, own.__qualname__ = dict(forward.__annotations__), f"{name}.forward"
        unit: Any = type(name, (base,), {"forward": own, "__module__": __name__})
        tensors = [name for name in forward.__annotations__ if name != "return"]
        unit = support_torch_compile(dynamic_arg_dims=dict.fromkeys(tensors, 0))(unit)
        with set_current_vllm_config(self._config), set_model_tag(name):
            return unit(vllm_config=self._config, prefix=name, **parts)
