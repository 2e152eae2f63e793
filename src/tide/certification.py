"""Certification `certify`: thresholds whose risk holds with a stated confidence, on unused prompts.

Learn-then-test: settings on one path, from the safest to the most aggressive, each run as it will
be deployed; the last one shown to keep the risk is certified. The path was learned in calibration,
on other documents, so the order of the tests is fixed in advance.

Every setting is a separate run. One run shared by all would be exact only up to the first wrong
token: after it, the outputs of different settings diverge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from tide.calibration.answers import answer, pad_left
from tide.calibration.bounds import betting, fewest_sequences, learn_then_test
from tide.calibration.data import encode_prompts
from tide.calibration.fresh import sample
from tide.config import TIDEConfig
from tide.decode.pass_costs import PassCosts
from tide.engine import TIDE
from tide.errors import ConfigError
from tide.exits.artifact import Artifact
from tide.exits.certificate import TASK_LOSS, TOKEN_LOSS, Certificate
from tide.models.fingerprint import dtype_name
from tide.progress import bars
from tide.risk import describe_processors

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
        prompts: a file, a data set or texts; those that calibration has used are skipped, and of
            each document one is taken.
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
    """
    made = artifact if isinstance(artifact, Artifact) else Artifact.from_pretrained(artifact)
    risks = sorted({risk} if isinstance(risk, (int, float)) else set(risk))
    config = config or TIDEConfig(min_layers=made.config.min_layers)
    config = config.with_(mode="exit", exit_threshold=None, audit_tail=True)
    _check(risks, delta, threshold_scales, config)
    texts = sample(prompts, made, samples)
    encoded = encode_prompts(tokenizer, texts, max_prompt)
    workload = Workload(texts=texts, encoded=encoded, new_tokens=new_tokens, batch=batch)
    with bars(quiet) as bar:
        if model.dtype != torch.float32 and not force and loss is None:
            floor = noise_floor(model, tokenizer, encoded[: 2 * batch], new_tokens)
            _refuse_noise(floor, risks, dtype_name(model))
        runs: list[np.ndarray] = []
        costs = PassCosts()  # the same for every setting, so measured once

        def settings() -> Iterator[np.ndarray]:
            """The losses of each setting on the path; a setting runs when first needed."""
            for k, scale in enumerate(threshold_scales):
                if k == len(runs):
                    engine = TIDE(
                        model, made, config, threshold_scale=scale, audit_rate=1.0, check=False
                    )
                    engine.drafter.costs = costs
                    tick = bar(f"Threshold scale {scale:g}")
                    runs.append(
                        measure_losses(engine, tokenizer, workload, loss=loss, progress=tick)
                    )
                yield runs[k]

        held = {
            r: learn_then_test(settings(), r, delta)
            for r in risks
            if len(texts) >= fewest_sequences(r, delta)  # of fewer, no test shows it
        }
    exits, dtype = made.exits, dtype_name(model)  # a digest of every tensor, so once
    counted = TOKEN_LOSS if loss is None else TASK_LOSS
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
    # A new test replaces an old one: a bound that was not shown again no longer holds.
    conditions = counted, exits, config.min_layers, dtype, config.kv_cache_strategy
    tested = {(r, delta, *conditions) for r in risks}
    made.certificates = [c for c in made.certificates if _tested(c) not in tested] + certificates
    if not isinstance(artifact, Artifact):
        made.save(artifact)
    return certificates


def _tested(of: Certificate) -> tuple[Any, ...]:
    """The claim that a certificate makes, and its conditions."""
    return of.risk, of.delta, of.loss, of.exits, of.min_layers, of.dtype, of.kv_cache_strategy


def measure_losses(
    engine: TIDE,
    tokenizer: Any,
    workload: Workload,
    *,
    loss: TaskLoss | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """The loss of every sequence, decoded as it will be deployed, `[n]`.

    Args:
        loss: from a prompt and an answer; by default the share of tokens that differ from full
            depth.
        progress: called with the sequences done and their total.
    """
    losses: list[float] = []
    for start in range(0, len(workload.texts), workload.batch):
        progress(start, len(workload.texts))
        some = slice(start, start + workload.batch)
        ids, mask = pad_left(tokenizer, workload.encoded[some], engine.model.device)
        out = engine.generate(
            ids, attention_mask=mask, max_new_tokens=workload.new_tokens, do_sample=False
        )
        if loss is None:
            found = engine.last_stats.losses
            if None in found:
                raise ConfigError(
                    "This model's generation config changes its logits (a penalty, bad_words_ids), "
                    "so the target token of a position is not the most likely one, and "
                    f"kv_cache_strategy={engine.config.kv_cache_strategy!r} cannot be checked. Use "
                    "'deferred', clear the generation config, or pass a loss function."
                )
            losses += [float(x) for x in found if x is not None]
        else:
            answers = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            pairs = zip(workload.texts[some], answers, strict=True)
            losses += [_within(float(loss(prompt, text))) for prompt, text in pairs]
    progress(len(workload.texts), len(workload.texts))
    return np.asarray(losses)


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


@torch.no_grad()
def noise_floor(
    model: Any, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> float:
    """How often full depth differs from itself when a text is read in one pass, not by token."""
    own = model.generation_config
    # Without the processors of its own generation config, which are no noise.
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
    try:
        answers = answer(model, tokenizer, encoded, new_tokens, do_sample=False)
    finally:
        model.generation_config = own
    differs = total = 0
    for prompt, ids in zip(encoded, answers, strict=True):
        if ids:
            text = torch.tensor([[*prompt, *ids]], device=model.device)
            # Logits over the whole text would take gigabytes at long contexts.
            logits = model(text, logits_to_keep=len(ids) + 1).logits[0, :-1]  # [new, vocabulary]
            again = logits.argmax(-1).tolist()
            differs += sum(a != b for a, b in zip(again, ids, strict=True))
            total += len(ids)
    return differs / max(total, 1)


def _refuse_noise(floor: float, risks: Sequence[float], dtype: str) -> None:
    below = [risk for risk in risks if risk < floor]
    if below:
        raise ConfigError(
            f"In {dtype} this model's full depth differs from itself in {floor:.2%} of tokens when "
            f"a text is read in one pass and not token by token; a risk of {below[0]:.2%} is below "
            "that noise. Choose a higher risk, use float32, or pass force=True."
        )


def _check(
    risks: Sequence[float], delta: float, threshold_scales: Sequence[float], config: TIDEConfig
) -> None:
    if config.prefill_exit:
        raise ConfigError("prefill_exit is not certified: prompts must go to full depth.")
    for risk in risks:
        if not 0 < risk < 1:
            raise ConfigError(f"risk is {risk!r}; it must be between 0 and 1.")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta!r}; it must be between 0 and 1.")
    if list(threshold_scales) != sorted(threshold_scales) or not threshold_scales:
        raise ConfigError(
            f"threshold_scales is {list(threshold_scales)}; it must ascend, safest first."
        )
