"""Gives the engine: a model, an artifact, and `generate` with per-token depth."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PrefixConstrainedLogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

from tide.config import TIDEConfig
from tide.decode.choose import Chooser
from tide.decode.drafts import DraftLength, DraftSource, Trial, draft_sources
from tide.decode.exits import Exits
from tide.decode.loop import DepthDecoder
from tide.decode.output import Output, rows_of
from tide.decode.prefill import prefill
from tide.decode.rows import Row
from tide.errors import (
    ArtifactError,
    ConfigError,
    UnsupportedGenerationError,
)
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.certificate import Certificate
from tide.exits.heads import Readout
from tide.exits.policy import Gate, GatePolicy, Policy
from tide.exits.table import ContinuationTable
from tide.generation import bind_stop_strings, refuse_modes, refuse_options
from tide.models.attach import attach
from tide.models.fingerprint import dtype_name, fingerprint
from tide.stats import ExitStats
from tide.watch import Guard, Watch


class TIDE:
    """A frozen causal language model that spends less depth on easy tokens.

    ```python
    engine = TIDE(model, "router")                                     # lossless
    engine = TIDE(model, "router", config=TIDEConfig(exit_threshold=0.85))   # early exit
    output = engine.generate(input_ids, max_new_tokens=128)
    print(engine.last_stats.summary())
    ```

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode; never changed, except inside a call.
        router_path: an artifact: a folder, a `.safetensors` or a `.pt` file, or an `Artifact`.
            None for lossless decoding with context drafts only, which needs no calibration.
        config: settings; without it, mode is "lossless", or "exit" if a risk is given.
        risk: the share of tokens that may differ from full depth; needs a certificate that covers
            it, which `tide certify` makes.
        delta: the chance that the certificate may be wrong, and of a false alarm while serving.
        on_drift: with a risk, what to do when early tokens differ more often than promised:
            "warn", "full_depth" (exits off until `guard.reset()`), or a function of the watch.
        audit_rate: for K and V that are not exact ("propagate", "zero_pad"), the share of sequences
            that are checked by a pass at full depth; with "deferred" all are, for free.
        boldness: moves the calibrated thresholds together; see `Gate.at`.
        policy: who leaves where; by default the routers and thresholds of the artifact.
        allow_mismatch: use an artifact that was made for another model.
        check: prove on attach that range-running equals the model; see `tide.attach`.

    Attributes:
        last_stats: what the last call did; what each token needed can be read while it runs.
        guard: watches the risk; None if none was given.
        certificate: what the risk rests on; None if none was given.
    """

    def __init__(
        self,
        model: Any,
        router_path: str | Path | Artifact | None = None,
        config: TIDEConfig | None = None,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        on_drift: str | Callable[[Watch], Any] = "warn",
        audit_rate: float = 0.05,
        boldness: float = 1.0,
        policy: Policy | None = None,
        allow_mismatch: bool = False,
        check: bool = True,
    ) -> None:
        self.model = model
        self.config = config or TIDEConfig(mode="lossless")
        self.boldness, self.audit_rate = boldness, audit_rate
        self.runner = attach(model, check=check)
        parts = self.runner.parts
        if router_path is None:
            self.artifact = Artifact(fingerprint(model, parts), self.runner.config.hidden_size)
        else:
            loaded = isinstance(router_path, Artifact)
            self.artifact = router_path if loaded else Artifact.from_pretrained(router_path)  # type: ignore
            self.artifact.require(fingerprint(model, parts), force=allow_mismatch)
            if self.artifact.hidden_size != self.runner.config.hidden_size:
                raise ArtifactError(
                    f"This artifact is for hidden size {self.artifact.hidden_size}; the model has "
                    f"{self.runner.config.hidden_size}. Calibrate this model with `tide calibrate`."
                )
        self.certificate: Certificate | None = None
        self.guard: Guard | None = None
        if risk is not None:
            self.config = config or TIDEConfig(exit_threshold=None)
            self.certificate = self._covering(
                risk, delta, None if config is None else config.min_layers
            )
            self.config = self.config.with_(
                min_layers=self.certificate.min_layers,
                audit_tail=True,  # or the watch would miss the last tokens of a row
            )
            self.boldness = self.certificate.boldness
            self.guard = Guard(Watch(self.certificate.risk, delta), on_drift)
        self._audits = random.Random(0)
        self._table = ContinuationTable(self.artifact.table) if self.artifact.table else None
        self._exits = self._make_exits(policy)
        self._lengths = DraftLength(self.config.max_draft, self.config.fixed_drafts)
        self._exit_trial = Trial()
        self.last_stats = ExitStats(self.runner.n_layers)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as `model.generate` does, and with all that it takes.

        Greedy and sampling, logits processors, stopping criteria and strings, streamers,
        left-padded batches and `return_dict_in_generate` work as they do there. Beam search,
        assisted generation and a cache of your own are refused.

        Raises:
            UnsupportedGenerationError: naming what was asked for and what to do instead.
        """
        refuse_options(kwargs)
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        # A loop is handed neither the streamer nor the tokenizer.
        loop = partial(self.decode, streamer=kwargs.get("streamer"))
        kwargs = bind_stop_strings(kwargs, self.model.generation_config)
        return self.model.generate(inputs, custom_generate=loop, **kwargs)

    def decode(self, model: Any, input_ids: Tensor, streamer: Any = None, **prepared: Any) -> Any:
        """The loop that `model.generate(custom_generate=...)` calls with everything prepared."""
        with self.runner.lock:
            return self._decode(input_ids, streamer, **prepared)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits of every token, `[rows, tokens, vocabulary]`, with per-token exit.

        In mode "exit", every token may leave, the last too. One that leaves is read there over the
        whole vocabulary, and the layers above only get its K and V, made from the state in which it
        left, whatever `kv_cache_strategy` says; no certificate covers that. In other modes the
        logits are the model's own.
        """
        valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        stats = ExitStats(self.runner.n_layers)
        with self.runner.lock, self.runner:
            if self.config.mode != "exit":
                self.last_stats = stats
                with torch.no_grad():
                    return self.model(input_ids, attention_mask=attention_mask).logits
            if any(checkpoint.head.tail_layers for checkpoint in self._exits.checkpoints):
                raise UnsupportedGenerationError(
                    "engine(input_ids) cannot read tail heads, which finish tokens one by one. "
                    "Use engine.generate, or heads of another exit_strategy."
                )
            self.runner.counts.reset()
            done = prefill(
                self.runner,
                self._exits,
                self.config,
                self.runner.new_cache(len(input_ids)),
                input_ids,
                valid.bool(),
                range(len(input_ids)),
                with_logits=True,
            )
            assert done.logits is not None
            for depth in done.depths[valid.bool()].tolist():
                if depth < self.runner.n_layers:
                    stats.exit_at(depth - 1)
                else:
                    stats.full_depth()
            stats.depths = done.depths.tolist()
            self._count(stats, self.runner.n_layers)
        return done.logits

    def _count(self, stats: ExitStats, layers_full: int) -> None:
        counts = self.runner.counts
        stats.layers_run, stats.tokens_run = sum(counts.calls), sum(counts.tokens)
        stats.layers_full = layers_full
        self.last_stats = stats

    def _decode(
        self,
        input_ids: Tensor,
        streamer: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        refuse_modes(generation_config, model_kwargs)
        limit = self.runner.position_limit
        if limit is not None and generation_config.max_length > limit:
            raise UnsupportedGenerationError(
                f"max_length is {generation_config.max_length}, but this model's rotary positions "
                f"change meaning beyond {limit} tokens (rope type longrope or dynamic), which K "
                "and V computed before do not follow. Generate fewer tokens, or use model.generate."
            )
        mask = model_kwargs.get("attention_mask")
        contexts = torch.zeros(len(input_ids), generation_config.max_length, dtype=torch.long)
        rows = rows_of(input_ids, mask, contexts)
        chooser = Chooser(
            contexts,
            input_ids.device,
            logits_processor,
            stopping_criteria,
            sample=bool(generation_config.do_sample),
        )
        config = self.config
        if self.guard is not None and self.guard.tripped:
            config = config.with_(mode="lossless", kv_cache_strategy="deferred", prefill_exit=False)
        # A prefix function knows only what may be said, not what was guessed.
        may_guess = not any(
            isinstance(p, PrefixConstrainedLogitsProcessor) for p in logits_processor
        )
        stats = self.last_stats = ExitStats(self.runner.n_layers)
        stats.depths, stats.scores = [row.depths for row in rows], [row.scores for row in rows]
        stats.sources, stats.full = [row.sources for row in rows], [row.full for row in rows]
        self.runner.counts.reset()
        pad = getattr(generation_config, "_pad_token_tensor", None)
        output = Output(rows, 0 if pad is None else int(pad), streamer)
        deferred = config.kv_cache_strategy == "deferred"

        def ended(some: Sequence[Row]) -> bool:
            """Feed the guard as soon as a row ends; its mates go on at full depth if it trips."""
            if self.guard is None or config.mode != "exit" or not deferred:
                return True
            self.guard.add(row.loss for row in some)
            return not self.guard.tripped

        with self.runner:
            decoder = DepthDecoder(
                self.runner,
                self._exits,
                config if may_guess else config.with_(drafts=()),
                rows,
                chooser,
                [self._sources() if may_guess else [] for _ in rows],
                self._lengths,
                self._exit_trial,
                stats,
                output.stream,
                ended,
            )
            decoder.decode()
        stats.losses = self._losses(config, rows, chooser.plain)
        if self.guard is not None and config.mode == "exit" and not deferred:
            self.guard.add(loss for loss in stats.losses if loss is not None)
        self._count(stats, self.runner.n_layers * max(len(row.new_tokens) for row in rows))
        sequences = output.finish(input_ids)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _sources(self) -> list[DraftSource]:
        """Draft sources of one row.

        None where tokens stop for good: a token on top of a guess could not, before it is known
        whether the guess is right. None where tokens that leave finish through a tail.
        """
        deferred = self.config.kv_cache_strategy == "deferred"
        # A tail reads the K and V that the tails of the tokens before it have written.
        tails = any(checkpoint.head.tail_layers for checkpoint in self._exits.checkpoints)
        exit_mode = self.config.mode == "exit"
        if self.config.mode == "off" or not self.config.max_draft or not deferred:
            return []
        if exit_mode and tails:
            return []
        table = self._table if "table" in self.config.drafts else None
        return draft_sources(table, context="context" in self.config.drafts)

    def _covering(self, risk: float, delta: float, min_layers: int | None) -> Certificate:
        """The boldest certificate that covers a risk here."""
        kv, dtype = self.config.kv_cache_strategy, dtype_name(self.model)
        if self.config.prefill_exit:
            raise ConfigError("No certificate covers prefill_exit: prompts must go to full depth.")
        if self.config.mode != "exit" or self.config.exit_threshold is not None:
            raise ConfigError(
                f"risk={risk} chooses the thresholds: it needs mode='exit' and "
                f"exit_threshold=None, not mode={self.config.mode!r} and "
                f"exit_threshold={self.config.exit_threshold!r}."
            )
        return self.artifact.covering(risk, delta, dtype, kv, min_layers)

    def _losses(self, config: TIDEConfig, rows: Sequence[Row], plain: bool) -> list[float | None]:
        """For each row, the share of its new tokens that full depth would have said otherwise.

        Args:
            plain: whether the likeliest token is what is said. Where it is not, only "deferred" can
                tell: it checks with the same processors and the same draw.
        """
        if config.mode != "exit":
            return [0.0] * len(rows)
        if config.kv_cache_strategy == "deferred":
            return [row.loss for row in rows]
        losses: list[float | None] = []
        for row in rows:
            if self._audits.random() >= self.audit_rate or not plain:
                losses.append(None)
                continue
            text = torch.tensor([row.tokens], device=self.runner.input_device)
            with torch.no_grad():
                said = self.model(text).logits[0, row.prompt - 1 : -1].argmax(-1).cpu()
            row.full[:] = said.tolist()
            losses.append(float((said != torch.tensor(row.new_tokens)).float().mean()))
        return losses

    def _make_exits(self, policy: Policy | None) -> Exits:
        parts, depth = self.runner.parts, self.runner.n_layers
        checkpoints: list[Checkpoint] = []
        if self.config.mode != "off":
            # Copies: the caller's artifact may serve another engine, on another device.
            checkpoints = [
                copy.deepcopy(checkpoint)
                for checkpoint in self.artifact.above(self.config.min_layers)
            ]
        _check_checkpoints(checkpoints, depth, self.config)
        device = self.runner.input_device
        for checkpoint in checkpoints:
            checkpoint.to(device, self.model.dtype)
        readout = Readout(parts.norm, parts.head, self.runner.config, self.artifact.vocabulary)
        if policy is None:
            gates = [self._gate(checkpoint) for checkpoint in checkpoints]
            routers, blends = [c.router for c in checkpoints], [c.blend for c in checkpoints]
            policy = GatePolicy(routers, gates, blends, readout.tokens)
        return Exits(checkpoints, readout, policy, self._table)

    def _gate(self, checkpoint: Checkpoint) -> Gate:
        """The calibrated thresholds; in mode "exit", `exit_threshold` for the stage that decides.

        The stage that decides is the blend where there is one; else the exit head's top probability
        where it is asked or there is no router; else the router.
        """
        gate, threshold = checkpoint.gate, self.config.exit_threshold
        if gate != Gate() and (self.config.mode != "exit" or threshold is None):
            return gate.at(self.boldness)
        threshold = 0.85 if threshold is None else threshold
        if gate.router is not None and gate.router > 1:  # calibration found that no exit pays
            gate = Gate()
        if checkpoint.blend is not None:
            return replace(gate, blend=threshold)
        if checkpoint.router is None or gate.top_probability is not None:
            return replace(gate, top_probability=threshold)
        return Gate(router=threshold)


def _check_checkpoints(checkpoints: list[Checkpoint], depth: int, config: TIDEConfig) -> None:
    if config.mode == "exit" and not checkpoints:
        raise ConfigError(
            f"mode='exit' needs an exit, and the artifact has none from layer {config.min_layers} "
            "on. Calibrate the model, lower min_layers, or use mode='lossless'."
        )
    layers = [c.layer for c in checkpoints]
    if layers != sorted(set(layers)) or any(not 0 <= layer < depth - 1 for layer in layers):
        raise ConfigError(
            f"Checkpoints after layers {layers}; they must be ascending and before the last of "
            f"{depth} layers."
        )
    tails = {c.head.tail_layers for c in checkpoints}
    if config.prefill_exit and any(tails):
        raise ConfigError("prefill_exit=True cannot finish prompt tokens through a tail head.")
    if len(tails) > 1 or any(c.layer + 1 > depth - c.head.tail_layers for c in checkpoints):
        raise ConfigError(
            f"Tail heads over {sorted(tails)} layers at checkpoints {layers}; all heads must "
            "finish through the same last layers, which lie above every checkpoint."
        )
