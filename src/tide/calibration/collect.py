"""The collection: the model's own answers, and its states at the checkpoints along them.

One streaming pass in units of a few texts. Each finished unit is written to its own file, so
memory does not grow with the number of documents, an interrupted collection resumes where it
stopped, and several processes can share the units. The content of a unit depends only on its
documents and the seed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tide.calibration.answers import Answers, self_answering
from tide.calibration.data import Documents, encode_prompts, encode_texts
from tide.calibration.unit import CollectPlan, Unit, check_unit, read_note, texts_of
from tide.errors import DataError
from tide.exits.files import naming, write_whole
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch


@dataclass(frozen=True)
class _UnitTexts:
    """The texts of one unit, before the model has seen them."""

    split: str
    number: int
    texts: Sequence[str]


Progress = Callable[[int, int], None]


class Collection:
    """The units of a plan in a folder.

    Args:
        folder: where they are kept.
        plan: what they hold; a folder with the units of another plan is an error.
        documents: what they are collected from.
    """

    def __init__(self, folder: Path, plan: CollectPlan, documents: Documents) -> None:
        assert plan.documents == documents.fingerprint
        self.folder, self.plan, self.documents = folder, plan, documents
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
        note, wanted = folder / "plan.json", json.loads(json.dumps(asdict(plan)))
        if not note.exists():
            write_whole(note, lambda path: path.write_text(json.dumps(wanted, indent=2)))
        elif read_note(note) != wanted:
            raise DataError(
                f"{folder} holds a collection made with other settings. Remove it to start again, "
                "or name another folder."
            )

    def path(self, split: str, number: int) -> Path:
        """The file of a unit."""
        return self.folder / f"{split}-{number:05d}.safetensors"

    def _files(self, split: str) -> list[Path]:
        """The files of a split's units, in order: numbered from 0, without a gap."""
        found = (self.path(split, number) for number in count())
        return list(takewhile(Path.exists, found))

    def units(self, split: str) -> Iterator[Unit]:
        """The units of a split, in order, one at a time."""
        for path in self._files(split):
            yield Unit(**load_file(path))

    def states(self, split: str, index: int) -> Iterator[Tensor]:
        """One layer's states of each unit of a split, `[positions, hidden]`; reads nothing else."""
        for path in self._files(split):
            with safe_open(path, framework="pt") as file:
                yield file.get_slice("states")[index]

    def top_tokens(self, split: str) -> Iterator[Tensor]:
        """The full model's most likely next tokens of each unit of a split; reads nothing else."""
        for path in self._files(split):
            with safe_open(path, framework="pt") as file:
                yield file.get_tensor("top_tokens")

    def texts_by_unit(self, split: str) -> Iterator[list[tuple[list[int], int]]]:
        """The texts of each unit of a split, in order; see `Unit.texts`."""
        for path in self._files(split):
            with safe_open(path, framework="pt") as file:  # the states stay on disk
                yield texts_of(*(file.get_tensor(n) for n in ("tokens", "ends", "prompts")))

    def answers_by_unit(self, split: str) -> Iterator[list[list[int]]]:
        """The answers of each unit of a split, in order, as token ids."""
        for texts in self.texts_by_unit(split):
            yield [tokens[prompt:] for tokens, prompt in texts]

    def answers(self, split: str) -> Iterator[list[int]]:
        """The answers of a split, in order, as token ids."""
        for answers in self.answers_by_unit(split):
            yield from answers

    def collect(
        self,
        runner: DepthRunner,
        tokenizer: Any,
        *,
        splits: Sequence[str] = ("fit", "tuning"),
        answers: Answers | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Write every unit of this process's share; the first process waits for the others.

        Args:
            answers: answers the prompts; by default the model itself.
            progress: called with the units done and their total.
        """
        (rank, world), size = process(), self.plan.unit
        todo = [
            _UnitTexts(split, number, texts[number * size : (number + 1) * size])
            for split in splits
            for texts in (getattr(self.documents, split),)
            for number in range(-(-len(texts) // size))
        ]
        paths = [self.path(unit.split, unit.number) for unit in todo]
        for done, (unit, path) in enumerate(zip(todo, paths, strict=True)):
            progress(done, len(todo))
            if path.exists():
                check_unit(path, len(unit.texts), self.plan, runner.config)
            elif done % world == rank:
                tensors = self._unit(runner, tokenizer, unit, answers)
                write_whole(path, lambda p, t=tensors: save_file(t, p))  # type: ignore[misc]
        while rank == 0 and (there := sum(path.exists() for path in paths)) < len(paths):
            progress(there, len(todo))
            time.sleep(0.2)
        for split in splits:
            beyond = self.path(split, -(-len(getattr(self.documents, split)) // size))
            if beyond.exists():
                raise DataError(f"{beyond} is not of this collection. Remove it, and run again.")
        progress(len(todo), len(todo))

    @torch.no_grad()
    def _unit(
        self, runner: DepthRunner, tokenizer: Any, unit: _UnitTexts, answers: Answers | None
    ) -> dict[str, Tensor]:
        """The tensors of a unit; see `Unit`."""
        plan = self.plan
        # Sampling depends on the unit alone, so a resumed collection is the same collection.
        torch.manual_seed(plan.seed + 1_000_003 * unit.number + (unit.split != "fit"))
        if plan.on_policy:
            prompts = encode_prompts(tokenizer, unit.texts, plan.max_tokens)
            answers = answers or self_answering(runner.model, tokenizer)
            replies = answers(prompts, plan.new_tokens, plan.temperature_of(unit.number))
        else:
            # Every token of the text but the first is predicted from the tokens before it.
            whole = encode_texts(tokenizer, unit.texts, plan.max_tokens)
            prompts, replies = [ids[:1] for ids in whole], [ids[1:] for ids in whole]
        pairs = list(zip(prompts, replies, strict=True))
        if not any(replies):
            raise DataError(
                f"Every answer to the prompts of {unit.split} unit {unit.number} is empty."
            )
        parts = [self._along(runner, prompt, reply) for prompt, reply in pairs if reply]
        joined = {
            name: torch.cat([part[name] for part in parts], dim=1 if name == "states" else 0)
            for name in parts[0]
        }
        lengths = torch.tensor([len(prompt) + len(reply) for prompt, reply in pairs])
        return {
            **joined,
            "tokens": torch.tensor([t for pair in pairs for t in (*pair[0], *pair[1])]).int(),
            "ends": lengths.cumsum(0),
            "prompts": torch.tensor([len(prompt) for prompt, _ in pairs]),
        }

    def _along(self, runner: DepthRunner, prompt: list[int], reply: list[int]) -> dict[str, Tensor]:
        """States and the target tokens at each position from which `reply` was predicted."""
        batch = TokenBatch(torch.tensor([prompt + reply], device=runner.input_device))
        first = len(prompt) - 1
        cuts = [layer + 1 for layer in self.plan.layers]
        states, hidden, cache = [], None, runner.new_cache(1)
        for lo, hi in zip([0, *cuts], [*cuts, runner.n_layers], strict=True):
            hidden = runner.run(batch, lo, hi, cache=cache, hidden=hidden)
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


def process() -> tuple[int, int]:
    """The rank of this process and the number of processes, as set by `torchrun` or accelerate."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
