"""What of `generate` decoding by depth takes: options refused by name, stop strings bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerationMode

from tide.errors import UnsupportedGenerationError
from tide.models.locate import text_config
from tide.models.refuse import DYNAMIC_CACHES

# Options of `generate` that decoding by depth does not take, and why.
_REFUSED = {
    "assistant_model": "TIDE drafts and verifies by itself",
    "prompt_lookup_num_tokens": "TIDE drafts and verifies by itself",
    "past_key_values": "TIDE keeps sequences at different depths in a cache of its own",
    "cache_implementation": "TIDE keeps sequences at different depths in a cache of its own",
    "custom_generate": "it is itself a custom_generate",
    "position_ids": "a token's position is its place in its sequence",
    "token_healing": "it would generate a second time",
    "synced_gpus": "sequences are dropped from the batch when they end",
}
# What `generate` hands to any loop; the first three are checked by themselves.
_PREPARED = (
    "attention_mask", "past_key_values", "position_ids", "generation_config", "logits_processor",
    "stopping_criteria",
)  # fmt: skip
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def refuse_options(kwargs: Mapping[str, Any]) -> None:
    """Raise if `generate` was given an option that decoding by depth does not take."""
    for name, why in _REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise UnsupportedGenerationError(
                f"Decoding by depth does not take {name}: {why}. Omit it, or call "
                "model.generate without TIDE."
            )


def bind_stop_strings(kwargs: Mapping[str, Any], default: GenerationConfig) -> dict[str, Any]:
    """Turn `stop_strings` and `tokenizer` into a criterion, as `generate` itself would."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    # `generate` fills what a config does not set from the model's own.
    configs = kwargs.get("generation_config"), default
    given = [getattr(config, "stop_strings", None) for config in configs]
    if "stop_strings" in kwargs:  # also None, which switches off those of a config
        given = [kwargs["stop_strings"]]
    strings = next((some for some in given if some), None)
    if strings is None:
        return kwargs
    if tokenizer is None:
        raise UnsupportedGenerationError("stop_strings needs tokenizer=... beside it.")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return {**kwargs, "stopping_criteria": criteria, "stop_strings": None}


def refuse_length(length: int, limit: int | None) -> None:
    """Raise if the output may be longer than rotary positions keep their meaning."""
    if limit is not None and length > limit:
        raise UnsupportedGenerationError(
            f"max_length is {length}, but this model's rotary positions change meaning "
            f"beyond {limit} tokens (rope type longrope or dynamic), which KV computed before does "
            "not follow. Generate fewer tokens, or use model.generate."
        )


def refuse_modes(model: Any, config: GenerationConfig, prepared: Mapping[str, Any]) -> None:
    """Raise if what `generate` has prepared is a mode, or an input, not decoded by depth."""
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise UnsupportedGenerationError(
            f"{mode.value} is not decoded by depth; TIDE does greedy search and sampling. "
            "Set num_beams=1 and omit the other options, or call model.generate."
        )
    for name in ("output_attentions", "output_hidden_states", "output_scores", "output_logits"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise UnsupportedGenerationError(
                f"{name}=True is not available when layers are skipped. Omit it, or call "
                "model.generate."
            )
    if (cache := config.cache_implementation) not in DYNAMIC_CACHES:
        raise UnsupportedGenerationError(
            f"Decoding by depth does not take cache_implementation={cache!r}: "
            f"{_REFUSED['cache_implementation']}. Omit it from the generation config, or call "
            "model.generate without TIDE."
        )
    if getattr(config, "guidance_scale", None) not in (None, 1.0):
        raise UnsupportedGenerationError(
            "guidance_scale runs the model a second time for every token. Omit it."
        )
    _refuse_inputs(model, prepared)
    filled = prepared.get("past_key_values")
    given = getattr(filled, "_is_user_defined", False)  # and not made by `generate`
    if filled is not None and (given or filled.get_seq_length() > 0):
        raise UnsupportedGenerationError(
            "TIDE neither fills past_key_values nor continues from those that another loop has "
            f"filled: {_REFUSED['past_key_values']}. Omit them and pass the whole prompt."
        )
    _refuse_positions(prepared.get("position_ids"), prepared.get("attention_mask"))


def _refuse_inputs(model: Any, prepared: Mapping[str, Any]) -> None:
    """Raise for an input of the model beside its token ids: the loop would not hand it on."""
    for name, value in prepared.items():
        if name in _PREPARED or value is None or isinstance(value, (bool, int, float, str)):
            continue
        if isinstance(value, Mapping):  # images that `generate` has encoded, if there were any
            name = " and ".join(value)
            if not value:
                continue
        # A language model that is part of a larger one has type 0 for text. Others embed types, and
        # add something for 0 too.
        typed = name in ("token_type_ids", "mm_token_type_ids")
        if typed and text_config(model) is not model.config and not value.any():
            continue
        raise UnsupportedGenerationError(
            f"Decoding by depth takes token ids with an attention_mask, and no {name}. Omit it, or "
            "call model.generate without TIDE."
        )


def _refuse_positions(positions: Tensor | None, mask: Tensor | None) -> None:
    """Raise if positions, which `generate` fills in where none were given, are not the usual."""
    if positions is None:
        return
    valid = torch.ones_like(positions) if mask is None else mask.long()  # [sequences, tokens]
    if bool(((positions != valid.cumsum(-1) - 1) & valid.bool()).any()):
        raise UnsupportedGenerationError(
            f"Decoding by depth does not take position_ids: {_REFUSED['position_ids']}. Omit "
            "them, or call model.generate without TIDE."
        )
