"""The plugin's settings, validated: which artifact, which mode, which certified risk."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tide.drift import REACTIONS
from tide.errors import ArtifactError, CertificateError, ConfigError, UnsupportedModelError
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.models.fingerprint import config_hash, dtype_name
from tide.risk import CertificateQuery, find_certificate
from tide.strangers import flag, number, optional, share, text, whole
from tide.vllm import ARCHITECTURES, require_version

logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown

_CHOICES = {
    "mode": ("exit", "lossless"), "on_drift": REACTIONS, "attention": ("subset", "all"),
    "gates": ("by_cost", "always"),
}  # fmt: skip
_CHECKS = {
    "artifact": optional(text), "risk": optional(share), "delta": share, "uncertified": flag,
    "threshold_scale": number, "min_layers": whole, "audit_rate": share,
    "cross_request_drafts": flag, "script": optional(share),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The object under "tide" in vLLM's additional configuration.

    Attributes:
        artifact: a folder or hub id; in mode "lossless" its table drafts too, and it may be None.
        mode: "exit", or "lossless": the model is vLLM's own, and `TableProposer` drafts.
        risk: the certified risk to serve; needs a certificate for "propagate" and this dtype.
        delta: accepted probability that the certificate is wrong, and of a false drift alarm.
        uncertified: serve the calibrated thresholds, scaled by `threshold_scale`, without a
            certificate.
        threshold_scale: see `Thresholds.scaled`; a certificate brings its own.
        min_layers: see `TIDEConfig`; a certificate brings its own.
        audit_rate: share of requests that run at full depth whatever their gates decide, to compare
            their predicted tokens with the target tokens. The audit sees wrong exits; it does not
            see how the KV of exited tokens changes later tokens.
        on_drift: "warn" or "full_depth" (exits off until a restart), when the audit finds more
            disagreement than the risk.
        attention: "subset" skips attention of exited tokens above their exit; "all" skips their
            MLPs only, for attention backends whose metadata cannot be cut.
        gates: "by_cost" (with CPU_ATTN and "subset" attention; refused elsewhere) evaluates them
            where they pay at that number of requests, by their measured
            costs and the exits seen so far, and elsewhere runs every token at full depth; "always"
            evaluates them everywhere, whatever the load.
        cross_request_drafts: in mode "lossless", also draft from recent answers to other requests.
            No request sees the text of another, but a faster answer can reveal that it resembles
            one.
        script: for benchmarks: this share of tokens exits at half depth, without a gate.
    """

    artifact: str | None = None
    mode: str = "exit"
    risk: float | None = None
    delta: float = 0.05
    uncertified: bool = False
    threshold_scale: float = 1.0
    min_layers: int = 0
    audit_rate: float = 0.01
    on_drift: str = "warn"
    attention: str = "subset"
    gates: str = "by_cost"
    cross_request_drafts: bool = False
    script: float | None = None

    @classmethod
    def read(cls, vllm_config: Any) -> Settings | None:
        """The settings; None if there are none, in which case the model is vLLM's own."""
        additional = vllm_config.additional_config
        given = additional.get("tide") if isinstance(additional, Mapping) else None
        if given is None:
            return None
        require_version()
        known = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or set(given) - known:
            unknown = sorted(set(given) - known) if isinstance(given, Mapping) else given
            raise ConfigError(
                f"'tide' in the additional configuration has {unknown}; it may have "
                f"{', '.join(sorted(known))}."
            )
        found = cls(**given)
        found._check(vllm_config)
        return found

    def _check(self, vllm_config: Any) -> None:
        """Raise for settings that are invalid or that vLLM's configuration does not allow."""
        for name, allowed in _CHOICES.items():
            if (got := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} is {got!r}; it must be one of {', '.join(allowed)}.")
        try:
            for name, check in _CHECKS.items():
                check(getattr(self, name), name)
        except ValueError as error:
            raise ConfigError(f"In 'tide', {error}.") from error
        self._require_effect()
        if self.mode == "lossless":
            speculative, model = vllm_config.speculative_config, vllm_config.model_config
            if speculative is None or speculative.method != "custom_class":
                raise ConfigError(
                    "Mode 'lossless' drafts by speculation, which is not configured. Start with "
                    "`tide serve MODEL --lossless`, or add --speculative-config "
                    """'{"method": "custom_class", "model": "tide.vllm.proposer.TableProposer", """
                    """"num_speculative_tokens": 8}'."""
                )
            if model.is_hybrid or model.is_attention_free:
                names = ", ".join(getattr(model.hf_config, "architectures", None) or ["This model"])
                raise UnsupportedModelError(
                    f"{names} keeps recurrent state, from which a rejected draft cannot always be "
                    "removed. Serve it without drafts: `tide serve MODEL --off`."
                )
            return
        for name in ("threshold_scale", "min_layers", "uncertified", "script"):
            if self.risk is not None and (got := getattr(self, name)) != getattr(_USUAL, name):
                raise ConfigError(
                    f"risk {self.risk} serves the gates that were certified; got {name} = {got!r} "
                    f"beside it. Omit {name}, or omit risk to serve uncertified."
                )
        if self.artifact is None and self.script is None:
            raise ConfigError(
                "'tide' names no artifact. Make one with `tide calibrate MODEL -o DIR`, or set "
                "'mode' to 'lossless' for drafts from the context."
            )
        if self.risk is None and not self.uncertified and self.script is None:
            raise CertificateError(
                "'tide' names no risk. Give a certified risk, or 'uncertified': true to serve "
                "the calibrated thresholds without a certificate."
            )
        if self.script is None:
            require_architecture(vllm_config.model_config.hf_config)
        _check_exits(vllm_config)

    def _require_effect(self) -> None:
        """Raise for a setting that would have no effect."""
        idle: dict[str, tuple[str, ...]] = {}
        if self.mode == "lossless":
            idle["mode 'exit'"] = (
                "risk", "delta", "uncertified", "threshold_scale", "min_layers", "audit_rate",
                "on_drift", "attention", "gates", "script",
            )  # fmt: skip
        else:
            idle["mode 'lossless'"] = ("cross_request_drafts",)
            if self.risk is None:
                idle["risk"] = ("delta", "on_drift")
            elif not self.audit_rate:
                idle["an audit_rate above 0"] = ("on_drift",)
            if self.audit_rate == 1 and self.gates == "by_cost" and self.script is None:
                raise ConfigError(
                    "audit_rate is 1: every request runs at full depth, so gates never pay and are "
                    "hardly evaluated. Lower it, or set gates to 'always'."
                )
        for wanted, names in idle.items():
            for name in names:
                if (got := getattr(self, name)) != getattr(_USUAL, name):
                    raise ConfigError(f"{name} is {got!r}, and counts with {wanted} only: omit it.")

    def load(self, vllm_config: Any) -> tuple[Artifact, list[Checkpoint], float, int | None]:
        """The artifact, its checkpoints in use, the scale of their thresholds, and the most tokens
        of an answer that a certificate covers."""
        assert self.artifact is not None
        made = Artifact.from_pretrained(self.artifact)
        require_model(made, vllm_config)
        if self.uncertified:
            return made, made.checkpoints_from(self.min_layers), self.threshold_scale, None
        assert self.risk is not None
        dtype = dtype_name(vllm_config.model_config)
        query = CertificateQuery(self.risk, self.delta, dtype, "propagate")
        found = find_certificate(made, query)
        longest = found.generation.get("max_new_tokens")
        logger.warning(
            "TIDE: risk %g is certified for greedy decoding (temperature 0), of prompts of at most "
            "%s tokens and answers of at most %s. Other requests are served too, and no "
            "certificate covers them; vLLM samples unless a request sets a temperature of 0.",
            found.risk, found.generation.get("max_prompt"), longest,
        )  # fmt: skip
        return made, made.checkpoints_from(found.min_layers), found.threshold_scale, longest


