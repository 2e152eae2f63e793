"""Gives the plugin's settings, checked: which artifact, which promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tide.errors import ArtifactError, CertificateError, ConfigError, UnsupportedModelError
from tide.exits.artifact import Artifact, Checkpoint
from tide.models.fingerprint import config_hash, dtype_name
from tide.vllm import ARCHITECTURES, require_version
from tide.watch import REACTIONS


@dataclass(frozen=True)
class Settings:
    """What stands under "tide" in vLLM's additional configuration.

    Attributes:
        artifact: a folder or hub id.
        mode: "exit", or "lossless": the model is vLLM's own, and `TableProposer` drafts.
        risk: the certified risk to serve; needs a certificate for "propagate" and this dtype.
        delta: the chance that the certificate may be wrong, and of a false alarm while serving.
        uncertified: serve the thresholds as calibrated, moved by `boldness`, without a promise.
        boldness, min_layers: see `Gate.at` and `TIDEConfig`; a certificate has its own.
        audit_rate: share of tokens that are sent to full depth whatever their gate says, to check
            what their exit head would have said. It sees wrong exits, not what K and V of early
            tokens do to later ones.
        on_drift: "warn" or "full_depth" (exits off until a restart), when the audit finds more
            than the risk.
        attention: "subset" leaves tokens that are gone out of attention above; "all" only out of
            the MLPs, for attention backends whose metadata we cannot cut.
        learn: mode "lossless": draft from what other requests were answered lately, too. Nobody
            sees the text of others, but how fast an answer comes may tell that it is like one of
            theirs.
        script: for benchmarks: this share of tokens leaves at half depth, whatever it says.
    """

    artifact: str | None = None
    mode: str = "exit"
    risk: float | None = None
    delta: float = 0.05
    uncertified: bool = False
    boldness: float = 1.0
    min_layers: int = 0
    audit_rate: float = 0.01
    on_drift: str = "warn"
    attention: str = "subset"
    learn: bool = False
    script: float | None = None

    @classmethod
    def read(cls, vllm_config: Any) -> Settings | None:
        """The settings, or None if there are none: the model is then vLLM's own."""
        additional = vllm_config.additional_config
        given = additional.get("tide") if isinstance(additional, Mapping) else None
        if given is None:
            return None
        require_version()
        known = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or set(given) - known:
            strange = sorted(set(given) - known) if isinstance(given, Mapping) else given
            raise ConfigError(
                f"'tide' in the additional configuration has {strange}; it may have "
                f"{', '.join(sorted(known))}."
            )
        found = cls(**given)
        found._check(vllm_config)
        return found

    def _check(self, vllm_config: Any) -> None:
        """Refuse what the plugin cannot do right, by name."""
        if self.mode not in ("exit", "lossless"):
            raise ConfigError(f"mode is {self.mode!r}; it must be 'exit' or 'lossless'.")
        if self.on_drift not in REACTIONS:
            raise ConfigError(
                f"on_drift is {self.on_drift!r}; it must be one of {', '.join(REACTIONS)}."
            )
        if self.attention not in ("subset", "all"):
            raise ConfigError(f"attention is {self.attention!r}; it must be 'subset' or 'all'.")
        if self.artifact is None and self.script is None:
            raise ConfigError(
                "'tide' names no artifact. Make one with `tide calibrate MODEL -o DIR`."
            )
        if self.mode == "lossless":
            return
        if self.risk is None and not self.uncertified and self.script is None:
            raise CertificateError(
                "'tide' names no risk. Give a certified one, or 'uncertified': true to serve "
                "thresholds that promise nothing."
            )
        if not vllm_config.model_config.enforce_eager:
            raise ConfigError(
                "Early exit decides while the model runs, which compiled graphs do not follow. "
                "Add --enforce-eager."
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UnsupportedModelError(
                "Early exit does not span pipeline stages: pipeline_parallel_size must be 1."
            )
        for what, given in (
            ("LoRA adapters", vllm_config.lora_config),
            ("K and V that come from elsewhere", vllm_config.kv_transfer_config),
            ("quantised weights", vllm_config.model_config.quantization),
        ):
            if given is not None:
                raise UnsupportedModelError(
                    f"Early exit does not go with {what}: no certificate is for that."
                )
        if vllm_config.cache_config.cache_dtype != "auto":
            raise UnsupportedModelError(
                f"kv_cache_dtype is {vllm_config.cache_config.cache_dtype}; certificates are for K "
                "and V in the model's dtype: leave it at auto."
            )
        if vllm_config.speculative_config is not None:
            raise ConfigError(
                "Early exit and speculative decoding are two ways to spend the same time, and do "
                "not combine in vLLM. Leave out 'tide', or --speculative-config."
            )

    def load(self, vllm_config: Any) -> tuple[Artifact, list[Checkpoint], float]:
        """The artifact, its exits that are used, and how bold its certificate lets them be."""
        assert self.artifact is not None
        made = Artifact.from_pretrained(self.artifact)
        require_model(made, vllm_config)
        dtype = dtype_name(vllm_config.model_config)
        if self.uncertified:
            return made, made.above(self.min_layers), self.boldness
        assert self.risk is not None
        found = made.covering(self.risk, self.delta, dtype, "propagate")
        return made, made.above(found.min_layers), found.boldness


def require_model(made: Artifact, vllm_config: Any) -> None:
    """Refuse an artifact of another model, by its config: vLLM cuts and packs the weights."""
    config = vllm_config.model_config.hf_config
    names = getattr(config, "architectures", None) or []
    if not set(names) & set(ARCHITECTURES):
        raise UnsupportedModelError(
            f"{', '.join(names) or 'This model'} is not served with exits. vLLM models that are: "
            f"{', '.join(ARCHITECTURES)}."
        )
    text = vllm_config.model_config.hf_text_config
    if made.hidden_size != text.hidden_size or made.fingerprint.config != config_hash(text):
        raise ArtifactError(
            "This artifact was made for another model: the configuration differs. Calibrate this "
            "model with `tide calibrate`."
        )
