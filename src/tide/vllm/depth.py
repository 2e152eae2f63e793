"""The forward pass with exits: vLLM's own layers, segment by segment, compiled as vLLM compiles.

A token that exits gets the output of its exit head; the layers above only store its KV
(`kv_cache_strategy="propagate"`). The other tokens continue without it. Where no token may exit,
the pass is vLLM's own.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    override_forward_context,
)

from tide.errors import ConfigError
from tide.stats import LayerCounts
from tide.vllm.active import ActiveTokens
from tide.vllm.audit import Audit
from tide.vllm.gates import Gates
from tide.vllm.metadata import (
    Requests,
    can_subset,
    require_backends,
    with_requests,
    with_slots,
)
from tide.vllm.metrics import Metrics
from tide.vllm.payoff import ExitCosts, Payoff
from tide.vllm.settings import Settings
from tide.vllm.units import Attended, Units, without_attention

logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown

_SEVERAL = 8  # tokens with which graphs are compiled; any other number will do


class DepthForward:
    """Runs a vLLM decoder with exits.

    Args:
        model: one of vLLM's causal language models, weights loaded.
        vllm_config: vLLM's.
        settings: ours.

    Attributes:
        counts: tokens of each layer.
        exits: tokens that exited after each layer.
        units: the segments between checkpoints.
        payoff: whether the gates are worth evaluating; None until costs are measured.
        audit: compares exits with full depth, and may turn them off.
    """

    def __init__(self, model: Any, vllm_config: Any, settings: Settings) -> None:
        self.settings, self.decoder = settings, model.model
        self.layers = list(self.decoder.layers)
        self.counts = LayerCounts.zeros(len(self.layers))
        self.exits: dict[int, int] = {}
        self.payoff: Payoff | None = None
        self._ready = False
        self._attention = [layer.self_attn.attn for layer in self.layers]
        self._attended = Attended()
        self._without_attention = [without_attention(x, self._attended) for x in self.layers]
        self._by_name = {attn.layer_name: attn for attn in self._attention}
        require_backends(self._attention)
        self.gates = Gates(model, self._attention, vllm_config, settings)
        self._always = settings.gates == "always" or settings.script is not None
        if self.gates.checkpoints and not self._always and not self._cuts():
            raise ConfigError(
                "What passes cost after an exit is not measured with this attention backend, so "
                "gates cannot be evaluated by cost. Set gates to 'always'."
            )
        begins = [0, *(checkpoint.layer + 1 for checkpoint in self.gates.checkpoints)]
        self.units = Units(self.decoder, vllm_config, [*begins, len(self.layers)])
        self._most = int(vllm_config.scheduler_config.max_num_seqs)
        self.metrics = Metrics(self.counts, self.exits)
        ahead = bool(vllm_config.scheduler_config.async_scheduling)
        self.audit = Audit(
            settings, self.metrics, model.compute_logits, ahead=ahead, longest=self.gates.longest
        )
        if settings.risk is not None and vllm_config.cache_config.enable_prefix_caching:
            logger.warning(
                "TIDE: with prefix caching a later prompt may reuse the KV of exited tokens, for "
                "which no certificate is. To avoid it, add --no-enable-prefix-caching."
            )

    # ---- the pass

    @torch.no_grad()
    def __call__(self, ids: Tensor | None, positions: Tensor, embeds: Tensor | None) -> Tensor:
        """The normed last states of all tokens, `[tokens, hidden]`."""
        context = get_forward_context()
        requests = self.gates.requests(context)
        self._get_ready(ids, positions, embeds, context)
        if requests is None:  # vLLM warms up
            if self.gates.checkpoints:
                self.units.warm_up(positions, self._embedded(ids, embeds))
            return self.decoder(ids, positions, None, embeds)
        tokens = requests.tokens
        decoding = requests.decoding() if self.gates.checkpoints else []
        audits: dict[int, Tensor | None] = {}
        if self.gates.checkpoints and not self.audit.tripped:
            self.gates.remember(requests, ids)
            audits = self.audit.follow(requests, decoding)
        if not decoding or self.audit.tripped or not self._pays(requests, len(decoding)):
            out = self.decoder(ids, positions, None, embeds)  # as vLLM runs it
            self.counts.tokens[:] = [n + tokens for n in self.counts.tokens]
        else:
            hidden = self._embedded(ids, embeds)
            out = torch.zeros_like(hidden)
            active = ActiveTokens.all_of(hidden[:tokens], positions[:tokens], context)
            if self.settings.attention == "all" or not can_subset(context, self._attention[0]):
                active.exit_states = torch.zeros_like(active.hidden)
                active.all_positions = active.positions
            self._run_segments(requests, decoding, audits, active, out)
        self.metrics.after_pass(len(decoding))
        return out

    def _run_segments(
        self, requests: Requests, candidates: list[int], audits: dict[int, Tensor | None],
        active: ActiveTokens, out: Tensor,
    ) -> None:  # fmt: skip
        """Run segment by segment; after each, the tokens that exit drop out.

        Args:
            requests: of the pass.
            candidates: those that decode, and so may exit.
            audits: of these, those that run at full depth; receives the normed state that the exit
                head returned for each.
            active: all tokens.
            out: receives the normed last states, `[tokens, hidden]`.
        """
        token_of = requests.starts[:-1].long()
        self._run(0, active)
        for number, checkpoint in enumerate(self.gates.checkpoints):
            places = torch.searchsorted(active.tokens, token_of[candidates])
            states = active.states(places)
            passed = self.gates.decide(number, states, candidates, requests) if candidates else []
            if self.payoff is not None:
                served = [request not in audits for request in candidates]
                self.payoff.add(number, sum(served[k] for k in passed), sum(served))
            exits: list[int] = []  # of those that passed, the ones not audited
            if passed:
                read = self.decoder.norm(checkpoint.head.transform(states[passed]))
                for k, passing in enumerate(passed):
                    request = candidates[passing]
                    if request not in audits:
                        exits.append(k)
                    elif audits[request] is None:  # the first exit is the one that counts
                        audits[request] = read[k]
            if exits:
                exiting = [passed[k] for k in exits]
                out[token_of[[candidates[k] for k in exiting]]] = read[exits]
                self.exits[checkpoint.layer] = self.exits.get(checkpoint.layer, 0) + len(exits)
                active = self._exit(number + 1, active, places[exiting], requests)
                if not len(active.tokens):
                    break
                candidates = [r for k, r in enumerate(candidates) if k not in exiting]
            self._run(number + 1, active)
        if len(active.tokens):
            out[active.tokens] = active.hidden
        if audits:
            self.audit.compare(audits, out[token_of])

    def _run(self, number: int, active: ActiveTokens) -> None:
        """Run a segment for the active tokens."""
        states = (active.hidden,) if active.residual is None else (active.hidden, active.residual)
        layers = range(*self.units.layers[number])
        with override_forward_context(active.context):
            if active.some_exited:
                self._run_after_attention(layers, active)
            else:
                active.hidden, active.residual = self.units.run(number, active.positions, *states)
        for n in layers:
            self.counts.tokens[n] += len(active.tokens)

    def _run_after_attention(self, layers: range, active: ActiveTokens) -> None:
        """Run layers whose attention metadata cannot be cut, and so attends for all tokens."""
        assert active.exit_states is not None
        for n in layers:
            layer = self.layers[n]
            active.exit_states[active.tokens] = active.states()
            attended = layer.self_attn(
                positions=active.all_positions,
                hidden_states=layer.input_layernorm(active.exit_states),
            )
            self._attended.output = attended[active.tokens]
            rest = self._without_attention[n]
            active.hidden, active.residual = rest(active.positions, active.hidden, active.residual)
            self.counts.fills[n] += len(active.exit_states) - len(active.tokens)
        if layers.stop == len(self.layers):
            active.hidden, active.residual = self.decoder.norm(active.hidden, active.residual)

    def _exit(
        self, number: int, active: ActiveTokens, places: Tensor, requests: Requests
    ) -> ActiveTokens:
        """Let tokens exit.

        Args:
            number: of the first segment that they skip.
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
            self._store(number, active.positions[places], states, active.tokens[places])
            if len(rest.tokens):
                ends = requests.starts[1:].long()
                running = torch.bucketize(rest.tokens, ends, right=True).unique()
                rest.context = with_requests(running, rest.tokens, self._by_name)
        else:
            assert active.all_positions is not None
            active.exit_states[active.tokens[places]] = states
            rest.some_exited = True
            if not len(rest.tokens):
                everything = torch.arange(len(active.exit_states), device=states.device)
                self._store(number, active.all_positions, active.exit_states, everything)
        return rest

    def _store(self, number: int, positions: Tensor, states: Tensor, tokens: Tensor) -> None:
        """Store the KV of tokens in the segments from `number` on, and run nothing else of them."""
        with override_forward_context(with_slots(tokens)):
            for segment in range(number, len(self.units.layers)):
                self.units.store(segment, positions, states)
                for n in range(*self.units.layers[segment]):
                    self.counts.fills[n] += len(tokens)

    # ---- before the first pass

    def _get_ready(
        self, ids: Tensor | None, positions: Tensor, embeds: Tensor | None, context: ForwardContext
    ) -> None:
        """Compile all graphs, where vLLM compiles, and measure what they and the gates cost; once.

        All at once: a graph that the first pass with one token compiled would be for one token.
        """
        if self._ready:
            return
        self._ready = True
        if not self.gates.checkpoints:
            return
        hidden, given = self._embedded(ids, embeds), (ids, positions, None, embeds)
        # As in a warm-up of vLLM: nothing attends, and no KV is written.
        nothing: Any = {"attn_metadata": None, "slot_mapping": {}}
        idle = dataclasses.replace(context, **nothing)
        with override_forward_context(idle):
            # Places where rotation does something, and states that differ.
            where = torch.arange(1, 1 + _SEVERAL).to(positions)
            noise = torch.Generator().manual_seed(0)
            states = torch.randn(_SEVERAL, hidden.shape[-1], generator=noise).to(hidden)
            self.units.check(where, states)
            if self.units.compiles:
                self.units.warm_up(where, states)
                self.decoder(*map(_several, given))
            if self._always:
                return

            def whole(size: int) -> Any:
                return self.decoder(*(_several(one, size) for one in given))

            costs = ExitCosts.measure(
                self.units, whole, self.gates.gates, where, states, self._most
            )
        # The first rank's, so that all ranks choose alike.
        costs = get_tp_group().broadcast_object(costs, src=0)
        self.payoff = Payoff(costs, self.settings.audit_rate)
        logger.info("TIDE: %s", self.payoff.summary(self._most))

    def _cuts(self) -> bool:
        """Whether passes after an exit are those whose costs are measured."""
        names = {attn.attn_backend.get_name() for attn in self._attention}
        return self.settings.attention == "subset" and names == {"CPU_ATTN"}

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        return embeds if embeds is not None else self.decoder.embed_input_ids(ids)

    def _pays(self, requests: Requests, decoding: int) -> bool:
        """Whether the gates are worth evaluating where so many requests decode."""
        if self.payoff is None:
            return True
        # A prompt takes the pass through all layers.
        return decoding == len(requests.lengths) and self.payoff.pays(decoding)


def _several(tensor: Tensor | None, times: int = _SEVERAL) -> Tensor | None:
    """The first token of a pass, several times."""
    return None if tensor is None else tensor[:1].expand(times, *tensor.shape[1:]).contiguous()
