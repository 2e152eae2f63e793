"""Risk while serving: which certificate covers a model, and whether it covers a call."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tide.config import TIDEConfig
from tide.errors import CertificateError, ConfigError
from tide.exits.artifact import Artifact
from tide.exits.certificate import TOKEN_LOSS, Certificate
from tide.models.fingerprint import Fingerprint, fingerprint
from tide.models.locate import Parts

DELTA = 0.05  # the chance that a certificate is wrong, where none is given


class UncertifiedWarning(UserWarning):
    """A call is outside of the conditions under which the risk was certified."""


@dataclass(frozen=True)
class CertificateQuery:
    """What a certificate must cover.

    Attributes:
        risk, delta: the bound that is wanted.
        dtype: precision of the model.
        kv_cache_strategy: how KV of exited tokens is made.
        min_layers: exits below this depth are not used; None to take what is certified.
        model: fingerprint of the model that is served; None if it cannot be taken.
        loss: what the risk is of.
    """

    risk: float
    delta: float
    dtype: str
    kv_cache_strategy: str
    min_layers: int | None = None
    model: Fingerprint | None = None
    loss: str = TOKEN_LOSS

    def __post_init__(self) -> None:
        require_shares(risk=self.risk, delta=self.delta)


def require_shares(**shares: float) -> None:
    """Raise for what is not between 0 and 1, by name."""
    for name, got in shares.items():
        if not 0 < got < 1:
            raise ConfigError(f"{name} is {got!r}; it must be between 0 and 1: 2 % is 0.02.")


def find_certificate(artifact: Artifact, query: CertificateQuery) -> Certificate:
    """The certificate of an artifact that covers a query most closely.

    Raises:
        CertificateError: if there is none; names those there are, and how to make one.
    """
    reasons, found = [], []
    exits = artifact.exits  # reads every tensor, so once for all certificates
    for certificate in artifact.certificates:
        misses = _misses(certificate, artifact, exits, query)
        reasons += ["; ".join(misses)] if misses else []
        found += [] if misses else [certificate]
    if not found:
        others = f" There is one that {', one that '.join(reasons)}." if reasons else ""
        least = "" if query.min_layers is None else f"--min-layers {query.min_layers} "
        raise CertificateError(
            f"No certificate covers risk {query.risk} at delta {query.delta} with {query.dtype} "
            f"and kv_cache_strategy={query.kv_cache_strategy!r}.{others} Make one with "
            f"`tide certify MODEL DIR --risk {query.risk} --dtype {query.dtype} "
            f"--delta {query.delta} --kv {query.kv_cache_strategy} {least}--data prompts.jsonl`."
        )
    # By what they claim: the most aggressive of many would be wrong as often as any of them is.
    return max(found, key=lambda c: (c.risk, c.delta, c.threshold_scale))


def certified_config(
    artifact: Artifact,
    query: CertificateQuery,
    config: TIDEConfig | None,
    threshold_scale: float | None = None,
    policy: Any = None,
) -> tuple[Certificate, TIDEConfig]:
    """The certificate that covers a query, and the settings to serve it with.

    Args:
        config: the caller's settings; None to take what is certified.
        threshold_scale, policy: the caller's; both must be None.

    Raises:
        ConfigError: if the caller's settings are not those that a certificate is for.
    """
    for name, given in (("threshold_scale", threshold_scale), ("policy", policy)):
        if given is not None:
            raise ConfigError(
                f"risk={query.risk} serves the gates and the threshold scale that were certified; "
                f"got {name}={given!r}. Omit {name}, or omit risk to serve uncertified."
            )
    config = config or TIDEConfig(exit_threshold=None, mode="auto")
    if config.prefill_exit:
        raise ConfigError("No certificate covers prefill_exit: prompts must go to full depth.")
    if config.mode not in ("exit", "auto") or config.exit_threshold is not None:
        raise ConfigError(
            f"risk={query.risk} chooses the thresholds: it needs mode='exit' or "
            f"'auto' and exit_threshold=None, not mode={config.mode!r} and "
            f"exit_threshold={config.exit_threshold!r}."
        )
    found = find_certificate(artifact, query)
    # Without audit_tail the monitor would miss the last tokens of a sequence.
    return found, config.with_(min_layers=found.min_layers, audit_tail=True)


def _misses(
    certificate: Certificate, artifact: Artifact, exits: str, query: CertificateQuery
) -> list[str]:
    """Why a certificate does not cover a query; empty if it does."""
    layers = [int(layer) for layer in certificate.thresholds]
    wanted = layers
    if query.min_layers is not None:
        wanted = [c.layer for c in artifact.checkpoints_from(query.min_layers)]
    strategy = certificate.kv_cache_strategy
    other_model = query.model is not None and certificate.model != query.model.to_dict()
    reasons = (
        (other_model, "is for another model"),
        (certificate.loss != query.loss, f"is for another loss: {certificate.loss}"),
        (certificate.risk > query.risk, f"is for risk {certificate.risk}"),
        (certificate.delta > query.delta, f"is for delta {certificate.delta}"),
        (certificate.exits != exits, "is for other exits"),
        (certificate.dtype != query.dtype, f"is for dtype {certificate.dtype}"),
        (strategy != query.kv_cache_strategy, f"is for kv_cache_strategy {strategy}"),
        (layers != wanted, f"is for min_layers {certificate.min_layers}"),
    )
    return [reason for missed, reason in reasons if missed]


# Settings of logits processors that follow the length of the prompt or of the output, or that are
# filled in at the first call.
_VARYING = (
    "begin_index", "max_length", "min_length", "prompt_length_to_skip", "regulation_start",
    "prepared_bias_variables", "length_1_bias",
)  # fmt: skip


def _described(value: Any) -> str:
    """A setting in short; empty if it is none that is known."""
    value = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(value, (list, tuple, dict)):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
    return str(value) if isinstance(value, (bool, int, float, str)) else ""


def describe_processors(processors: Iterable[Any]) -> list[str]:
    """Logits processors by class and settings, to compare those of calls."""

    def settings(processor: Any) -> str:
        given = {k: _described(v) for k, v in sorted(getattr(processor, "__dict__", {}).items())}
        return ", ".join(f"{k}={v}" for k, v in given.items() if v and k not in _VARYING)

    return [f"{type(processor).__name__}({settings(processor)})" for processor in processors]


class Coverage:
    """What a certificate covers while it is served: the weights as certified, and calls as tested.

    Args:
        certificate: what the risk rests on.
        model: that is served.
        parts: of the model.
    """

    def __init__(self, certificate: Certificate, model: Any, parts: Parts) -> None:
        self._certificate, self._model, self._parts = certificate, model, parts
        self._weights = _versions(model)

    def check(self, call: Any) -> None:
        """Raise if weights were changed; warn if a call is not one that the certificate covers."""
        if (now := _versions(self._model)) != self._weights:
            found = fingerprint(self._model, self._parts).to_dict()
            if found != self._certificate.model:
                raise CertificateError(
                    "The model's weights were changed after its certificate was looked up, which "
                    "covers them no longer. Calibrate and certify the changed model, or restore "
                    "the weights."
                )
            self._weights = now
        warn_if_uncovered(self._certificate, call)


def _versions(model: Any) -> list[tuple[int, int]]:
    """Of each parameter, which it is and how often it was written to."""
    return [(id(p), 0 if p.is_inference() else p._version) for p in model.parameters()]


def warn_if_uncovered(certificate: Certificate, call: Any) -> None:
    """Warn if a call picks tokens in another way, or may be longer, than was certified.

    Args:
        call: its `input_ids`, `logits_processor`, `generation_config` and `max_length`.
    """
    covered, options = certificate.generation, call.generation_config
    uncovered = []
    here = describe_processors(call.logits_processor)
    there = covered.get("logits_processors", [])
    if options.do_sample and not covered.get("do_sample", False):
        uncovered.append("do_sample=True, and certificates are for greedy decoding")
    elif here != there:
        names = [", ".join(some) or "no logits processors" for some in (here, there)]
        uncovered.append(f"{names[0]}, and it is for {names[1]}")
    audited = certificate.kv_cache_strategy == "deferred" or not uncovered
    device, prompt = call.input_ids.device.type, call.input_ids.shape[1]
    if torch.is_autocast_enabled(device):
        cast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        if cast != certificate.dtype:
            uncovered.append(f"autocast to {cast}, and it is for {certificate.dtype}")
    for limit, got, what in (
        ("max_new_tokens", call.max_length - prompt, "new tokens"),
        ("max_prompt", prompt, "tokens of a prompt"),
    ):
        most = covered.get(limit)
        if most is not None and got > most:
            uncovered.append(f"up to {got} {what}, and it is for at most {most}")
    if uncovered:
        counted = "still counts it" if audited else "cannot check it"
        warnings.warn(
            f"The certificate for risk {certificate.risk} does not cover this call: "
            f"{'; '.join(uncovered)}. The drift monitor {counted}. Change the call, or certify for "
            "it: `tide certify` takes --new-tokens, --max-prompt, and the logits processors of the "
            "model's own generation config.",
            UncertifiedWarning,
            stacklevel=2,
        )
