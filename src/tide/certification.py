"""Certification `certify`: thresholds whose risk holds with a stated confidence, on unused prompts.

Learn-then-test: settings on one path, from the safest to the most aggressive, each run as it will
be deployed; the last one shown to keep the risk is certified. The path was learned in calibration,
on other documents, so the order of the tests is fixed in advance.

Every setting is a separate run. One run shared by all would be exact only up to the first wrong
token: after it, the outputs of different settings diverge.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tide.calibration.answers import pad_left
from tide.calibration.bounds import betting, learn_then_test
from tide.calibration.data import encode_prompts
from tide.calibration.fresh import Claim, draw, note_failed
from tide.calibration.noise import noise_floor, refuse_noise
from tide.config import TIDEConfig
from tide.decode.pass_costs import PassCosts
from tide.decode.session import FullDepthWarning
from tide.engine import TIDE
from tide.errors import ArtifactError, ConfigError
from tide.exits.artifact import Artifact
from tide.exits.certificate import TASK_LOSS, TOKEN_LOSS, Certificate
from tide.models.fingerprint import dtype_name
from tide.progress import bars
from tide.risk import describe_processors, require_shares

# The path, safest first: factors on the error probability that calibration accepts at an exit.
THRESHOLD_SCALES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)

# From a prompt and an answer to a loss between 0 and 1.
TaskLoss = Callable[[str, str], float]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, and how they are decoded.

    Attributes:
        texts: the prompts.
        encoded: their token ids.
        new_tokens: longest answer.
        batch: sequences decoded together.
    """

    texts: Sequence[str]
    encoded: Sequence[Sequence[int]]
    new_tokens: int
    batch: int


def certify(
    model: Any,
    tokenizer: Any,
    artifact: str | Path | Artifact,
    prompts: str | Path | Iterable[str],
    *,
    risk: float | Sequence[float] = 0.02,
    delta: float = 0.05,
    config: TIDEConfig | None = None,
    samples: int | None = None,
    new_tokens: int = 128,
    max_prompt: int = 512,
    batch: int = 8,
    threshold_scales: Sequence[float] = THRESHOLD_SCALES,
    loss: TaskLoss | None = None,
    force: bool = False,
    version: str = "",
    quiet: bool = False,
) -> list[Certificate]:
    """Certify an artifact's exits for some risks, and store the certificates in it.

    Args:
        model: as it will be deployed: its dtype is part of the certificate.
        tokenizer: its tokenizer.
        artifact: from `calibrate`; a path is written back with the certificates in it.
        prompts: a file, a data set or texts; those that calibration has used are skipped, as are
            those on which the same claim has failed, and of each document one is taken.
        risk: share of tokens that may differ from full depth; one or several.
        delta: probability that a certificate is wrong, for each.
        config: as it will be deployed; `kv_cache_strategy` and `min_layers` matter. Drafts only
            change the size of passes, which in half precision flips near-ties and nothing else.
        samples: most prompts to use.
        new_tokens: longest answer.
        max_prompt: longest prompt.
        batch: sequences decoded together.
        threshold_scales: the path, safest first; see `Thresholds.scaled`.
        loss: measure this instead, from a prompt and an answer to a loss between 0 and 1. `TIDE`
            serves risks of tokens only; serve such a certificate with its `threshold_scale` and
            `min_layers`, without `risk`.
        force: certify risks below the noise floor of the model's own dtype.
        version: of the library, for the record.
        quiet: show no progress.

    Returns:
        A certificate for each risk that some setting was shown to keep; the others have none.

    Raises:
        DataError: if there are fewer prompts than any test of a risk takes.
    """
    made = artifact if isinstance(artifact, Artifact) else Artifact.from_pretrained(artifact)
    risks = sorted({risk} if isinstance(risk, (int, float)) else set(risk))
    config = config or TIDEConfig(min_layers=made.config.min_layers)
    config = config.with_(mode="exit", exit_threshold=None, audit_tail=True)
    _check(model, risks, delta, threshold_scales, config)
    exits, dtype = made.exits, dtype_name(model)  # a digest of every tensor, so once
    counted = TOKEN_LOSS if loss is None else TASK_LOSS
    conditions = counted, exits, config.min_layers, dtype, config.kv_cache_strategy
    claims = {r: (r, delta, *conditions) for r in risks}
    drawn = draw(prompts, made, samples, list(claims.values()))
    texts = [prompt.text for prompt in drawn]
    encoded = encode_prompts(tokenizer, texts, max_prompt)
    workload = Workload(texts=texts, encoded=encoded, new_tokens=new_tokens, batch=batch)
    with bars(quiet) as bar:
        if model.dtype != torch.float32 and not force and loss is None:
            floor = noise_floor(model, tokenizer, encoded[: 2 * batch], new_tokens)
            refuse_noise(floor, risks, dtype)
        runs: list[np.ndarray] = []
        costs = PassCosts()  # the same for every setting, so measured once

        def settings() -> Iterator[np.ndarray]:
            """The losses of each setting on the path; a setting runs when first needed."""
            for k, scale in enumerate(threshold_scales):
                if k == len(runs):
                    engine = TIDE(model, made, config, threshold_scale=scale, audit_rate=1.0)
                    engine.drafter.costs = costs
                    tick = bar(f"Threshold scale {scale:g}")
                    runs.append(
                        measure_losses(engine, tokenizer, workload, loss=loss, progress=tick)
                    )
                yield runs[k]

        held = {r: learn_then_test(settings(), r, delta) for r in risks}
    generation = {
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "max_prompt": max_prompt,
        "logits_processors": own_processors(model, new_tokens),
    }
    data = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    certificates = [
        Certificate(
            risk=wanted,
            delta=delta,
            threshold_scale=threshold_scales[last],
            thresholds=made.thresholds(threshold_scales[last], config.min_layers),
            sequences=len(texts),
            estimate=float(runs[last].mean()),
            p_value=betting(runs[last], wanted),
            test="betting",
            loss=counted,
            model=made.fingerprint.to_dict(),
            exits=exits,
            min_layers=config.min_layers,
            dtype=dtype,
            kv_cache_strategy=config.kv_cache_strategy,
            batch=batch,
            generation=generation,
            data=data,
            tide=version,
        )
        for wanted, last in held.items()
        if last is not None and runs[last].mean() <= wanted
    ]
    if not isinstance(artifact, Artifact):
        now = Artifact.from_pretrained(artifact)  # others may have been certified since
        if now.exits != exits:
            raise ArtifactError(
                f"{artifact} has other exits than when certification began, so the certificates "
                "are not of what is there, and nothing was written. Certify again."
            )
        made = now
    # A new test replaces an old one: a bound that was not shown again no longer holds.
    others = [c for c in made.certificates if _claim(c) not in claims.values()]
    made.certificates = others + certificates
    if loss is None:
        shown = {certificate.risk for certificate in certificates}
        note_failed(made, drawn, [claims[r] for r in risks if r not in shown])
    if not isinstance(artifact, Artifact):
        made.save(artifact)
    return certificates


