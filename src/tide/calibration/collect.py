"""Gives the collection: the model's own answers, and its states at the checkpoints along them.

One streaming pass in units of a few documents. Each unit is written to a file of its own when it is
done, so memory does not grow with the number of documents, an interrupted collection goes on where
it stopped, and processes share the units among them. What a unit holds depends only on its
documents and the seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tide.calibration.data import Documents, encode_prompts, encode_texts
from tide.errors import DataError
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


@dataclass
class Unit:
    """What one unit holds; positions of all its documents one after the other.

    Attributes:
        states: after each checkpoint, and after the last layer, `[layers + 1, positions, hidden]`.
        top_tokens: the full model's likeliest next tokens, `[positions, top_k]`.
        top_logprobs: their log-probabilities, `[positions, top_k]`.
        context: the token at each position, and the two before it, `[positions, 3]`.
        document: number of the document, `[positions]`.
    """

    states: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    context: Tensor
    document: Tensor


Progress = Callable[[int, int], None]


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
            _write_whole(note, lambda path: path.write_text(json.dumps(wanted, indent=2)))
        elif json.loads(note.read_text()) != wanted:
            raise DataError(
                f"{folder} holds a collection made with other settings. Remove it to start anew, "
                "or name another folder."
            )

    def path(self, split: str, number: int) -> Path:
        """The file of a unit."""
        return self.folder / f"{split}-{number:05d}.safetensors"

    def units(self, split: str) -> Iterator[Unit]:
        """The units of a split, in order, one at a time."""
        for path in sorted(self.folder.glob(f"{split}-*.safetensors")):
            tensors = load_file(path)
            yield Unit(**{name: tensors[name] for name in Unit.__dataclass_fields__})

    def answers(self, split: str) -> Iterator[list[int]]:
        """The answers of a split, in order, as token ids."""
        for path in sorted(self.folder.glob(f"{split}-*.safetensors")):
            tensors = load_file(path)
            ends = tensors["answer_ends"].tolist()
            tokens = tensors["answers"].tolist()
            yield from (tokens[a:b] for a, b in zip([0, *ends], ends, strict=False))

    def collect(
        self,
        runner: DepthRunner,
        tokenizer: Any,
        documents: Documents,
        *,
        splits: Sequence[str] = ("fit", "gate"),
        rank: int | None = None,
        world: int | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Write every unit that is not there yet.

        Args:
            rank, world: which share of the units is this process's; by default what `torchrun` and
                `accelerate launch` say.
            progress: called with the units done and their total.
        """
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        world = int(os.environ.get("WORLD_SIZE", 1)) if world is None else world
        size = self.plan.unit
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
                tensors = self._unit(runner, tokenizer, texts, split, number)
                _write_whole(path, lambda p, t=tensors: save_file(t, p))  # type: ignore[misc]
        progress(len(todo), len(todo))

    @torch.no_grad()
    def _unit(
        self, runner: DepthRunner, tokenizer: Any, texts: Sequence[str], split: str, number: int
    ) -> dict[str, Tensor]:
        plan = self.plan
        # Sampling depends on the unit alone, so a resumed collection is the same collection.
        torch.manual_seed(plan.seed + 1_000_003 * number + (split != "fit"))
        if plan.on_policy:
            prompts = encode_prompts(tokenizer, texts, plan.max_tokens)
            options: dict[str, Any] = {"do_sample": False}
            if number % 2:
                options = {"do_sample": True, "temperature": plan.temperature, "top_k": 0}
            answers = answer(runner.model, tokenizer, prompts, plan.new_tokens, **options)
        else:
            # Every token of the text but the first is predicted from what stands before it.
            prompts = [ids[:1] for ids in encode_texts(tokenizer, texts, plan.max_tokens)]
            answers = [ids[1:] for ids in encode_texts(tokenizer, texts, plan.max_tokens)]
        parts: dict[str, list[Tensor]] = {}
        for k, (prompt, said) in enumerate(zip(prompts, answers, strict=True)):
            if not said:
                continue
            for name, tensor in self._along(runner, prompt, said).items():
                parts.setdefault(name, []).append(tensor)
            here = torch.full((len(said),), number * plan.unit + k, dtype=torch.int32)
            parts.setdefault("document", []).append(here)
        if not parts:
            raise DataError(f"The model said nothing to the prompts of {split} unit {number}.")
        joined = {
            name: torch.cat(tensors, dim=1 if name == "states" else 0)
            for name, tensors in parts.items()
        }
        ends = torch.tensor([len(said) for said in answers]).cumsum(0)
        flat = torch.tensor([t for said in answers for t in said], dtype=torch.int32)
        return {**joined, "answers": flat, "answer_ends": ends}

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
        padded = torch.nn.functional.pad(ids[0], (2, 0), value=-1)
        context = padded.unfold(0, 3, 1)[first:-1]
        return {
            # bf16 has the range of fp32, which the few very large activations need.
            "states": torch.stack(states).bfloat16(),
            "top_tokens": top.indices.int().cpu(),
            "top_logprobs": top.values.half().cpu(),
            "context": context.int().cpu(),
        }


def answer(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any
) -> list[list[int]]:
    """The model's answers to a batch of prompts, end-of-text token included."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).to(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=pad, **options
    )
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    said = []
    for row in out[:, width:].tolist():
        stop = next((k + 1 for k, token in enumerate(row) if token in ends), len(row))
        said.append(row[:stop])
    return said


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file so that it is there whole or not at all."""
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    write(scratch)
    scratch.replace(path)