_USUAL = Settings()


def _check_exits(vllm_config: Any) -> None:
    """Raise for a configuration of vLLM that early exit does not support."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        raise ConfigError(
            "A full CUDA graph replays the whole model, and exits decide inside it. Add "
            """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'."""
        )
    if vllm_config.use_v2_model_runner:
        raise ConfigError(
            "Early exit needs vLLM's first model runner: the second one warms up with requests "
            "that cannot be told from real ones. Set VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedModelError(
            "Early exit does not span pipeline stages: pipeline_parallel_size must be 1."
        )
    for what, given in (
        ("LoRA adapters", vllm_config.lora_config is not None),
        ("KV transfer", vllm_config.kv_transfer_config is not None),
        ("quantised weights", model.quantization is not None),
        ("models that take images or sound", model.is_multimodal_model),
        ("pooling", model.runner_type != "generate"),
        ("prompts given as embeddings", model.enable_prompt_embeds),
        ("microbatches", parallel.use_ubatching),
        ("context parallelism", parallel.decode_context_parallel_size > 1
         or parallel.prefill_context_parallel_size > 1),
    ):  # fmt: skip
        if given:
            raise UnsupportedModelError(
                f"Early exit does not support {what}: no certificate covers that."
            )
    if vllm_config.cache_config.cache_dtype != "auto":
        raise UnsupportedModelError(
            f"kv_cache_dtype is {vllm_config.cache_config.cache_dtype}; certificates are for a KV "
            "cache in the model's dtype: set it to auto."
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "Early exit and speculative decoding do not combine in vLLM. Remove 'tide' or "
            "--speculative-config."
        )


def require_architecture(config: Any) -> None:
    """Raise unless the plugin has exits for a model, by its config."""
    names = getattr(config, "architectures", None) or []
    if not set(names) & set(ARCHITECTURES):
        raise UnsupportedModelError(
            f"{', '.join(names) or 'This model'} has no exits in the vLLM plugin. Supported: "
            f"{', '.join(ARCHITECTURES)}. Drafts work with every model that "
            "has KV in every layer: `tide serve MODEL`."
        )


def require_model(made: Artifact, vllm_config: Any) -> None:
    """Raise unless the artifact is for this model.

    Compares the configurations: vLLM shards and packs the weights, so their hash differs.
    """
    text_config = vllm_config.model_config.hf_text_config
    same = made.fingerprint.config == config_hash(text_config)
    if made.hidden_size != text_config.hidden_size or not same:
        raise ArtifactError(
            "This artifact was made for another model: the configuration differs. Calibrate this "
            "model with `tide calibrate`."
        )
    made.require_sizes(text_config.hidden_size, text_config.vocab_size)
