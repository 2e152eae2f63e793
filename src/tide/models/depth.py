"""Gives the runner: any depth range of a causal language model, through the model's own forward.

While the runner is attached, the decoder's loop over its layers meets a gate in each layer's place.
A gate inside the range calls its layer; outside, it hands its input on, and the layer, with
whatever hooks sit on it, is not touched. So embeddings, positions, masks and calls are the model's
own, in every family, and a layer that is not run is not called.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tide.errors import RangeError, UnsupportedCacheError, UnsupportedModelError
from tide.models.cache import Chunk, WaterlineCache
from tide.models.kvfill import call_until_written
from tide.models.locate import locate, text_config
from tide.models.masks import attention_mask
from tide.models.refuse import refuse_unsupported
from tide.stats import LayerCounts

# One for each model: while a pass runs its layers are gates, for every other runner too.
_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


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
    """The class of the decoder's list of layers while a pass runs: its loop meets the gates."""

    gates: list[_Gate]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.gates)

    def __getitem__(self, index: Any) -> Any:
        return self.gates[index]


class DepthRunner:
    """Runs depth ranges of a causal language model and counts what ran.

    A context manager: runs are made inside `with runner:`. The model is changed only while a pass
    runs, and is put back when it ends, also by an exception. `tide.models.attach.attach` makes a
    runner and proves it on the model first.

    Attributes:
        model, parts, config: the model, its located parts and its text config.
        position_limit: tokens beyond which its rotary positions change meaning; None if never.
        counts: layer calls and tokens so far.
        lock: one for all runners of the model; to be held by a thread while it runs passes.
    """

    def __init__(self, model: Any) -> None:
        refuse_unsupported(model)
        self.model = model
        self.lock = _LOCKS.setdefault(model, threading.RLock())
        self.parts = locate(model)
        self.config = text_config(model)
        self.n_layers = len(self.parts.layers)
        self.counts = LayerCounts.zeros(self.n_layers)
        self.position_limit = position_limit(self.config)
        self._gates: list[_Gate] | None = None  # while attached
        self._entered = 0
        self._pass: _Pass | None = None  # while running
        self._returns_tuple: bool | None = None  # decoder layers return a tensor or a tuple

    def __enter__(self) -> DepthRunner:
        # Made anew each time: adapters and quantisation replace layers.
        self._gates = [_Gate(self, i, layer) for i, layer in enumerate(self.parts.layers)]
        self._entered += 1
        if self._returns_tuple is None:
            try:
                self._learn_return_type()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._gates = None

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
        provisional: bool = False,
    ) -> Tensor:
        """Run layers `[lo, hi)` on tokens that have passed the layers below; K and V go to `cache`.

        Args:
            input_ids: the tokens, `[rows, new_tokens]`.
            lo: first layer to run, counted from 0.
            hi: the layer to stop before.
            cache: from `new_cache`.
            hidden: output of layer `lo - 1` for these tokens, `[rows, new_tokens, hidden]`;
                required if `lo > 0`.
            valid: False where a column is padding, `[rows, new_tokens]`; any side. None if there is
                none.
            positions: place of each token in its row, `[rows, new_tokens]`; by default those after
                the tokens that have passed. Says what the token may see and where its K and V go.
            provisional: what the pass writes may be read by the next passes of the same range, but
                does not count as passed, and is overwritten by the pass that does.

        Returns:
            Output of layer `hi - 1`, before the final norm, `[rows, new_tokens, hidden]`; padding
            is undefined.
        """
        return self._drive(
            input_ids, lo, hi, cache, hidden, valid, positions, provisional=provisional
        )

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
        fill: bool = False,
        provisional: bool = False,
    ) -> Tensor:
        self._check(input_ids, lo, hi, cache, hidden, valid, positions, fill)
        valid = None if valid is None else valid.bool()
        chunk = cache.open(
            lo, hi, input_ids.shape[1], device=input_ids.device, valid=valid, positions=positions,
            fill=fill, provisional=provisional,
        )  # fmt: skip
        if hidden is not None and valid is not None:
            # Padding may hold anything, and a NaN would spread through the masked K and V.
            hidden = hidden.masked_fill(~valid[..., None].to(hidden.device), 0)
        running = self._pass = _Pass(chunk, hidden)
        layers, done = self.parts.layers, False
        # A change of class leaves the list, its name and its content as they are.
        list_class, layers.__class__ = type(layers), _GatedList
        layers.__dict__["gates"] = self._gates
        try:
            self.parts.decoder(
                input_ids=input_ids,
                attention_mask=attention_mask(chunk, self.config, self.model.dtype),
                position_ids=chunk.positions,
                past_key_values=cache,
                use_cache=True,
            )
            done = True
        finally:
            layers.__class__ = list_class
            del layers.__dict__["gates"]
            self._pass = None
            cache.close(done=done and not provisional)
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
                hidden = first_tensor(output)
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
        self,
        input_ids: Tensor,
        lo: int,
        hi: int,
        cache: Any,
        hidden: Tensor | None,
        valid: Tensor | None,
        positions: Tensor | None,
        fill: bool,
    ) -> None:
        if self._gates is None:
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
        for name, given in (("hidden", hidden), ("valid", valid), ("positions", positions)):
            if given is not None and given.shape[:2] != input_ids.shape:
                raise RangeError(
                    f"Got {name} of shape {list(given.shape)} for tokens of shape "
                    f"{list(input_ids.shape)}; the first two dimensions must agree."
                )


def position_limit(config: Any) -> int | None:
    """Tokens beyond which rotary frequencies depend on the length of a pass: longrope, dynamic."""
    parameters = getattr(config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if parameters.get("rope_type") == "longrope":
        return original or getattr(config, "original_max_position_embeddings", None)
    if parameters.get("rope_type") == "dynamic":
        return original or config.max_position_embeddings
    return None


def first_tensor(output: Any) -> Tensor:
    """The hidden states that a decoder layer returned; by family a tensor, or first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


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
