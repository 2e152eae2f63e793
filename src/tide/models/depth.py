"""Gives the runner: any depth range of a causal language model, through the model's own forward.

While the runner is attached, the decoder's loop over its layers meets a gate in each layer's place.
A gate inside the range calls its layer; outside, it hands its input on, and the layer, with
whatever hooks sit on it, is not touched. So embeddings, positions, masks and calls are the model's
own, in every family, and a layer that is not run is not called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tide.errors import RangeError, UnsupportedCacheError, UnsupportedModelError
from tide.models.cache import Chunk, WaterlineCache
from tide.models.kvfill import call_until_written
from tide.models.locate import locate, text_config
from tide.models.masks import attention_mask
from tide.models.refuse import refuse_unsupported
from tide.stats import LayerCounts


@dataclass
class _Pass:
    """One run of the decoder, and the hidden states on their way through it."""

    chunk: Chunk
    hidden: (
        Tensor | None
    )  # before layer `lo`: what is injected there; then the output of the last layer run


class _Gate:
    """Stands in for one layer in the decoder's own loop; in all else, it is that layer."""

    def __init__(self, runner: DepthRunner, index: int, layer: nn.Module) -> None:
        self.runner, self.index, self.layer = runner, index, layer

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.runner._at_gate(self, hidden_states, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class _GatedList(nn.ModuleList):
    """The decoder's list of layers while a runner is attached."""

    gates: list[_Gate] | None = None  # set while a pass runs

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self.gates is None else iter(self.gates)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if self.gates is None else self.gates[index]


class DepthRunner:
    """Runs depth ranges of a causal language model and counts what ran.

    A context manager: the model is changed only inside `with runner:`, and is put back on leaving
    it, also after an exception. `tide.models.attach.attach` makes one and proves it on the model
    first.

    Attributes:
        model, parts, config: the model, its located parts and its text config.
        counts: layer calls and tokens so far.
    """

    def __init__(self, model: Any) -> None:
        refuse_unsupported(model)
        self.model = model
        self.parts = locate(model)
        self.config = text_config(model)
        self.n_layers = len(self.parts.layers)
        self.counts = LayerCounts.zeros(self.n_layers)
        self._gates = [_Gate(self, i, layer) for i, layer in enumerate(self.parts.layers)]
        self._pass: _Pass | None = None
        self._returns_tuple: bool | None = (
            None  # decoder layers return a tensor or a tuple, by family
        )
        self._list_class: type | None = None

    def __enter__(self) -> DepthRunner:
        layers = self.parts.layers
        if isinstance(layers, _GatedList):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} already has a runner attached. Leave its `with` "
                f"first, or share it."
            )
        self._list_class = type(layers)
        # A change of class leaves the list itself, its name and its content as they are; undone by
        # __exit__.
        layers.__class__ = _GatedList
        if self._returns_tuple is None:
            try:
                self._learn_return_type()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._list_class is not None
        self.parts.layers.__class__ = self._list_class
        self._list_class = None

    @property
    def input_device(self) -> torch.device:
        """Where the model takes its token ids.

        For offloaded embeddings, where accelerate runs them.
        """
        embeddings = self.model.get_input_embeddings()
        device = embeddings.weight.device
        return (
            device if device.type != "meta" else torch.device(embeddings._hf_hook.execution_device)
        )

    def new_cache(self, rows: int) -> WaterlineCache:
        """An empty cache for `rows` rows."""
        return WaterlineCache(self.n_layers, rows)

    def run(
        self,
        input_ids: Tensor,
        lo: int,
        hi: int,
        *,
        cache: WaterlineCache,
        hidden: Tensor | None = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run layers `[lo, hi)` on tokens that have passed the layers below; K and V go to `cache`.

        Args:
            input_ids: the tokens, `[rows, new_tokens]`.
            lo, hi: the layers to run, counted from 0.
            cache: from `new_cache`.
            hidden: output of layer `lo - 1` for these tokens, `[rows, new_tokens, hidden]`;
                required if `lo > 0`.
            valid: False where a column is padding, `[rows, new_tokens]`; any side. None if there is
                none.
            positions: position of each token, `[rows, new_tokens]`; by default its place in the
                row.

        Returns:
            Output of layer `hi - 1`, before the final norm, `[rows, new_tokens, hidden]`; padding
            is undefined.
        """
        return self._drive(input_ids, lo, hi, cache, hidden, valid, positions, fill=False)

    def fill_kv(
        self,
        input_ids: Tensor,
        lo: int,
        hi: int,
        *,
        cache: WaterlineCache,
        hidden: Tensor,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Append to layers `[lo, hi)` the K and V that each makes of the same `hidden`; no more.

        Takes what `run` takes; `hidden`, `[rows, new_tokens, hidden]`, is the state in which the
        tokens left.
        """
        self._drive(input_ids, lo, hi, cache, hidden, valid, positions, fill=True)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits for an output of the last layer, `[..., hidden]` to `[..., vocabulary]`."""
        return scale_logits(self.config, self.parts.head(self.parts.norm(hidden)))

    @torch.no_grad()
    def _drive(
        self,
        input_ids: Tensor,
        lo: int,
        hi: int,
        cache: WaterlineCache,
        hidden: Tensor | None,
        valid: Tensor | None,
        positions: Tensor | None,
        *,
        fill: bool,
    ) -> Tensor:
        self._check(input_ids, lo, hi, cache, hidden, fill)
        chunk = cache.open(
            lo, hi, input_ids.shape[1], valid=valid, device=input_ids.device, fill=fill
        )
        running = self._pass = _Pass(chunk, hidden)
        layers, done = vars(self.parts.layers), False
        layers["gates"] = self._gates
        try:
            self.parts.decoder(
                input_ids=input_ids,
                attention_mask=attention_mask(chunk, cache.starts, self.config, self.model.dtype),
                position_ids=chunk.positions if positions is None else positions,
                past_key_values=cache,
                use_cache=True,
            )
            done = True
        finally:
            del layers["gates"]
            self._pass = None
            cache.close(done=done)
        assert running.hidden is not None
        return running.hidden

    def _at_gate(self, gate: _Gate, hidden: Tensor, args: tuple, kwargs: dict) -> Any:
        running = self._pass
        assert running is not None
        chunk, index = running.chunk, gate.index
        if chunk.lo <= index < chunk.hi:
            if index == chunk.lo and running.hidden is not None:
                hidden = running.hidden
            if chunk.fill:
                call_until_written(gate.layer, hidden, args, kwargs)
                self.counts.fills[index] += chunk.tokens
            else:
                output = gate.layer(hidden, *args, **kwargs)
                self._returns_tuple = isinstance(output, tuple)
                hidden = output[0] if self._returns_tuple else output
                self.counts.calls[index] += 1
                self.counts.tokens[index] += chunk.tokens
            running.hidden = hidden
        return (hidden,) if self._returns_tuple else hidden

    def _learn_return_type(self) -> None:
        """Gates must return what their layers would.

        One call of layer 0, not counted, shows what that is.
        """
        counts, self.counts = self.counts, LayerCounts.zeros(self.n_layers)
        try:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.input_device)
            self.run(token, 0, 1, cache=self.new_cache(1))
        finally:
            self.counts = counts

    def _check(
        self, input_ids: Tensor, lo: int, hi: int, cache: Any, hidden: Tensor | None, fill: bool
    ) -> None:
        if self._list_class is None:
            raise UnsupportedModelError("The runner is not attached. Use it inside `with runner:`.")
        if not isinstance(cache, WaterlineCache):
            raise UnsupportedCacheError(
                f"Got a {type(cache).__name__}. Rows at different depths need the runner's own "
                f"cache: use runner.new_cache(rows). Static, quantised and other caches cannot "
                f"hold them."
            )
        if not 0 <= lo < hi <= self.n_layers:
            raise RangeError(
                f"Got layers [{lo}, {hi}); allowed are 0 <= lo < hi <= {self.n_layers}."
            )
        if input_ids.ndim != 2 or input_ids.shape[0] != cache.rows:
            raise RangeError(
                f"Got input_ids of shape {list(input_ids.shape)}; need [{cache.rows}, new_tokens], "
                "one row for each row of the cache."
            )
        if (hidden is None) != (lo == 0) and not fill:
            raise RangeError(
                f"Got layers [{lo}, {hi}) {'without' if hidden is None else 'with'} a hidden "
                f"state. Layer 0 starts from the tokens; any other needs the output of the layer "
                f"below it."
            )
        if hidden is not None and hidden.shape[:2] != input_ids.shape:
            raise RangeError(
                f"Got hidden states of shape {list(hidden.shape)} for tokens of shape "
                f"{list(input_ids.shape)}; the first two dimensions must agree."
            )


def scale_logits(config: Any, logits: Tensor) -> Tensor:
    """What some families do to the head's output.

    The self-check proves it against the model's own logits.
    """
    multiplier = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if multiplier is not None:
        logits = logits * multiplier
    if divisor is not None:
        logits = logits / divisor
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
