"""Risk while serving: which certificate covers a call, and whether its bound still holds.

The drift monitor is a bettor who stakes on each sequence having lost more than the certified bound.
If the bound holds, the wealth seldom ever reaches 1 / delta, however long it serves (Ville's
inequality). A part of the wealth starts to bet at each sequence, so that losses before a drift do
not hide it (mixtures over change points: Shin, Ramdas and Rinaldo, "E-detectors"). No model inside.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tide.config import TIDEConfig
from tide.errors import CertificateError, ConfigError
from tide.exits.artifact import Artifact
from tide.exits.certificate import TOKEN_LOSS, Certificate
from tide.models.fingerprint import Fingerprint

REACTIONS = ("warn", "full_depth")


class DriftWarning(UserWarning):
    """Exited tokens differ from full depth more often than the certified bound allows."""


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


def find_certificate(artifact: Artifact, query: CertificateQuery) -> Certificate:
    """The most aggressive certificate of an artifact that covers a query.

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
        raise CertificateError(
            f"No certificate covers risk {query.risk} at delta {query.delta} with {query.dtype} "
            f"and kv_cache_strategy={query.kv_cache_strategy!r}.{others} Make one with "
            f"`tide certify MODEL DIR --risk {query.risk} --dtype {query.dtype} "
            f"--kv {query.kv_cache_strategy} --data prompts.jsonl`."
        )
    # Of equally aggressive ones the one for the risk wanted, not for a lower one.
    return max(found, key=lambda certificate: (certificate.threshold_scale, certificate.risk))


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
        uncovered.append("do_sample=True, and it is for greedy decoding")
    elif here != there:
        names = [", ".join(some) or "no logits processors" for some in (here, there)]
        uncovered.append(f"{names[0]}, and it is for {names[1]}")
    prompt = call.input_ids.shape[1]
    for limit, got, what in (
        ("max_new_tokens", call.max_length - prompt, "new tokens"),
        ("max_prompt", prompt, "tokens of a prompt"),
    ):
        most = covered.get(limit)
        if most is not None and got > most:
            uncovered.append(f"up to {got} {what}, and it is for at most {most}")
    if uncovered:
        warnings.warn(
            f"The certificate for risk {certificate.risk} does not cover this call: "
            f"{'; '.join(uncovered)}. The drift monitor still counts it. Certify under these "
            "conditions with `tide certify`, or change the call.",
            UncertifiedWarning,
            stacklevel=2,
        )


@dataclass
class DriftMonitor:
    """An anytime-valid test that the mean loss of sequences is at most `risk`.

    Attributes:
        risk: the certified bound.
        delta: chance of a false alarm, ever.
        sequences: how many were seen.
        wealth: the bettor's, of 1 at the start.
        fired: whether it has reached 1 / delta.
    """

    risk: float
    delta: float = 0.05
    sequences: int = 0
    wealth: float = 1.0
    fired: bool = False
    _invested: float = field(default=0.0, repr=False)
    _sum: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)

    def add(self, loss: float) -> bool:
        """Take in the loss of a sequence, between 0 and 1; returns whether it has fired by now."""
        # The stake depends on what came before only: the excess so far over its spread.
        n = self.sequences + 1
        mean = (self.risk + self._sum) / n
        spread = (self.risk * (1 - self.risk) + self._squares) / n
        edge = max(mean - self.risk, 0.1 * self.risk)
        stake = min(edge / (spread + edge**2), 0.5 / self.risk)
        # Of the 1 at the start, 1 / (n (n + 1)) bets from here on, and 1 / (n + 1) is kept for
        # later. If all of it bet from the start, many good sequences would use it up.
        self._invested = (self._invested + 1 / (n * (n + 1))) * (1 + stake * (loss - self.risk))
        self.wealth = self._invested + 1 / (n + 1)
        self.sequences, self._sum = n, self._sum + loss
        self._squares += (loss - mean) ** 2
        self.fired |= self.wealth >= 1 / self.delta
        return self.fired

    @property
    def estimate(self) -> float | None:
        """Mean loss of the sequences seen; None if there was none."""
        return self._sum / self.sequences if self.sequences else None

    def reset(self) -> None:
        """Start again, as after a new certificate."""
        self.sequences, self.wealth, self.fired = 0, 1.0, False
        self._invested = self._sum = self._squares = 0.0


class CircuitBreaker:
    """Feeds a drift monitor with what the audit finds, and reacts when it fires.

    Args:
        monitor: the test.
        on_drift: "warn", "full_depth" (exits are off from then on), or a callable, which is given
            the monitor.

    Attributes:
        tripped: whether exits are off.
    """

    def __init__(
        self, monitor: DriftMonitor, on_drift: str | Callable[[DriftMonitor], Any] = "warn"
    ) -> None:
        if not callable(on_drift) and on_drift not in REACTIONS:
            raise ConfigError(
                f"on_drift is {on_drift!r}; it must be one of {', '.join(REACTIONS)}, or a "
                "function of the drift monitor."
            )
        self.monitor, self.on_drift, self.tripped = monitor, on_drift, False

    def add(self, losses: Iterable[float]) -> None:
        """Take in the losses of sequences that have ended."""
        for loss in losses:
            if not self.monitor.fired and self.monitor.add(loss):
                self._fire()

    def reset(self) -> None:
        """Start again, exits on."""
        self.monitor.reset()
        self.tripped = False

    def _fire(self) -> None:
        if callable(self.on_drift):
            self.on_drift(self.monitor)
            return
        self.tripped = self.on_drift == "full_depth"
        now = (
            "Exits are off until engine.circuit_breaker.reset()."
            if self.tripped
            else "Exits stay on."
        )
        monitor = self.monitor
        warnings.warn(
            "Exited tokens differ from full depth more often than certified. Of all tokens in "
            f"{monitor.sequences} sequences, before and after the drift, {monitor.estimate:.2%} "
            f"differed; the certified bound is {monitor.risk:.2%}. {now} Certify on prompts like "
            "these with `tide certify`.",
            DriftWarning,
            stacklevel=2,
        )
