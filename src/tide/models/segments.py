"""Segments: slices of a decoder, each a module of its own that runs some of its layers.

A segment is a shallow copy of the decoder whose list of layers is cut. The layers themselves, and
whatever hooks sit on them, are the model's own; embeddings, positions, masks and calls are those of
the decoder's own forward. Hidden states enter as `inputs_embeds`. Nothing of the user's model
changes, so anybody may use it at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from tide.errors import UnsupportedModelError
from tide.models.cache import WaterlineCache
from tide.models.chunk import Chunk, Places
from tide.models.families import EMBEDDING_SCALES, LEARNED_POSITIONS
from tide.models.kvfill import call_until_written
from tide.models.layer_shim import LayerShim
from tide.models.locate import Parts
from tide.models.masks import attention_mask
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch

# Settings by which a config makes the decoder return more than its last hidden state.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


class SegmentRunner(DepthRunner):
    """Runs depth ranges as segments; see `DepthRunner`."""

    name = "segments"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        refuse_slices(self.parts)
        self._segments: dict[tuple[int, int, bool], tuple[list[Any], nn.Module]] = {}
        self._returns_tuple = self._layers_return_tuples()

    def _forward(self, hidden: Tensor | None, chunk: Chunk, cache: WaterlineCache) -> Tensor:
        mask = attention_mask(chunk, self.config, self.model.dtype)
        segment = self._segment(chunk.lo, chunk.hi, chunk.fill)
        return call_segment(segment, chunk.places, hidden, mask, cache)

    def _segment(self, lo: int, hi: int, fill: bool) -> nn.Module:
        """The segment of some layers; made anew where something of the decoder was replaced.

        Adapters and quantisation replace layers, `resize_token_embeddings` the embeddings, and
        `set_attn_implementation` what masks the decoder makes.
        """
        decoder: Any = self.parts.decoder
        # Not list(layers), which may be the shims of another runner's pass.
        layers = list(self.parts.layers._modules.values())[lo:hi]
        parts = [*decoder._modules.values(), *layers, decoder.config._attn_implementation]
        made_of, segment = self._segments.get((lo, hi, fill), (None, None))
        if segment is None or made_of != parts:
            run = [LayerShim(layer, self._fill_layer) for layer in layers] if fill else layers
            segment = make_segment(self.parts, self.config, lo, run)
            self._segments[lo, hi, fill] = parts, segment
        return segment

    def _fill_layer(self, layer: Any, hidden: Tensor, args: tuple, kwargs: dict) -> Any:
        """Write KV, and hand the input on in the form in which the layer would return it."""
        call_until_written(layer, hidden, args, kwargs)
        return (hidden,) if self._returns_tuple else hidden

    @torch.no_grad()
    def _layers_return_tuples(self) -> bool:
        """One call of layer 0, not counted, shows what decoder layers return in this family."""
        seen: list[bool] = []

        def note(layer: Any, hidden: Tensor, args: tuple, kwargs: dict) -> Any:
            output = layer(hidden, *args, **kwargs)
            seen.append(isinstance(output, tuple))
            return output

        segment = make_segment(self.parts, self.config, 0, [LayerShim(self.parts.layers[0], note)])
        tokens = TokenBatch(torch.zeros(1, 1, dtype=torch.long, device=self.input_device))
        cache = WaterlineCache(self.n_layers, sequences=1)
        call_segment(segment, cache.open(tokens, (0, 1)).places, None, None, cache)
        return seen == [True]


def call_segment(
    segment: nn.Module, places: Places, hidden: Tensor | None, mask: Any, cache: Cache
) -> Tensor:
    """Output of a segment's last layer, `[sequences, new_tokens, hidden]`; KV goes to `cache`.

    Args:
        hidden: output of the layer below; None for the first segment.
        mask: in the form that the model takes.
    """
    inputs = {"input_ids": places.ids} if hidden is None else {"inputs_embeds": hidden}
    output = segment(
        **inputs,
        attention_mask=mask,
        position_ids=places.positions,
        past_key_values=cache,
        use_cache=True,
    )
    return output[0]


def make_segment(parts: Parts, config: Any, lo: int, run: Sequence[nn.Module]) -> nn.Module:
    """The decoder with the layers `run` only, from layer `lo` on, and without its final norm."""
    decoder = parts.decoder
    segment: Any = copy.copy(decoder)
    segment._modules = dict(decoder._modules)
    layers = nn.ModuleList()
    layers._modules = {str(i): layer for i, layer in enumerate(run)}
    segment._modules[_name_of(parts, "layers")] = layers
    segment._modules[_name_of(parts, "norm")] = nn.Identity()
    if lo:  # what is added to embeddings was added before the first segment
        for name in LEARNED_POSITIONS:
            if name in segment._modules:
                segment._modules[name] = _NoPositions()
        for name in EMBEDDING_SCALES:
            if name in vars(segment):
                vars(segment)[name] = 1.0
    # Decoders look up the type of their i-th layer, and make masks for the types that they have.
    segment.config = copy.copy(decoder.config)
    segment.config.num_hidden_layers = len(run)
    # Outputs that a config wants are collected by hooks, which each segment would add once more to
    # the layers of the model.
    for name in _COLLECTED:
        if getattr(segment.config, name, False):
            setattr(segment.config, name, False)
    if getattr(config, "layer_types", None) is not None:
        segment.config.layer_types = list(config.layer_types[lo : lo + len(run)])
    return segment


def refuse_slices(parts: Parts) -> None:
    """Raise if a slice of this decoder would not be what it looks like."""
    if "forward" in vars(parts.decoder):
        raise UnsupportedModelError(
            f"{type(parts.decoder).__name__} has a forward of its own, as accelerate's hooks make, "
            "which a copy would not follow."
        )
    for part in ("layers", "norm"):
        _name_of(parts, part)


def _name_of(parts: Parts, part: str) -> str:
    """Under which name the decoder keeps a part."""
    for name, module in parts.decoder._modules.items():
        if module is getattr(parts, part):
            return name
    raise UnsupportedModelError(
        f"{type(parts.decoder).__name__} does not keep its {part} itself, so it cannot be sliced."
    )


class _NoPositions(nn.Module):
    """In place of learned positions, which were added before the first segment."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())
