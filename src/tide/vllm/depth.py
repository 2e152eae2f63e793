"""The forward pass with exits: vLLM's own layers, segment by segment.

A token that exits gets the output of its exit head; the layers above run for it only until its KV
is stored (`kv_cache_strategy="propagate"`). The other tokens continue without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update

from tide.errors import UnsupportedModelError
from tide.risk import DriftMonitor
from tide.stats import LayerCounts
from tide.vllm.active import ActiveTokens
from tide.vllm.gates import Gates
from tide.vllm.metadata import Requests, can_subset, with_requests, with_slots
from tide.vllm.metrics import Metrics
from tide.vllm.settings import Settings

logger = init_logger(__name__)


class _Stored(Exception):  # noqa: N818 - not an error
    """The KV of the tokens is stored; the rest of the layer is skipped."""


class DepthForward:
    """Runs a vLLM decoder with exits.

    Args:
        model: one of vLLM's causal language models, weights loaded.
        vllm_config: vLLM's.
        settings: ours.

    Attributes:
        counts: calls and tokens of each layer.
        exits: tokens that exited after each layer.
        monitor: the drift monitor; None without a certificate.
        tripped: whether drift has turned exits off.
    """

    def __init__(self, model: Any, vllm_config: Any, settings: Settings) -> None:
        self.settings, self.decoder = settings, model.model
        self.layers = list(self.decoder.layers)
        self.counts = LayerCounts.zeros(len(self.layers))
        self.exits: dict[int, int] = {}
        self.monitor: DriftMonitor | None = None
        self.tripped = False
        self._draw = random.Random(0)
        self._attention = [layer.self_attn.attn for layer in self.layers]
        self._by_name = {attn.layer_name: attn for attn in self._attention}
        for layer, attn in zip(self.layers, self._attention, strict=True):
            if attn.attn_backend.forward_includes_kv_cache_update:
                raise UnsupportedModelError(
                    f"The attention backend {attn.attn_backend.get_name()} stores KV inside "
                    "attention, so a token cannot store its KV without attending. Choose another "
                    "with --attention-backend."
                )
            self._patch(layer.self_attn)
        self._filling = False
        self._attended: Tensor | None = None  # output that the next attention call returns
        self._logits: Callable[[Tensor], Tensor] = model.compute_logits
        self.gates = Gates(model, self._attention, vllm_config, settings)
        if settings.risk is not None and not settings.uncertified:
            self.monitor = DriftMonitor(settings.risk, settings.delta)
        self.metrics = Metrics(self.counts, self.exits)

    # ---- the pass

    @torch.no_grad()
    def __call__(self, ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """The normed last states of all tokens, `[tokens, hidden]`."""
        hidden = embeds if embeds is not None else self.decoder.embed_input_ids(ids)
        context = get_forward_context()
        requests = self.gates.requests(context) if self.gates.checkpoints else None
        decoding = [] if requests is None else requests.decoding()
        if requests is not None and not self.tripped:
            self.gates.remember(requests, ids)
        if requests is None or not decoding or self.tripped:
            active = ActiveTokens.all_of(hidden, positions, context)
            self._run(0, len(self.layers), active)
            self.metrics.after_pass(len(decoding))
            return self._normed(active)
        out = torch.zeros_like(hidden)
        count = int(requests.starts[-1])  # the rest is padding
        active = ActiveTokens.all_of(hidden[:count], positions[:count], context)
        if self.settings.attention == "all" or not can_subset(context, self._attention[0]):
            active.exit_states = torch.zeros_like(active.hidden)
            active.all_positions = active.positions
        self._run_segments(requests, decoding, active, out)
        self.metrics.after_pass(len(decoding))
        return out

    def _run_segments(
        self, requests: Requests, candidates: list[int], active: ActiveTokens, out: Tensor
    ) -> None:
        """Run segment by segment; after each, the tokens that exit drop out.

        Args:
            requests: of the pass.
            candidates: those that decode, and so may exit.
            active: all tokens.
            out: receives the normed last states, `[tokens, hidden]`.
        """
        token_of, low = requests.starts[:-1].long(), 0
        # Audited requests run at full depth -> the normed state that their exit head returned.
        audits: dict[int, Tensor | None] = dict.fromkeys(
            request for request in candidates if self._draw.random() < self.settings.audit_rate
        )
        for number, checkpoint in enumerate(self.gates.checkpoints):
            if not candidates:
                break
            self._run(low, checkpoint.layer + 1, active)
            low = checkpoint.layer + 1
            places = torch.searchsorted(active.tokens, token_of[candidates])
            states = active.states(places)
            passed = self.gates.decide(number, states, candidates, requests)
            if not passed:
                continue
            read = self.decoder.norm(checkpoint.head.transform(states[passed]))
            exits: list[int] = []  # of those that passed, the ones not audited
            for k, passing in enumerate(passed):
                request = candidates[passing]
                if request not in audits:
                    exits.append(k)
                elif audits[request] is None:  # the first exit is the one that counts
                    audits[request] = read[k]
            if not exits:
                continue
            exiting = [passed[k] for k in exits]
            out[token_of[[candidates[k] for k in exiting]]] = read[exits]
            self.exits[checkpoint.layer] = self.exits.get(checkpoint.layer, 0) + len(exits)
            active = self._exit(low, active, places[exiting], requests)
            if not len(active.tokens):
                break
            candidates = [r for k, r in enumerate(candidates) if k not in exiting]
        if len(active.tokens):
            self._run(low, len(self.layers), active)
            out[active.tokens] = self._normed(active)
        if audits:
            self._audit(audits, out[token_of])

    def _run(self, low: int, high: int, active: ActiveTokens) -> None:
        """Run layers `[low, high)` for the active tokens."""
        with override_forward_context(active.context):
            for n in range(low, high):
                layer = self.layers[n]
                if active.some_exited:
                    # Attention runs for all tokens, since its metadata cannot be cut; the rest of
                    # the layer runs for the active ones.
                    assert active.exit_states is not None
                    active.exit_states[active.tokens] = active.states()
                    attended = layer.self_attn(
                        positions=active.all_positions,
                        hidden_states=layer.input_layernorm(active.exit_states),
                    )
                    self._attended = attended[active.tokens]
                    self.counts.fills[n] += len(active.exit_states) - len(active.tokens)
                active.hidden, active.residual = layer(
                    active.positions, active.hidden, active.residual
                )
                self.counts.calls[n] += 1
                self.counts.tokens[n] += len(active.tokens)

    def _exit(
        self, low: int, active: ActiveTokens, places: Tensor, requests: Requests
    ) -> ActiveTokens:
        """Let tokens exit that have passed layers `[0, low)`.

        Args:
            low: the first layer that they skip.
            active: the tokens that ran so far.
            places: those that exit, as indices into `active`.
            requests: of the pass.

        Returns:
            The tokens that continue.
        """
        continues = torch.ones_like(active.tokens, dtype=torch.bool)
        continues[places] = False
        rest, states = active.keep(continues), active.states(places)
        if active.exit_states is None:
            self._fill(low, active.positions[places], states, active.tokens[places])
            if len(rest.tokens):
                ends = requests.starts[1:].long()
                running = torch.bucketize(rest.tokens, ends, right=True).unique()
                rest.context = with_requests(running, rest.tokens, self._by_name)
        else:
            active.exit_states[active.tokens[places]] = states
            rest.some_exited = True
            if not len(rest.tokens):
                everything = torch.arange(len(active.exit_states), device=states.device)
                self._fill(low, active.all_positions, active.exit_states, everything)
        return rest

    def _fill(self, low: int, positions: Any, states: Tensor, tokens: Tensor) -> None:
        """Store the KV of tokens in the layers from `low` on, and run nothing else for them."""
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
        """Let a layer's attention stop once KV is stored, or return what was already computed."""
        whole, attn = attention.forward, attention.attn
        attend = attn.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if self._attended is not None:
                attended, self._attended = self._attended, None
                return attended
            return whole(*args, **kwargs)

        def store(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self._filling:
                return attend(query, key, value, *args, **kwargs)
            key = key.view(-1, attn.num_kv_heads, attn.head_size)
            value = value.view(-1, attn.num_kv_heads, attn.head_size_v)
            unified_kv_cache_update(key, value, attn.layer_name)
            raise _Stored

        attention.forward, attn.forward = forward, store

    def _normed(self, active: ActiveTokens) -> Tensor:
        return self.decoder.norm(active.hidden, active.residual)[0]

    # ---- the audit

    def _audit(self, audits: Mapping[int, Tensor | None], last: Tensor) -> None:
        """Compare the predicted tokens of audited requests with the target tokens.

        Args:
            audits: by request, the normed state of its exit; None if it passed no gate.
            last: the normed state at full depth of every request, `[n, hidden]`.
        """
        for request, read in audits.items():
            differs, verdict = 0.0, "continued"
            if read is not None:
                predicted, target = self._logits(torch.stack([read, last[request]])).argmax(-1)
                differs = float(predicted != target)
                verdict = "differs" if differs else "same"
            self.metrics.audit(verdict)
            if self.monitor is not None and not self.monitor.fired and self.monitor.add(differs):
                self.tripped = self.settings.on_drift == "full_depth"
                logger.warning(
                    "TIDE: %.2f%% of %d audited tokens differ from full depth; the certified bound "
                    "is %.2f%%. %s Certify on prompts like these with `tide certify`.",
                    100 * (self.monitor.estimate or 0.0), self.monitor.sequences,
                    100 * self.monitor.risk,
                    "Exits are off until a restart." if self.tripped else "Exits stay on.",
                )  # fmt: skip
                self.metrics.drift()
