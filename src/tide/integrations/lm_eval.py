"""TIDE as a model of lm-evaluation-harness, `--model tide`; importing this file registers it.

`engine.generate` writes the texts. Scores are the model's own, or in mode "exit" those of
`engine(ids)`. Tasks, prompts, batches and metrics are the harness's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.errors import ConfigError, MissingPackageError
from tide.exits.artifact import Artifact
from tide.models.fingerprint import dtype_name
from tide.risk import DELTA, CertificateQuery, find_certificate

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise MissingPackageError(
        f"Evaluation needs lm-evaluation-harness ({error}). Install it: "
        "`pip install 'tide-llm[eval]'`."
    ) from error

_GENERATED = ("total_tokens", "exited_tokens", "layers_run", "layers_full", "audited", "differed")


@register_model("tide")
class TIDELM(HFLM):
    """The harness's Hugging Face model, decoded and scored with per-token depth.

    Args:
        pretrained: a hub id, a folder or a model, as for `--model hf`.
        artifact: a folder or hub id; without one, lossless decoding with drafts from the context.
        mode: "off", "lossless" or "exit"; by default "exit" with a risk, else "lossless".
        risk: a certified risk, for the texts of `generate_until`. Scores use the same thresholds,
            but no certificate covers them.
        exit_threshold: in mode "exit", for the last stage of the gate; by default as calibrated.
        kv_cache_strategy: in mode "exit", for generation, by default "deferred". Scores always use
            "propagate": there is one pass.
        **options: everything that `--model hf` takes.

    Attributes:
        engine: the `tide.TIDE` that does the work.
    """

    _decoder: Any = None  # replaces the model while a text is generated

    def __init__(
        self,
        pretrained: Any,
        *,
        artifact: str | None = None,
        mode: str | None = None,
        risk: float | None = None,
        exit_threshold: float | None = None,
        kv_cache_strategy: str | None = None,
        **options: Any,
    ) -> None:
        only_exit = {
            "risk": risk,
            "exit_threshold": exit_threshold,
            "kv_cache_strategy": kv_cache_strategy,
        }
        mode = mode or ("lossless" if risk is None else "exit")
        _check(mode, artifact, only_exit, options.get("mixed_precision_dtype"))
        config = TIDEConfig(
            mode=mode,
            exit_threshold=exit_threshold,
            kv_cache_strategy=kv_cache_strategy or "deferred",
            # Every confident token exits: else a score would depend on the rest of the batch.
            compaction_threshold=0.0,
            audit_tail=True,
        )
        super().__init__(pretrained, **options)
        made = None if artifact is None else Artifact.from_pretrained(artifact)
        if made is not None:
            depth = made.config.min_layers
            if risk is not None:
                kv, dtype = config.kv_cache_strategy, dtype_name(self.model)
                depth = find_certificate(made, CertificateQuery(risk, DELTA, dtype, kv)).min_layers
            config = config.with_(min_layers=depth)
        self.engine = TIDE(self.model, made, config, risk=risk)
        self._settings = {
            "mode": mode,
            **only_exit,
            "exits": None if made is None else made.exits,  # digest of the artifact
        }
        self._generated: Counter[str] = Counter()
        self._scored: Counter[str] = Counter()
        self._depths: Iterator[Sequence[int]] = iter(())  # of the batch scored last

    @property
    def model(self) -> Any:
        """The model; while a text is generated, the object that generates it."""
        return super().model if self._decoder is None else self._decoder

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        def generate(stopping_criteria: Any, **prepared: Any) -> Tensor:
            stops = StoppingCriteriaList()
            if stop:
                stops.append(_Stops(stop, self.tokenizer, context.shape[1]))
            return self.engine.generate(stopping_criteria=stops, **prepared)

        self._decoder = SimpleNamespace(generate=generate)
        try:
            out: Tensor = super()._model_generate(context, max_length, stop, **options)
        finally:
            self._decoder = None
        for what in _GENERATED:
            self._generated[what] += getattr(self.engine.last_stats, what)
        return out

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.engine.config.mode != "exit":
            return super()._model_call(inps, *args, **kwargs)
        warnings.warn(
            "Scores in mode exit are covered by no certificate: prompt tokens exit too, and their "
            "KV comes from the state in which they exit. A risk applies to generate_until only.",
            stacklevel=2,
        )
        # Padding is on the right, where no token attends to it, so it needs no mask.
        logits = self.engine(inps)
        self._depths = iter(self.engine.last_stats.depths)
        return logits

    def _select_cont_toks(
        self, logits: Tensor, contlen: int | None = None, inplen: int | None = None
    ) -> Tensor:
        # The harness calls this for each sequence in turn, the first time its length is known.
        for depth in next(self._depths, ())[:inplen]:
            self._scored["total_tokens"] += 1
            self._scored["exited_tokens"] += depth < self.engine.runner.n_layers
            self._scored["token_layers_run"] += depth
        return super()._select_cont_toks(logits, contlen=contlen, inplen=inplen)

    def get_model_info(self) -> dict[str, Any]:
        """The part of the results about the model: settings, and the layers that really ran."""
        certificate, layers = self.engine.certificate, self.engine.runner.n_layers
        generated: dict[str, float] = {**self._generated}
        scored: dict[str, float] = {**self._scored}
        if generated:
            generated["exit_rate"] = generated["exited_tokens"] / generated["total_tokens"]
            generated["layers_saved"] = 1 - generated["layers_run"] / generated["layers_full"]
        if scored:
            full = layers * scored["total_tokens"]
            scored["exit_rate"] = scored["exited_tokens"] / scored["total_tokens"]
            scored["layers_saved"] = 1 - scored["token_layers_run"] / full
        found = {
            **self._settings,
            "certificate": None if certificate is None else certificate.to_dict(),
            "layers": layers,
            "generated": generated,  # layers_run counts calls of a layer
            "scored": scored,  # token_layers_run counts tokens times layers
        }
        return {**super().get_model_info(), "tide": found}


def _check(mode: str, artifact: Any, only_exit: dict[str, Any], mixed_precision: Any) -> None:
    """Raise for options that contradict each other, before a model is loaded."""
    given = {name: value for name, value in only_exit.items() if value is not None}
    if mode != "exit":
        if given:
            raise ConfigError(
                f"{', '.join(given)} is for mode=exit, and mode is {mode}. Set mode=exit, or "
                f"remove {', '.join(given)}."
            )
        return
    if artifact is None:
        raise ConfigError(
            "mode=exit needs artifact=DIR, made by `tide calibrate MODEL -o DIR`. Without one, use "
            "mode=lossless or mode=off."
        )
    if {"risk", "exit_threshold"} <= given.keys():
        raise ConfigError(
            f"risk={given['risk']} sets the certified thresholds, so it excludes exit_threshold="
            f"{given['exit_threshold']}. Remove one of them."
        )
    if mixed_precision is not None:
        raise ConfigError(
            "mode=exit runs the weights in their own dtype, not in mixed_precision_dtype="
            f"{mixed_precision}. Give dtype=... instead."
        )


class _Stops(StoppingCriteria):
    """Ends a sequence once its last new tokens contain one of some texts.

    The harness's own class remembers from call to call which sequences have ended, and assumes that
    all are equally long; those of the engine are not.
    """

    tide_stateless = True

    def __init__(self, texts: Sequence[str], tokenizer: Any, start: int) -> None:
        self.texts, self.tokenizer, self.start = texts, tokenizer, start
        # Two tokens more, as in the harness: a text can be tokenised in more than one way.
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        self.width = 2 + max(map(len, encoded))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        tails = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.width :])
        ended = [any(text in tail for text in self.texts) for tail in tails]
        return torch.tensor(ended, device=input_ids.device)
