"""Gives the collection: the model's own answers, and its states at the checkpoints along them.

One streaming pass in units of a few documents. Each unit is written to a file of its own when it is
done, so memory does not grow with the number of documents, an interrupted collection goes on where
it stopped, and processes share the units among them. What a unit holds depends only on its
documents and the seed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tide.calibration.data import Documents, encode_prompts, encode_texts
from tide.errors import DataError
from tide.exits.files import write_whole
from tide.models.depth import DepthRunner


@dataclass(frozen=True)
class CollectPlan:
    """What is collected; a folder holds the units of one plan only.

    Attributes:
        layers: checkpoints, as layers counted from 0.
        on_policy: let the model answer the prompts, and collect along its answers.
        new_tokens: longest answer.
        max_tokens: longest prompt, or text if not on-policy.
        temperature: of the half of the answers that are sampled; the other half is greedy.
        top_k: how many of the full model's likeliest tokens are kept per position.
        unit: documents per unit.
        seed: of the sampling.
        documents: fingerprint of the documents.
        model: fingerprint of the model's weights.
        dtype: in which the model answered.
        engine: who ran it to answer.
    """

    layers: tuple[int, ...]
    on_policy: bool
    new_tokens: int
    max_tokens: int
    temperature: float
    top_k: int
    unit: int
    seed: int
    documents: str
    model: str
    dtype: str
    engine: str = "transformers"


@dataclass
class Unit:
    """What one unit holds; positions of all its documents one after the other.

    Attributes:
        states: after each checkpoint, and after the last layer, `[layers + 1, positions, hidden]`.
        top_tokens: the full model's likeliest next tokens, `[positions, top_k]`.
        top_logprobs: their log-probabilities, `[positions, top_k]`.
        tokens: prompts and answers, one document after the other, `[tokens]`.
        ends: where each document ends in `tokens`, `[documents]`.
        prompts: length of each prompt, `[documents]`.
    """

    states: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    tokens: Tensor
    ends: Tensor
    prompts: Tensor

    def documents(self) -> list[tuple[list[int], int]]:
        """Each document's tokens and the length of its prompt.

        Its positions run from the last token of the prompt to the last but one of the answer.
        """
        tokens, ends = self.tokens.tolist(), self.ends.tolist()
        return [
            (tokens[begin:end], prompt)
            for begin, end, prompt in zip([0, *ends], ends, self.prompts.tolist(), strict=False)
        ]


Progress = Callable[[int, int], None]
# From prompts, the longest answer and a temperature, 0 for greedy, to answers, as token ids.
Answers = Callable[[Sequence[Sequence[int]], int, float], list[list[int]]]


class Collection:
    """The units of a plan in a folder.

    Args:
        folder: where they are kept.
        plan: what they hold; if the folder holds another plan's, that is an error.
    """

    def __init__(self, folder: Path, plan: CollectPlan) -> None:
        self.folder, self.plan = folder, plan
        folder.mkdir(parents=True, exist_ok=True)
        note, wanted = folder / "plan.json", json.loads(json.dumps(asdict(plan)))
        if not note.exists():
            write_whole(note, lambda path: path.write_text(json.dumps(wanted, indent=2)))
        elif json.loads(note.read_text()) != wanted:
            raise DataError(
                f"{folder} holds a collection made with other settings. Remove it to start anew, "
                "or name another folder."
            )

    def path(self, split: str, number: int) -> Path:
        """The file of a unit."""
        return self.folder / f"{split}-{number:05d}.safetensors"

    def _files(self, split: str) -> list[Path]:
        """The files of a split's units, in order."""
        return sorted(self.folder.glob(f"{split}-*.safetensors"))

    def units(self, split: str) -> Iterator[Unit]:
        """The units of a split, in order, one at a time."""
        for path in self._files(split):
            yield Unit(**load_file(path))

    def states(self, split: str, index: int) -> Iterator[Tensor]:
        """One layer's states of each unit of a split, `[positions, hidden]`; no more is read."""
        for path in self._files(split):
            with safe_open(path, framework="pt") as file:
                yield file.get_slice("states")[index]

    def answers_by_unit(self, split: str) -> Iterator[list[list[int]]]:
        """The answers of each unit of a split, in order, as token ids."""
        names = ("tokens", "ends", "prompts")
        for path in self._files(split):
            with safe_open(path, framework="pt") as file:  # the states stay on disk
                nothing = torch.empty(0)
                unit = Unit(nothing, nothing, nothing, *(file.get_tensor(name) for name in names))
            yield [tokens[prompt:] for tokens, prompt in unit.documents()]

    def answers(self, split: str) -> Iterator[list[int]]:
        """The answers of a split, in order, as token ids."""
        for answers in self.answers_by_unit(split):
            yield from answers

    def collect(
        self,
        runner: DepthRunner,
        tokenizer: Any,
        documents: Documents,
        *,
        splits: Sequence[str] = ("fit", "gate"),
        answers: Answers | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Write every unit of this process's share; the first process waits for the others.

        Args:
            answers: who answers the prompts; by default the model itself.
            progress: called with the units done and their total.
        """
        (rank, world), size = process(), self.plan.unit
        todo = [
            (split, number, texts[number * size : (number + 1) * size])
            for split in splits
            for texts in (getattr(documents, split),)
            for number in range(-(-len(texts) // size))
        ]
        for done, (split, number, texts) in enumerate(todo):
            progress(done, len(todo))
            path = self.path(split, number)
            if done % world == rank and not path.exists():
                tensors = self._unit(runner, tokenizer, texts, split, number, answers)
                write_whole(path, lambda p, t=tensors: save_file(t, p))  # type: ignore[misc]
        paths = [self.path(split, number) for split, number, _ in todo]
        while rank == 0 and (there := sum(path.exists() for path in paths)) < len(paths):
            progress(there, len(todo))
            time.sleep(0.2)
        progress(len(todo), len(todo))

    @torch.no_grad()
    def _unit(
        self,
        runner: DepthRunner,
        tokenizer: Any,
        texts: Sequence[str],
        split: str,
        number: int,
        ask: Answers | None,
    ) -> dict[str, Tensor]:
        plan = self.plan
        # Sampling depends on the unit alone, so a resumed collection is the same collection.
        torch.manual_seed(plan.seed + 1_000_003 * number + (split != "fit"))
        if plan.on_policy:
            prompts = encode_prompts(tokenizer, texts, plan.max_tokens)
            ask = ask or self_answering(runner.model, tokenizer)
            answers = ask(prompts, plan.new_tokens, plan.temperature if number % 2 else 0.0)
        else:
            # Every token of the text but the first is predicted from what stands before it.
            whole = encode_texts(tokenizer, texts, plan.max_tokens)
            prompts, answers = [ids[:1] for ids in whole], [ids[1:] for ids in whole]
        # A prompt to which nothing was said has no position.
        pairs = [pair for pair in zip(prompts, answers, strict=True) if pair[1]]
        if not pairs:
            raise DataError(f"The model said nothing to the prompts of {split} unit {number}.")
        parts = [self._along(runner, prompt, said) for prompt, said in pairs]
        joined = {
            name: torch.cat([part[name] for part in parts], dim=1 if name == "states" else 0)
            for name in parts[0]
        }
        lengths = torch.tensor([len(prompt) + len(said) for prompt, said in pairs])
        return {
            **joined,
            "tokens": torch.tensor([t for pair in pairs for t in (*pair[0], *pair[1])]).int(),
            "ends": lengths.cumsum(0),
            "prompts": torch.tensor([len(prompt) for prompt, _ in pairs]),
        }

    def _along(self, runner: DepthRunner, prompt: list[int], said: list[int]) -> dict[str, Tensor]:
        """States and the full model's word at each position from which `said` was predicted."""
        ids = torch.tensor([prompt + said], device=runner.input_device)
        first = len(prompt) - 1
        cuts = [layer + 1 for layer in self.plan.layers]
        states, hidden, cache = [], None, runner.new_cache(1)
        for lo, hi in zip([0, *cuts], [*cuts, runner.n_layers], strict=True):
            hidden = runner.run(ids, lo, hi, cache=cache, hidden=hidden)
            states.append(hidden[0, first:-1].cpu())
        assert hidden is not None
        logprobs = runner.logits(hidden[0, first:-1]).float().log_softmax(-1)
        top = logprobs.topk(min(self.plan.top_k, logprobs.shape[-1]), dim=-1)
        return {
            # bf16 has the range of fp32, which the few very large activations need.
            "states": torch.stack(states).bfloat16(),
            "top_tokens": top.indices.int().cpu(),
            "top_logprobs": top.values.half().cpu(),
        }


def pad_left(
    tokenizer: Any, prompts: Sequence[Sequence[int]], device: Any
) -> tuple[Tensor, Tensor]:
    """Ids and mask of a left-padded batch, `[rows, longest]` each."""
    pad, width = _pad(tokenizer), max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).to(ids)
    return ids, mask


def _pad(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def process() -> tuple[int, int]:
    """Which process this is and how many there are, as `torchrun` and `accelerate launch` say."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def self_answering(model: Any, tokenizer: Any) -> Answers:
    """Answers by `model.generate`."""

    def ask(
        prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
    ) -> list[list[int]]:
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        return answer(model, tokenizer, prompts, new_tokens, **options)

    return ask


def answer(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any
) -> list[list[int]]:
    """The model's answers to a batch of prompts, end-of-text token included."""
    ids, mask = pad_left(tokenizer, prompts, model.device)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=_pad(tokenizer), **options
    )
    width = ids.shape[1]
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    said = []
    for row in out[:, width:].tolist():
        stop = next((k + 1 for k, token in enumerate(row) if token in ends), len(row))
        said.append(row[:stop])
    return said
