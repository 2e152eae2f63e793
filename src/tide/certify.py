"""Gives `certify`: thresholds whose risk holds with a stated confidence, on unused prompts.

Learn-then-test: settings on one path, from the safest to the boldest, each run as it will be
deployed; the last one shown to keep the risk is certified. The path was learned in calibration, on
other documents, so the sequence of tests is fixed in advance.

Every setting is a run of its own. Reusing one run for all would be exact only up to the first wrong
token: after it, the texts of bolder and safer settings part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide.calibration.bounds import betting, hoeffding_bentkus, learn_then_test
from tide.calibration.collect import answer, pad_left
from tide.calibration.data import encode_prompts, load_texts, text_key
from tide.calibration.progress import bars
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ConfigError, DataError
from tide.exits.artifact import Artifact
from tide.exits.certificate import Certificate
from tide.models.fingerprint import dtype_name

TESTS = {"betting": betting, "hoeffding-bentkus": hoeffding_bentkus}
# The path: times the chance of being wrong that calibration would take. Safest first.
BOLDNESS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)

# From a prompt and an answer to a loss between 0 and 1.
TaskLoss = Callable[[str, str], float]


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
    boldness: Sequence[float] = BOLDNESS,
    test: str = "betting",
    loss: TaskLoss | None = None,
    force: bool = False,
    version: str = "",
    quiet: bool = False,
) -> list[Certificate]:
    """Certify an artifact's exits for some risks, and keep the certificates in it.

    Args:
        model: as it will be deployed: its dtype is part of the certificate.
        tokenizer: its tokenizer.
        artifact: from `calibrate`; a path is written back with the certificates in it.
        prompts: a file, a data set or texts; those that calibration has used are left out.
        risk: share of tokens that may differ from full depth; one or several.
        delta: chance that a certificate may be wrong, each.
        config: as it will be deployed: `kv_cache_strategy` and `min_layers` count. Drafts only
            change the size of passes, which in half precision flips near-ties and no more.
        samples: most prompts to take.
        new_tokens: longest answer.
        max_prompt: longest prompt.
        batch: rows decoded together.
        boldness: the path, safest first.
        test: "betting" or "hoeffding-bentkus".
        loss: count this instead, from a prompt and an answer to a loss between 0 and 1.
        force: certify risks below the noise of the model's own dtype.
        version: of the library, for the record.
        quiet: show no progress.

    Returns:
        A certificate for each risk that some setting was shown to keep; the others have none.
    """
    made = artifact if isinstance(artifact, Artifact) else Artifact.from_pretrained(artifact)
    risks = sorted({risk} if isinstance(risk, (int, float)) else set(risk))
    config = config or TIDEConfig(min_layers=made.config.min_layers)
    config = config.with_(mode="exit", exit_threshold=None, audit_tail=True)
    _check(risks, delta, boldness, test, config)
    texts = unseen(load_texts(prompts), made)[:samples]
    encoded = encode_prompts(tokenizer, texts, max_prompt)
    with bars(quiet) as bar:
        if model.dtype != torch.float32 and not force and loss is None:
            _refuse_noise(model, tokenizer, encoded[: 2 * batch], new_tokens, risks)
        runs: list[np.ndarray] = []

        def settings() -> Iterator[np.ndarray]:
            """The losses of each setting on the path, run when it is first asked for."""
            for k, step in enumerate(boldness):
                if k == len(runs):
                    engine = TIDE(model, made, config, boldness=step, audit_rate=1.0, check=False)
                    tick = bar(f"Boldness {step:g}")
                    runs.append(
                        run(engine, tokenizer, texts, encoded, new_tokens, batch, loss, tick)
                    )
                yield runs[k]

        held = {r: learn_then_test(settings(), r, delta, TESTS[test]) for r in risks}
    data = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    certificates = [
        Certificate(
            risk=wanted,
            delta=delta,
            boldness=boldness[last],
            thresholds=made.thresholds(boldness[last], config.min_layers),
            sequences=len(texts),
            estimate=float(runs[last].mean()),
            p_value=TESTS[test](runs[last], wanted),
            test=test,
            loss="tokens that differ from full depth" if loss is None else "task loss",
            model=made.fingerprint.to_dict(),
            exits=made.exits,
            min_layers=config.min_layers,
            dtype=dtype_name(model),
            kv_cache_strategy=config.kv_cache_strategy,
            batch=batch,
            generation={"do_sample": False, "max_new_tokens": new_tokens},
            data=data,
            tide=version,
        )
        for wanted, last in held.items()
        if last is not None
    ]
    # What was tested anew counts anew: a promise that was not shown again no longer holds.
    tested = {
        (r, delta, made.exits, config.min_layers, dtype_name(model), config.kv_cache_strategy)
        for r in risks
    }
    made.certificates = [c for c in made.certificates if _promise(c) not in tested] + certificates
    if not isinstance(artifact, Artifact):
        made.save(artifact)
    return certificates


def _promise(of: Certificate) -> tuple[Any, ...]:
    return of.risk, of.delta, of.exits, of.min_layers, of.dtype, of.kv_cache_strategy


def unseen(texts: Sequence[str], made: Artifact) -> list[str]:
    """The texts that calibration has not used; a promise on others would be worth nothing."""
    used = set(made.record.get("used", ()))
    found = [text for text in texts if text_key(text) not in used]
    if not found:
        raise DataError(
            f"All {len(texts)} prompts were used in calibration. Give others; of the calibration's "
            "own data a part is always kept for this."
        )
    return found


def run(
    engine: TIDE,
    tokenizer: Any,
    texts: Sequence[str],
    encoded: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int,
    loss: TaskLoss | None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """The loss of every sequence, decoded as it will be deployed, `[n]`."""
    losses: list[float] = []
    for start in range(0, len(texts), batch):
        tick(start, len(texts))
        ids, mask = pad_left(tokenizer, encoded[start : start + batch], engine.model.device)
        out = engine.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        if loss is None:
            found = engine.last_stats.losses
            if None in found:
                raise ConfigError(
                    "This model's generation config changes its logits (a penalty, a bad-words "
                    "list), so that full depth's word on a text is not its likeliest token, and "
                    f"kv_cache_strategy={engine.config.kv_cache_strategy!r} cannot be checked. Use "
                    "'deferred', clear the generation config, or give a loss of your own."
                )
            losses += [float(x) for x in found if x is not None]
        else:
            said = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
            some = texts[start : start + batch]
            losses += [float(loss(p, a)) for p, a in zip(some, said, strict=True)]
    tick(len(texts), len(texts))
    return np.asarray(losses)


@torch.no_grad()
def noise_floor(
    model: Any, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int
) -> float:
    """How often full depth differs from itself when a text is read at once, not token by token."""
    said = answer(model, tokenizer, encoded, new_tokens, do_sample=False)
    differs = total = 0
    for prompt, ids in zip(encoded, said, strict=True):
        if ids:
            text = torch.tensor([[*prompt, *ids]], device=model.device)
            again = model(text).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            differs += sum(a != b for a, b in zip(again, ids, strict=True))
            total += len(ids)
    return differs / max(total, 1)


def _refuse_noise(
    model: Any, tokenizer: Any, encoded: Sequence[Sequence[int]], new_tokens: int,
    risks: Sequence[float],
) -> None:  # fmt: skip
    floor = noise_floor(model, tokenizer, encoded, new_tokens)
    below = [risk for risk in risks if risk < floor]
    if below:
        raise ConfigError(
            f"In {dtype_name(model)} this model's full depth differs from itself in {floor:.2%} "
            "of tokens when a text is read at once and not token by token; a risk of "
            f"{below[0]:.2%} is below that noise. Ask for a higher risk, use float32, or pass "
            "force=True."
        )


def _check(
    risks: Sequence[float], delta: float, boldness: Sequence[float], test: str, config: TIDEConfig
) -> None:
    if config.prefill_exit:
        raise ConfigError("prefill_exit is not certified: prompts must go to full depth.")
    for risk in risks:
        if not 0 < risk < 1:
            raise ConfigError(f"risk is {risk!r}; it must be between 0 and 1.")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta!r}; it must be between 0 and 1.")
    if list(boldness) != sorted(boldness) or not boldness:
        raise ConfigError(f"boldness is {list(boldness)}; it must ascend, from the safest on.")
    if test not in TESTS:
        raise ConfigError(f"test is {test!r}; it must be one of {', '.join(TESTS)}.")
