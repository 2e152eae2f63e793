"""A unit of a collection: what a few texts gave, its file, and what must be true of it.

A file that was there before may be damaged, or a stranger's; it is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tide.errors import DataError
from tide.exits.files import reason
from tide.strangers import read_json, require_file, shown


@dataclass(frozen=True, kw_only=True)
class CollectPlan:
    """Settings of a collection; a folder holds the units of one plan only.

    Attributes:
        layers: checkpoints, as layers counted from 0.
        on_policy: let the model answer the prompts, and collect along its answers.
        new_tokens: longest answer.
        max_tokens: longest prompt, or text if not on-policy.
        temperature: of the half of the answers that are sampled; the other half is greedy.
        top_k: how many of the full model's most likely tokens are kept per position.
        unit: texts per unit.
        seed: of the sampling.
        documents: fingerprint of the documents.
        model: fingerprint of the model's weights.
        dtype: of the model that answered.
        engine: that ran the model to answer.
    """

    layers: tuple[int, ...]
    on_policy: bool
    new_tokens: int
    max_tokens: int
    temperature: float = 0.7
    top_k: int = 32
    unit: int = 32
    seed: int
    documents: str
    model: str
    dtype: str
    engine: str = "transformers"

    def temperature_of(self, number: int) -> float:
        """The temperature of a unit's answers; every other unit is greedy."""
        return self.temperature if self.on_policy and number % 2 else 0.0


@dataclass(kw_only=True)
class Unit:
    """The content of one unit; positions of all its texts one after the other.

    Attributes:
        states: after each checkpoint, and after the last layer, `[layers + 1, positions, hidden]`.
        top_tokens: the full model's most likely next tokens, `[positions, top_k]`.
        top_logprobs: their log-probabilities, `[positions, top_k]`.
        tokens: prompts and answers, one text after the other, `[tokens]`.
        ends: where each text ends in `tokens`, `[texts]`.
        prompts: length of each prompt, `[texts]`.
    """

    states: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    tokens: Tensor
    ends: Tensor
    prompts: Tensor

    def texts(self) -> list[tuple[list[int], int]]:
        """Each text's tokens and the length of its prompt.

        Its positions run from the last token of the prompt to the last but one of the answer; with
        an empty answer it has none.
        """
        return texts_of(self.tokens, self.ends, self.prompts)


def texts_of(tokens: Tensor, ends: Tensor, prompts: Tensor) -> list[tuple[list[int], int]]:
    """Each text's tokens and the length of its prompt; see `Unit.texts`."""
    ids, stops = tokens.tolist(), ends.tolist()
    return [
        (ids[begin:end], prompt)
        for begin, end, prompt in zip([0, *stops], stops, prompts.tolist(), strict=False)
    ]


_DTYPES = {
    "states": torch.bfloat16, "top_tokens": torch.int32, "top_logprobs": torch.float16,
    "tokens": torch.int32, "ends": torch.int64, "prompts": torch.int64,
}  # fmt: skip


def check_unit(path: Path, texts: int, plan: CollectPlan, config: Any) -> None:
    """Raise unless a file holds a unit of a plan; reads all but the states.

    Args:
        texts: that the unit has.
        config: the text config of the model.
    """
    try:
        require_file(path)
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if names != sorted(_DTYPES):
                raise ValueError(f"it has the tensors {shown(names)}")
            found = {name: file.get_tensor(name) for name in names if name != "states"}
            states = file.get_slice("states")
            shape, dtype = states.get_shape(), states.get_dtype()
        if dtype != "BF16" or any(t.dtype != _DTYPES[name] for name, t in found.items()):
            raise ValueError("its tensors have other types")
        _check_content(found, shape, texts, plan, config)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise DataError(
            f"{path} is not what this calibration wrote ({reason(error)}). Remove it, and run "
            "again: it is then collected anew."
        ) from error


def _check_content(
    found: dict[str, Tensor], shape: list[int], texts: int, plan: CollectPlan, config: Any
) -> None:
    ends, prompts, tokens = found["ends"], found["prompts"], found["tokens"]
    if not ends.ndim == prompts.ndim == tokens.ndim == 1 or len(ends) != len(prompts):
        raise ValueError("its texts are not lists")
    if len(prompts) != texts:
        raise ValueError(f"it has {len(prompts)} texts, not {texts}")
    lengths = ends.diff(prepend=ends.new_zeros(1))
    inside = (prompts >= 0) & (prompts <= lengths) & (lengths <= len(tokens))
    if not inside.all() or int(ends[-1]) != len(tokens):
        raise ValueError("its texts do not end where it has their ends")
    positions = int((lengths - prompts).sum())
    if shape != [len(plan.layers) + 1, positions, config.hidden_size]:
        raise ValueError(f"its states have the shape {shape}")
    tops, logprobs = found["top_tokens"], found["top_logprobs"]
    most = min(plan.top_k, config.vocab_size)
    if not tops.shape == logprobs.shape == (positions, most):
        raise ValueError(f"its target tokens are not {most} for each of {positions} positions")
    for ids in (tokens, tops):
        if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            raise ValueError(f"it has token ids outside of 0 to {config.vocab_size - 1}")
    if not (logprobs <= 0).all():
        raise ValueError("it has a log-probability above 0")


def read_note(path: Path) -> Any:
    """The JSON value of a file in a work folder."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not what calibration wrote ({reason(error)}). Remove it, or the folder, "
            "and run again."
        ) from error
