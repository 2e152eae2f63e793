"""The depth runner: run layers `[lo, hi)` of a causal language model and count what ran.

How the layers are reached is the business of the two subclasses: `segments.py` runs slices of the
decoder, `shims.py` the whole decoder with most of its layers passed over.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tide.errors import RangeError, UnsupportedCacheError
from tide.kernels.arithmetic import scaled
from tide.models.cache import WaterlineCache
from tide.models.chunk import Chunk
from tide.models.locate import locate, text_config
from tide.models.refuse import refuse_unsupported
from tide.models.tokens import TokenBatch
from tide.stats import LayerCounts

# From the output of layers, `[sequences, new_tokens, hidden]`, and what was noted of the tokens,
# `[sequences, new_tokens, notes]`, to what is wanted of them.
Then = Callable[[Tensor, Tensor], Any]
# Layers `(lo, hi)`, and what follows them.
Stage = tuple[tuple[int, int], Then]


class DepthRunner(ABC):
    """Runs depth ranges of a causal language model and counts what ran.

    `tide.attach` makes one and proves it on the model first.

    Attributes:
        name: how it reaches the layers: "segments" or "shims".
        model, parts, config: the model, its located parts and its text config.
        position_limit: tokens beyond which its rotary positions change meaning; None if never.
        takes_trees: whether draft trees may be run: False if the self-check found them to differ.
        counts: layer calls and tokens so far.
        lock: to be held by a thread while it uses the runner, whose counters are shared.
    """

    name: str

    def __init__(self, model: Any) -> None:
        refuse_unsupported(model)
        self.model = model
        self.lock = threading.RLock()
        self.parts = locate(model)
        self.config = text_config(model)
        self.n_layers = len(self.parts.layers)
        self.takes_trees = _by_position_ids(self.config)
        self.counts = LayerCounts.zeros(self.n_layers)
        self.position_limit = position_limit(self.config)

    @property
    def input_device(self) -> torch.device:
        """Where the model takes its token ids; for offloaded embeddings, where they run."""
        embeddings = self.model.get_input_embeddings()
        device = embeddings.weight.device
        return (
            device if device.type != "meta" else torch.device(embeddings._hf_hook.execution_device)
        )

    def new_cache(self, sequences: int, capacity: int | None = None) -> WaterlineCache:
        """An empty cache.

        Args:
            sequences: sequences of the batch.
            capacity: most tokens that a sequence will have, padding included; None if not known.
        """
        return WaterlineCache(self.n_layers, sequences, capacity)

    def prepare(self, stages: Sequence[Stage], sequences: int) -> Iterator[tuple[int, int]]:
        """Get ready for passes over a batch; most runners always are.

        Args:
            stages: that together are the whole depth.
            sequences: of the batch.

        Yields:
            How many parts of that are done, and of how many.
        """
        return iter(())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Passes that are not decoding, such as proofs and measurements, are not counted."""
        counts, self.counts = self.counts, LayerCounts.zeros(self.n_layers)
        try:
            yield
        finally:
            self.counts = counts

    def run(
        self,
        tokens: TokenBatch,
        lo: int,
        hi: int,
        *,
        cache: WaterlineCache,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run layers `[lo, hi)` on tokens that have passed the layers below; KV goes to `cache`.

        Args:
            tokens: one line for each sequence of the cache.
            lo: first layer to run, counted from 0.
            hi: the layer to stop before.
            cache: from `new_cache`.
            hidden: output of layer `lo - 1` for these tokens, `[sequences, new_tokens, hidden]`;
                required if `lo > 0`.

        Returns:
            Output of layer `hi - 1`, before the final norm, `[sequences, new_tokens, hidden]`;
            padding is undefined.
        """
        return self.run_then(None, tokens, (lo, hi), cache=cache, hidden=hidden)[0]

    def run_then(
        self,
        then: Then | None,
        tokens: TokenBatch,
        layers: tuple[int, int],
        *,
        cache: WaterlineCache,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Run layers `[lo, hi)` as `run` does, and `then` on their output; where compiled, as one.

        Returns:
            The output of the layers, and what `then` makes of it.
        """
        lo, hi = layers
        if (hidden is None) != (lo == 0):
            raise RangeError(
                f"Got layers [{lo}, {hi}) {'without' if hidden is None else 'with'} a hidden "
                f"state. Layer 0 starts from the tokens; any other needs the output of the layer "
                f"below it."
            )
        states, result, chunk = self._pass(tokens, layers, cache, hidden, then)
        for layer in range(lo, hi):
            self.counts.calls[layer] += 1
            self.counts.tokens[layer] += chunk.tokens
        return states, result

    def fill_kv(
        self, tokens: TokenBatch, lo: int, hi: int, *, cache: WaterlineCache, hidden: Tensor
    ) -> None:
        """Append to layers `[lo, hi)` the KV that each makes of the same `hidden`; no more.

        Takes what `run` takes; `hidden`, `[sequences, new_tokens, hidden]`, is the state in which
        the tokens exited.
        """
        *_, chunk = self._pass(tokens, (lo, hi), cache, hidden, fill=True)
        for layer in range(lo, hi):
            self.counts.fills[layer] += chunk.tokens

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits for an output of the last layer, `[..., hidden]` to `[..., vocabulary]`."""
        return scale_logits(self.config, self.parts.head(self.parts.norm(hidden)))

    @torch.no_grad()
    def target_tokens(self, ids: Tensor, start: int, *, step: int = 256) -> list[int]:
        """What full depth predicts after each token of one sequence from position `start` on.

        Args:
            ids: the sequence, `[tokens]`.
            start: the first position of interest.
            step: positions whose logits are held at once.
        """
        cache = self.new_cache(1, len(ids))
        with self.uncounted():
            hidden = self.run(TokenBatch(ids[None]), 0, self.n_layers, cache=cache)[0]
        pieces = hidden[start:].split(step)
        return [token for piece in pieces for token in self.logits(piece).argmax(-1).tolist()]

    @abstractmethod
    def _forward(self, hidden: Tensor | None, chunk: Chunk, cache: WaterlineCache) -> Tensor:
        """Run the layers of the chunk; their output, or `hidden` itself if they only fill KV."""

    def _forward_then(
        self, then: Then | None, hidden: Tensor | None, chunk: Chunk, cache: WaterlineCache
    ) -> tuple[Tensor, Any]:
        """Run the layers of the chunk, and `then` on their output."""
        states = self._forward(hidden, chunk, cache)
        return states, None if then is None else then(states, chunk.places.notes)

    @torch.no_grad()
    def _pass(
        self,
        tokens: TokenBatch,
        layers: tuple[int, int],
        cache: WaterlineCache,
        hidden: Tensor | None,
        then: Then | None = None,
        *,
        fill: bool = False,
    ) -> tuple[Tensor, Any, Chunk]:
        self._check(tokens, layers, cache, hidden)
        chunk = cache.open(tokens, layers, fill=fill, device=self.input_device)
        done = False
        try:
            given = None if hidden is None else chunk.zero_padding(hidden)
            states, result = self._forward_then(then, given, chunk, cache)
            done = True
        finally:
            cache.close(done=done)
        return states, result, chunk

    def _check(
        self, tokens: TokenBatch, layers: tuple[int, int], cache: Any, hidden: Tensor | None
    ) -> None:
        if not isinstance(cache, WaterlineCache):
            raise UnsupportedCacheError(
                f"Got a {type(cache).__name__}. Sequences at different depths need the runner's "
                f"own cache: use runner.new_cache(sequences). Static, quantised and other caches "
                f"cannot hold them."
            )
        lo, hi = layers
        if not 0 <= lo < hi <= self.n_layers:
            raise RangeError(
                f"Got layers [{lo}, {hi}); allowed are 0 <= lo < hi <= {self.n_layers}."
            )
        if not isinstance(tokens, TokenBatch):
            raise RangeError(
                f"Got tokens as a {type(tokens).__name__}; pass TokenBatch(input_ids)."
            )
        shape = tokens.ids.shape
        if len(shape) != 2 or shape[0] != cache.sequences:
            raise RangeError(
                f"Got token ids of shape {list(shape)}; need [{cache.sequences}, new_tokens], one "
                "line for each sequence of the cache."
            )
        named = (("hidden", hidden), ("valid", tokens.valid), ("positions", tokens.positions))
        for name, given in named:
            if given is not None and given.shape[:2] != shape:
                raise RangeError(
                    f"Got {name} of shape {list(given.shape)} for tokens of shape {list(shape)}; "
                    "the first two dimensions must agree."
                )


def _by_position_ids(config: Any) -> bool:
    """Whether a token's position is what `position_ids` say, in all that the model does with it.

    The attention temperature of Llama 4 counts slots instead, in steps of `floor_scale`; nodes of a
    tree stand in slots behind their position.
    """
    tuned = getattr(config, "attn_temperature_tuning", False)
    return not tuned or config.max_position_embeddings <= config.floor_scale


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


def logit_scales(config: Any) -> tuple[float, float]:
    """What some families do to the head's output: a factor, and a soft cap; 0 for none."""
    multiplier = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return (1.0 if multiplier is None else multiplier) / (divisor or 1.0), cap or 0.0


def scale_logits(config: Any, logits: Tensor) -> Tensor:
    """Logits as the model gives them, from the head's output.

    The self-check proves it against the model's own logits.
    """
    return scaled(logits, *logit_scales(config))
