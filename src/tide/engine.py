"""The engine: a model, an artifact, and `generate` with per-token depth."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from tide.config import TIDEConfig
from tide.decode.drafter import Drafter
from tide.decode.exits import load_artifact, make_exits, require_effect
from tide.decode.machinery import Machinery
from tide.decode.plan import make_plan
from tide.decode.score import score_tokens
from tide.decode.sequence import SequenceState
from tide.decode.session import DecodeSession, GenerateCall, in_order
from tide.drift import CircuitBreaker, DriftMonitor, InOrder, require_audits
from tide.exits.artifact import Artifact
from tide.exits.certificate import Certificate
from tide.exits.policy import ScriptedPolicy
from tide.generation import bind_stop_strings, refuse_length, refuse_modes, refuse_options
from tide.models.attach import attach
from tide.models.fingerprint import dtype_name, fingerprint
from tide.models.tokens import TokenBatch
from tide.risk import CertificateQuery, Coverage, certified_config
from tide.stats import ExitStats


class TIDE:
    """A frozen causal language model that spends less depth on easy tokens.

    ```python
    output = TIDE(model, "router", risk=0.02).generate(input_ids)  # without a risk: lossless
    ```

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode; never changed.
        router_path: the artifact, or its folder or file; None: lossless, which needs none.
        config: settings; without it, mode is "lossless", or "auto" if a risk is given.
        risk: the share of tokens that may differ from full depth; `tide certify` must cover it.
        delta: the chance that the certificate may be wrong, and of a false alarm while serving.
        on_drift: with a risk, what to do if exited tokens differ more often than certified: "warn",
            "full_depth" (exits off until `circuit_breaker.reset()`) or a function of the monitor.
        audit_rate: for KV that is not exact ("propagate", "zero_pad"), the share of sequences that
            are audited by a pass at full depth; "deferred" audits in the passes that it runs.
        threshold_scale: moves the calibrated thresholds (see `Thresholds.scaled`); not with a risk.
        policy: which tokens exit where, in place of the artifact's gates; not with a risk.
        allow_mismatch: use an artifact that was made for another model.
        check: prove on attach that range-running equals the model; see `tide.attach`.
        compile: compile the segments at the first batch, which takes a minute or more.
        batch: sequences of a usual call, for which mode "auto" decides.

    Attributes:
        runner: how layers are run; see `runner.name`.
        costs: by sequences and new tokens of each, seconds that each segment takes here.
        last_stats: what the last call did, or the running one has done so far.
        circuit_breaker: monitors the risk; None if none was given.
        certificate: what the risk rests on; None if none was given.
        drafter: what is known of drafts; remembers between calls.
        plan: what it does and why; `str(engine.plan)` is one line.
    """

    def __init__(
        self,
        model: Any,
        router_path: str | Path | Artifact | None = None,
        config: TIDEConfig | None = None,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        on_drift: str | Callable[[DriftMonitor], Any] = "warn",
        audit_rate: float = 0.05,
        threshold_scale: float | None = None,
        policy: ScriptedPolicy | None = None,
        allow_mismatch: bool = False,
        check: bool = True,
        compile: bool = False,
        batch: int = 1,
    ) -> None:
        self.model, self.audit_rate, self._audits = model, audit_rate, random.Random(0)
        self.config = config or TIDEConfig(mode="lossless")
        self.runner = attach(model, check=check, compile=compile)
        made = load_artifact(router_path, self.runner, allow_mismatch=allow_mismatch)
        self.artifact = made
        self.certificate: Certificate | None = None
        self.circuit_breaker: CircuitBreaker | None = None
        if risk is not None:
            query = CertificateQuery(
                risk, delta, dtype_name(model), self.config.kv_cache_strategy,
                None if config is None else config.min_layers,
                fingerprint(model, self.runner.parts),
            )  # fmt: skip
            found, self.config = certified_config(made, query, config, threshold_scale, policy)
            self.certificate, threshold_scale = found, found.threshold_scale
            self.circuit_breaker = CircuitBreaker(DriftMonitor(found.risk, delta), on_drift)
            self._coverage = Coverage(found, model, self.runner.parts)
            require_audits(audit_rate, self.config.kv_cache_strategy)
        require_effect(self.config, threshold_scale)
        self.threshold_scale = 1.0 if threshold_scale is None else threshold_scale
        self.drafter = Drafter(self.config.max_draft, self.config.max_tree)
        exits = partial(make_exits, self.runner, made, self.threshold_scale, policy)
        self._machinery = Machinery(self.runner, exits(self.config), self.config, self.drafter)
        self.plan = make_plan(self._machinery, made.recording, batch)
        if self.config.mode == "auto" and self.plan.config.mode == "lossless":
            self._machinery.exits = exits(self.plan.config)  # without exits that would only draft
        self.config = self._machinery.config = self.plan.config
        self.costs, self.last_stats = self._machinery.costs, ExitStats(self.runner.n_layers)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as `model.generate` does, and with all that it takes.

        Greedy and sampling, logits processors, stopping criteria and strings, streamers,
        left-padded batches and `return_dict_in_generate` work as they do there. Beam search,
        assisted generation, a cache of your own and inputs beside token ids are refused.

        Raises:
            UnsupportedGenerationError: naming the option and what to do instead.
        """
        refuse_options(kwargs)
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        # A loop is handed neither the streamer nor the tokenizer.
        loop = partial(self.decode, streamer=kwargs.get("streamer"))
        kwargs = bind_stop_strings(kwargs, self.model.generation_config)
        return self.model.generate(inputs, custom_generate=loop, **kwargs)

    def decode(self, model: Any, input_ids: Tensor, streamer: Any = None, **prepared: Any) -> Any:
        """The loop that `model.generate(custom_generate=...)` calls."""
        options: GenerationConfig = prepared["generation_config"]
        refuse_modes(model, options, prepared)
        call = GenerateCall(
            input_ids, prepared.get("attention_mask"), prepared["logits_processor"],
            prepared["stopping_criteria"], options, streamer,
        )  # fmt: skip
        refuse_length(call.max_length, self.runner.position_limit)
        with self.runner.lock, torch.inference_mode(False), torch.no_grad():
            sequences = self._decode(call)
        if options.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of every token, `[sequences, tokens, vocabulary]`, with per-token exit.

        In mode "exit", every token may exit, the last too. One that exits is read there over the
        whole vocabulary, and the layers above only get its KV, made from the state in which it
        exited, whatever `kv_cache_strategy` is; no certificate covers that. In other modes, and
        once the circuit breaker has tripped, the logits are the model's own.
        """
        stats = ExitStats(self.runner.n_layers)
        with self.runner.lock:
            self.last_stats = stats
            tripped = self.circuit_breaker is not None and self.circuit_breaker.tripped
            if self.config.mode != "exit" or tripped:
                with torch.no_grad():
                    return self.model(input_ids, attention_mask=attention_mask).logits
            return score_tokens(self._machinery, TokenBatch(input_ids, attention_mask), stats)

    def _decode(self, call: GenerateCall) -> Tensor:
        machinery, circuit_breaker, n = self._machinery, self.circuit_breaker, self.runner.n_layers
        if circuit_breaker is not None and circuit_breaker.tripped:
            machinery = machinery.at_full_depth()
        machinery = in_order(machinery, call)
        if self.certificate is not None and machinery.config.mode == "exit":
            self._coverage.check(call)
        self._machinery.prepare(len(call.input_ids))
        stats = self.last_stats = ExitStats.of_batch(n, len(call.input_ids))
        self.runner.counts.reset()
        exact = machinery.config.kv_cache_strategy == "deferred"
        monitored = circuit_breaker if machinery.config.mode == "exit" else None
        losses = InOrder()

        def on_finished(some: Sequence[SequenceState]) -> bool:
            """Feed the monitor as sequences end, in order; returns whether exits may go on."""
            if monitored is None or not exact:
                return True
            for sequence in some:
                monitored.add(losses.end(sequence.index, sequence.loss))
            return not monitored.tripped

        session = DecodeSession(machinery, call, stats, on_finished)
        output = session.run()
        stats.losses = session.losses(self._audits, self.audit_rate, stats)
        if monitored is not None and not exact:
            monitored.add(loss for loss in stats.losses if loss is not None)
        stats.count_layers(self.runner.counts, n * max(map(len, stats.depths)))
        return output
