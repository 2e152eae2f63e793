"""Gives the forward pass with exits: vLLM's own layers, segment by segment.

A token that leaves gets its exit head's state; the layers above run for it only until its K and V
are stored (`kv_cache_strategy="propagate"`). Tokens that stay go on without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update

from tide.errors import UnsupportedModelError
from tide.stats import LayerCounts
from tide.vllm.gates import Gates
from tide.vllm.metadata import Rows, can_subset, with_requests, with_slots
from tide.vllm.metrics import Metrics
from tide.vllm.settings import Settings
from tide.watch import Watch

logger = init_logger(__name__)


class _Stored(Exception):  # noqa: N818 - it is no error
    """K and V are stored; the rest of the layer is not wanted."""


class DepthForward:
    """Runs a vLLM decoder with exits.

    Args:
        model: one of vLLM's causal language models, weights loaded.
        vllm_config: vLLM's.
        settings: ours.

    Attributes:
        counts: what each layer ran, and for how many tokens.
        exits: tokens that left after each layer.
    """

    def __init__(self, model: Any, vllm_config: Any, settings: Settings) -> None:
        self.settings, self.decoder = settings, model.model
        self.layers = list(self.decoder.layers)
        self.counts = LayerCounts.zeros(len(self.layers))
        self.exits: dict[int, int] = {}
        self.watch: Watch | None = None
        self.off = False
        self._draw = random.Random(0)
        self._attention = [layer.self_attn.attn for layer in self.layers]
        self._by_name = {attn.layer_name: attn for attn in self._attention}
        for layer, attn in zip(self.layers, self._attention, strict=True):
            if attn.attn_backend.forward_includes_kv_cache_update:
                raise UnsupportedModelError(
                    f"The attention backend {attn.attn_backend.get_name()} stores K and V inside "
                    "attention, so that a token cannot store them without attending. Choose "
                    "another with --attention-backend."
                )
            self._patch(layer.self_attn)
        self._filling, self._given = False, None
        self._logits: Callable[[Tensor], Tensor] = model.compute_logits
        self.gates = Gates(model, self._attention, vllm_config, settings)
        if settings.risk is not None and not settings.uncertified:
            self.watch = Watch(settings.risk, settings.delta)
        self.metrics = Metrics(self)

    # ---- the pass

    @torch.no_grad()
    def __call__(self, ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """The normed last states of all tokens, `[tokens, hidden]`."""
        hidden = embeds if embeds is not None else self.decoder.embed_input_ids(ids)
        context = get_forward_context()
        rows = self.gates.rows(context) if self.gates.checkpoints else None
        decoding = [] if rows is None else rows.single()
        if rows is not None and not self.off:
            self.gates.remember(rows, ids)
        if rows is None or not decoding or self.off:
            part = _Part(_numbers(hidden, len(hidden)), positions, hidden, context)
            self._run(0, len(self.layers), part)
            self.metrics.after_pass(len(decoding))
            return self._normed(part)
        out = torch.zeros_like(hidden)
        count = int(rows.starts[-1])  # what is beyond is padding
        part = _Part(_numbers(hidden, count), positions[:count], hidden[:count], context)
        if self.settings.attention == "all" or not can_subset(context, self._attention[0]):
            part.frozen, part.everywhere = torch.zeros_like(part.hidden), part.positions
        self._descend(rows, decoding, part, out)
        self.metrics.after_pass(len(decoding))
        return out

    def _descend(self, rows: Rows, asked: list[int], part: _Part, out: Tensor) -> None:
        """Run segment by segment, with fewer and fewer tokens; write their normed last states.

        Args:
            asked: requests that decode, so that they may leave.
            part: all tokens.
            out: where to write, `[tokens, hidden]`.
        """
        token_of, low = rows.starts[:-1].long(), 0
        # Requests that go to full depth to be checked -> the state their exit head would read.
        audits: dict[int, Tensor | None] = dict.fromkeys(
            r for r in asked if self._draw.random() < self.settings.audit_rate
        )
        for number, checkpoint in enumerate(self.gates.checkpoints):
            if not asked:
                break
            self._run(low, checkpoint.layer + 1, part)
            low = checkpoint.layer + 1
            places = torch.searchsorted(part.tokens, token_of[asked])
            states = part.states(places)
            leaves = self.gates.decide(number, states, asked, rows)
            if not leaves:
                continue
            read = self.decoder.norm(checkpoint.head.lift(states[leaves]))
            checked = [k for k, leave in enumerate(leaves) if asked[leave] in audits]
            for k in checked:  # it stays, and full depth will tell; its first exit counts
                if audits[asked[leaves[k]]] is None:
                    audits[asked[leaves[k]]] = read[k]
            kept = [k for k in range(len(leaves)) if k not in checked]
            leaves = [leaves[k] for k in kept]
            if not leaves:
                continue
            out[token_of[[asked[k] for k in leaves]]] = read[kept]
            self.exits[checkpoint.layer] = self.exits.get(checkpoint.layer, 0) + len(leaves)
            part = self._leave(low, part, places[leaves], states[leaves], rows)
            if not len(part.tokens):
                break
            asked = [r for k, r in enumerate(asked) if k not in leaves]
        if len(part.tokens):
            self._run(low, len(self.layers), part)
            out[part.tokens] = self._normed(part)
        if audits:
            self._judge(audits, out[token_of])

    def _run(self, low: int, high: int, part: _Part) -> None:
        """Run layers `[low, high)` for some tokens."""
        with override_forward_context(part.context):
            for n in range(low, high):
                layer = self.layers[n]
                if part.some_left:
                    # Attention for all, since its metadata cannot be cut; the rest for who stays.
                    assert part.frozen is not None
                    part.frozen[part.tokens] = part.states()
                    attended = layer.self_attn(
                        positions=part.everywhere, hidden_states=layer.input_layernorm(part.frozen)
                    )
                    self._given = attended[part.tokens]
                    self.counts.fills[n] += len(part.frozen) - len(part.tokens)
                part.hidden, part.residual = layer(part.positions, part.hidden, part.residual)
                self.counts.calls[n] += 1
                self.counts.tokens[n] += len(part.tokens)

    def _leave(self, low: int, part: _Part, places: Tensor, states: Tensor, rows: Rows) -> _Part:
        """Let tokens go that have passed layers `[0, low)`; returns those that stay."""
        stays = torch.ones_like(part.tokens, dtype=torch.bool)
        stays[places] = False
        rest = part.keep(stays)
        if part.frozen is None:
            self._fill(low, part.positions[places], states, part.tokens[places])
            if len(rest.tokens):
                requests = torch.bucketize(rest.tokens, rows.starts[1:].long(), right=True).unique()
                rest.context = with_requests(requests, rest.tokens, self._by_name)
        else:
            part.frozen[part.tokens[places]] = states
            rest.some_left = True
            if not len(rest.tokens):
                everyone = _numbers(part.frozen, len(part.frozen))
                self._fill(low, part.everywhere, part.frozen, everyone)
        return rest

    def _fill(self, low: int, positions: Any, states: Tensor, tokens: Tensor) -> None:
        """Store K and V of tokens in the layers from `low` on, and run nothing else of them."""
        self._filling = True
        with override_forward_context(with_slots(tokens)):
            for n in range(low, len(self.layers)):
                layer = self.layers[n]
                try:
                    layer.self_attn(
                        positions=positions, hidden_states=layer.input_layernorm(states)
                    )
                except _Stored:
                    self.counts.fills[n] += len(tokens)
        self._filling = False

    def _patch(self, attention: Any) -> None:
        """Let a layer's attention stop once K and V are stored, or hand out what was computed."""
        whole, attn = attention.forward, attention.attn
        attend = attn.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if self._given is not None:
                given, self._given = self._given, None
                return given
            return whole(*args, **kwargs)

        def store(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self._filling:
                return attend(query, key, value, *args, **kwargs)
            key = key.view(-1, attn.num_kv_heads, attn.head_size)
            value = value.view(-1, attn.num_kv_heads, attn.head_size_v)
            unified_kv_cache_update(key, value, attn.layer_name)
            raise _Stored

        attention.forward, attn.forward = forward, store

    def _normed(self, part: _Part) -> Tensor:
        return self.decoder.norm(part.hidden, part.residual)[0]

    # ---- the audit

    def _judge(self, audits: Mapping[int, Tensor | None], last: Tensor) -> None:
        """What full depth says of tokens that would have left; `last` by request."""
        for request, read in audits.items():
            differs, verdict = 0.0, "stayed"
            if read is not None:
                both = self._logits(torch.stack([read, last[request]])).argmax(-1)
                differs = float(both[0] != both[1])
                verdict = "differs" if differs else "same"
            self.metrics.audit(verdict)
            if self.watch is not None and not self.watch.fired and self.watch.add(differs):
                self.off = self.settings.on_drift == "full_depth"
                logger.warning(
                    "TIDE: early tokens differ from full depth in %.2f%% of %d tokens checked; "
                    "%.2f%% were promised. %s Certify on prompts like these with `tide certify`.",
                    100 * (self.watch.estimate or 0.0), self.watch.sequences,
                    100 * self.watch.risk,
                    "Exits are off until a restart." if self.off else "Exits stay on.",
                )  # fmt: skip
                self.metrics.drift()


def _numbers(like: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=like.device)


@dataclass
class _Part:
    """Tokens that run together.

    Attributes:
        tokens: their places in the pass, ascending, `[t]`.
        positions, hidden: theirs.
        context: vLLM's forward context for them.
        residual: what vLLM's layers carry beside the hidden state; their sum is the state.
        frozen: where attention runs for all: states in which tokens left, `[all, hidden]`.
        everywhere: then, the positions of all.
        some_left: then, whether any has.
    """

    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    context: Any
    residual: Tensor | None = None
    frozen: Tensor | None = None
    everywhere: Tensor | None = None
    some_left: bool = False

    def states(self, places: Tensor | slice = slice(None)) -> Tensor:
        """The states of some of them."""
        hidden = self.hidden[places]
        return hidden if self.residual is None else hidden + self.residual[places]

    def keep(self, which: Tensor) -> _Part:
        """Those where `which`, `[t]`, is true."""
        return replace(
            self,
            tokens=self.tokens[which],
            positions=self.positions[which],
            hidden=self.hidden[which],
            residual=None if self.residual is None else self.residual[which],
        )