def _claim(of: Certificate) -> Claim:
    """The claim of a certificate."""
    return of.risk, of.delta, of.loss, of.exits, of.min_layers, of.dtype, of.kv_cache_strategy


def measure_losses(
    engine: TIDE,
    tokenizer: Any,
    workload: Workload,
    *,
    loss: TaskLoss | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """The loss of every sequence, decoded as it will be deployed, `[n]`, as the prompts are given.

    Args:
        loss: from a prompt and an answer; by default the share of tokens that differ from full
            depth.
        progress: called with the sequences done and their total.
    """
    texts, encoded = workload.texts, workload.encoded
    losses = np.empty(len(texts))
    # Sequences of a batch are of like length, since padding takes as long as tokens do.
    order = sorted(range(len(texts)), key=lambda k: len(encoded[k]))
    for start in range(0, len(order), workload.batch):
        progress(start, len(order))
        some = order[start : start + workload.batch]
        ids, mask = pad_left(tokenizer, [encoded[k] for k in some], engine.model.device)
        out = _generate(engine, ids, mask, workload.new_tokens)
        if loss is None:
            found = engine.last_stats.losses
            if None in found:
                raise ConfigError(
                    "This model's generation config changes its logits (a penalty, bad_words_ids), "
                    "so the target token of a position is not the most likely one, and "
                    f"kv_cache_strategy={engine.config.kv_cache_strategy!r} cannot be checked. Use "
                    "'deferred', clear the generation config, or pass a loss function."
                )
            losses[some] = found
        else:
            answers = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            pairs = zip(some, answers, strict=True)
            losses[some] = [_within(float(loss(texts[k], text))) for k, text in pairs]
    progress(len(order), len(order))
    return losses


def _generate(engine: TIDE, ids: Tensor, mask: Tensor, new_tokens: int) -> Tensor:
    """Greedy answers, in which tokens may exit: without exits, nothing would be tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FullDepthWarning)
        try:
            return engine.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
            )
        except FullDepthWarning as warning:
            raise ConfigError(
                f"With this model's generation config no token exits, so there is nothing to "
                f"certify. {warning} Else remove it from the generation config."
            ) from warning


def _within(loss: float) -> float:
    """A loss, if a test can take it."""
    if not 0 <= loss <= 1:
        raise ConfigError(f"loss gave {loss!r}; it must be between 0 and 1. Clip or rescale it.")
    return loss


def own_processors(model: Any, new_tokens: int) -> list[str]:
    """The logits processors of the model's own generation config, which certification runs with."""
    found: list[str] = []

    def loop(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        found.extend(describe_processors(logits_processor))
        return input_ids

    ids = torch.ones(1, 1, dtype=torch.long, device=model.device)
    options = {"attention_mask": ids, "max_new_tokens": new_tokens, "do_sample": False}
    model.generate(ids, **options, custom_generate=loop)
    return found


def _check(
    model: Any, risks: Sequence[float], delta: float, threshold_scales: Sequence[float],
    config: TIDEConfig,
) -> None:  # fmt: skip
    if config.prefill_exit:
        raise ConfigError("prefill_exit is not certified: prompts must go to full depth.")
    for risk in risks:
        require_shares(risk=risk, delta=delta)
    if torch.is_autocast_enabled(model.device.type):
        raise ConfigError(
            "Autocast is on, and a certificate is for the dtype of the weights. Call this outside "
            "of autocast, with the model loaded in the dtype wanted."
        )
    if list(threshold_scales) != sorted(threshold_scales) or not threshold_scales:
        raise ConfigError(
            f"threshold_scales is {list(threshold_scales)}; it must ascend, safest first."
        )
