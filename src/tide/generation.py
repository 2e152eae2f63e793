"""Gives what of `generate` decoding by depth takes: options refused by name, stop strings bound."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import (
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from tide.errors import UnsupportedGenerationError

# Options of `generate` that decoding by depth does not take, and why.
_REFUSED = {
    "assistant_model": "TIDE guesses and checks by itself",
    "prompt_lookup_num_tokens": "TIDE guesses and checks by itself",
    "past_key_values": "TIDE keeps rows at different depths in a cache of its own",
    "cache_implementation": "TIDE keeps rows at different depths in a cache of its own",
    "custom_generate": "it is itself a custom_generate",
    "position_ids": "a token's position is its place in its row",
    "token_healing": "it would generate a second time",
    "synced_gpus": "rows leave the batch when they end",
}
_PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def refuse_options(kwargs: Mapping[str, Any]) -> None:
    """Raise if `generate` was given an option that decoding by depth does not take."""
    for name, why in _REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise UnsupportedGenerationError(
                f"Decoding by depth does not take {name}: {why}. Leave it out, or call "
                "model.generate without TIDE."
            )


def generate_call() -> dict[str, Any]:
    """The arguments of the `model.generate` call that we are inside of; empty if of none.

    `generate` hands its loop neither the streamer nor the assistant model, and does not tell a hub
    repository's function which repository it is. They stay where they are, its own parameters, and
    are read there: the alternative is a stream that never ends.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return {}
    names, _, rest, values = inspect.getargvalues(frame)
    return {**(values[rest] if rest else {}), **{name: values[name] for name in names}}


def bind_stop_strings(kwargs: Mapping[str, Any], default: GenerationConfig) -> dict[str, Any]:
    """Turn `stop_strings` and `tokenizer` into a criterion, as `generate` itself would."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    config = kwargs.get("generation_config") or default
    strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if strings is None:
        return kwargs
    if tokenizer is None:
        raise UnsupportedGenerationError("stop_strings needs tokenizer=... beside it.")
    if getattr(config, "stop_strings", None) is not None:
        kwargs["generation_config"] = GenerationConfig.from_dict(
            {**config.to_dict(), "stop_strings": None}
        )
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return {**kwargs, "stopping_criteria": criteria}


def refuse_modes(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise if what `generate` has prepared is a mode that is not decoded by depth."""
    mode = config.get_generation_mode()
    if mode not in _PLAIN_MODES:
        raise UnsupportedGenerationError(
            f"{mode.value} is not decoded by depth; TIDE does greedy search and sampling. "
            "Set num_beams=1 and leave out the other options, or call model.generate."
        )
    for name in ("output_attentions", "output_hidden_states", "output_scores", "output_logits"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise UnsupportedGenerationError(
                f"{name}=True is not available when layers are skipped. Leave it out, or call "
                "model.generate."
            )
    if getattr(config, "guidance_scale", None) not in (None, 1.0):
        raise UnsupportedGenerationError(
            "guidance_scale runs the model a second time for every token. Leave it out."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError("TIDE needs token ids; got inputs_embeds.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UnsupportedGenerationError(
            "TIDE cannot continue from a cache that another loop has filled. Pass the whole prompt."
        )
