"""The recording: held-out answers, and how sure the checkpoints were of each of their tokens.

It tells how fast exits and drafts would be, on any device and with any thresholds. No model inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tide.exits.thresholds import Thresholds


@dataclass
class Recording:
    """Answers, and scores at the positions from which their tokens were predicted.

    Attributes:
        n_layers: of the model.
        layers: the checkpoints.
        tokens: prompt and answer of each document.
        prompts: length of each prompt.
        scores: by name of a threshold ("router", "prefilter", "confidence"), at each checkpoint,
            `[checkpoints, positions]`; positions of all documents one after the other.
        correct: whether an exit there would be, `[checkpoints, positions]`.
        successors: the likeliest tokens after each position, `[positions, some]`; None in an
            artifact that has none, and then trees cannot be replayed.
    """

    n_layers: int
    layers: tuple[int, ...]
    tokens: list[list[int]]
    prompts: list[int]
    scores: dict[str, np.ndarray]
    correct: np.ndarray
    successors: np.ndarray | None = None

    def decide(
        self, layers: Sequence[int], thresholds: Sequence[Thresholds]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where heads are read and where tokens exit, at some of the checkpoints.

        Returns:
            Two boolean arrays, `[checkpoints in use, positions]`.
        """
        shape = (len(layers), self.correct.shape[1])
        reads, exits = np.ones(shape, bool), np.ones(shape, bool)
        for k, (layer, limit) in enumerate(zip(layers, thresholds, strict=True)):
            at = self.layers.index(layer)
            for name, found in (("router", reads), ("prefilter", reads), ("confidence", exits)):
                if (least := getattr(limit, name)) is not None:
                    found[k] &= self.scores[name][at] >= least
        return reads, exits & reads

    def first(self, positions: int) -> Recording:
        """As many of the documents, from the first on, as have so many positions; at least one."""
        ends = np.cumsum([len(t) - p for t, p in zip(self.tokens, self.prompts, strict=True)])
        count = max(1, int(np.searchsorted(ends, positions, "right")))
        here = slice(0, int(ends[count - 1]))
        return Recording(
            self.n_layers, self.layers, self.tokens[:count], self.prompts[:count],
            {name: values[:, here] for name, values in self.scores.items()}, self.correct[:, here],
            None if self.successors is None else self.successors[here],
        )  # fmt: skip

    def cut(self, longest: int, shortest: int = 0) -> Recording:
        """The same with answers of at most so many tokens, and without shorter ones."""
        texts = list(zip(self.tokens, self.prompts, strict=True))
        kept = np.concatenate([
            (np.arange(len(t) - p) < longest) & (len(t) - p >= shortest) for t, p in texts
        ])  # fmt: skip
        texts = [(t[: p + longest], p) for t, p in texts if len(t) - p >= shortest]
        return Recording(
            self.n_layers, self.layers, [t for t, _ in texts], [p for _, p in texts],
            {name: values[:, kept] for name, values in self.scores.items()},
            self.correct[:, kept], None if self.successors is None else self.successors[kept],
        )  # fmt: skip

    def only(self, layers: Sequence[int]) -> Recording:
        """The same for some of the checkpoints."""
        at = [self.layers.index(layer) for layer in layers]
        scores = {name: values[at] for name, values in self.scores.items()}
        return replace(self, layers=tuple(layers), scores=scores, correct=self.correct[at])

    def tensors(self) -> dict[str, Tensor]:
        """As tensors, to be kept in an artifact."""
        lengths = [len(tokens) for tokens in self.tokens]
        known = {} if self.successors is None else {"successors": torch.from_numpy(self.successors)}
        return {
            "layers": torch.tensor([self.n_layers, *self.layers]),
            "tokens": torch.tensor([t for tokens in self.tokens for t in tokens]).int(),
            "lengths": torch.tensor(lengths),
            "prompts": torch.tensor(self.prompts),
            "correct": torch.from_numpy(self.correct),
            **known,
            **{f"score_{n}": torch.from_numpy(v).half() for n, v in self.scores.items()},
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Recording:
        """From tensors; raises ValueError unless they fit together."""
        _check(tensors)
        n_layers, *layers = tensors["layers"].tolist()
        whole = tensors["tokens"].tolist()
        ends = tensors["lengths"].cumsum(0).tolist()
        begins = [0, *ends[:-1]]
        scores = {
            name.removeprefix("score_"): values.float().numpy()
            for name, values in tensors.items()
            if name.startswith("score_")
        }
        successors = tensors.get("successors")
        return cls(
            n_layers, tuple(layers), [whole[a:b] for a, b in zip(begins, ends, strict=True)],
            tensors["prompts"].tolist(), scores, tensors["correct"].numpy(),
            None if successors is None else successors.numpy(),
        )  # fmt: skip


# Type and dimensions of every tensor but the scores, which are as `correct`, in half precision.
_TENSORS = {
    "layers": (torch.int64, 1), "tokens": (torch.int32, 1), "lengths": (torch.int64, 1),
    "prompts": (torch.int64, 1), "correct": (torch.bool, 2),
}  # fmt: skip
_SUCCESSORS = {"successors": (torch.int32, 2)}
_SCORES = tuple(f"score_{name}" for name in ("router", "prefilter", "confidence"))


def _check(tensors: Mapping[str, Tensor]) -> None:
    """Raise unless tensors of a recording fit together."""
    of_each = {**_TENSORS, **dict.fromkeys(_SCORES, (torch.float16, 2)), **_SUCCESSORS}
    for name, tensor in tensors.items():
        if (tensor.dtype, tensor.ndim) != of_each.get(name):
            raise ValueError(f"{name!a} of the recording is unknown, or has another type or shape")
    if missing := set(_TENSORS) - set(tensors):
        raise ValueError(f"the recording lacks {sorted(missing)}")
    (n_layers, *layers), lengths = tensors["layers"].tolist() or [0], tensors["lengths"]
    prompts, tokens = tensors["prompts"], tensors["tokens"]
    if layers != sorted(set(layers)) or not all(0 <= layer < n_layers for layer in layers):
        raise ValueError(f"the recording is for layers {layers[:9]} of {n_layers}")
    if prompts.shape != lengths.shape or not ((prompts > 0) & (prompts < lengths)).all():
        raise ValueError("a document of the recording has no prompt or no answer")
    if not len(prompts) or int(lengths.max()) > len(tokens) or int(lengths.sum()) != len(tokens):
        raise ValueError("the recording has other tokens than its documents")
    shape = (len(layers), int((lengths - prompts).sum()))
    if any(tensors[n].shape != shape for n in ("correct", *_SCORES) if n in tensors):
        raise ValueError(f"a score of the recording is not of shape {list(shape)}")
    successors = tensors.get("successors", torch.zeros(shape[1], 1))
    if len(successors) != shape[1] or not successors.shape[1]:
        raise ValueError(f"the recording has successors of {list(successors.shape)}")
    if min(int(tokens.min()), int(successors.min())) < 0:
        raise ValueError("the recording has a token below 0")
