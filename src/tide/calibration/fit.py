"""Gives the fitting of exit heads and routers from a collection, unit by unit.

Heads learn the full model's distribution (its top tokens). Routers learn whether the head's token
is the full model's. Neither ever sees more than a few units at a time.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tide.calibration.collect import Collection, Unit
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter

Progress = Callable[[int, int], None]
_SHUFFLED = 8  # units that are mixed at a time
_READ = 1024  # positions read at a time: logits over a whole vocabulary are large


@dataclass
class Batch:
    """Some positions, mixed from several units; as in `Unit`, with one layer of states each."""

    states: Tensor  # [layers + 1, n, hidden]
    top_tokens: Tensor  # [n, top_k]
    top_logprobs: Tensor  # [n, top_k]

    @property
    def said(self) -> Tensor:
        """The full model's token at each position, `[n]`."""
        return self.top_tokens[:, 0].long()


def choose_vocabulary(collection: Collection, size: int, vocabulary_size: int) -> Tensor:
    """The `size` tokens to which the full model gave most probability along its answers.

    Soft on-policy counts were the best order of those measured; see docs/log.md.
    """
    mass = torch.zeros(vocabulary_size)
    for unit in collection.units("fit"):
        mass.index_add_(
            0, unit.top_tokens.long().flatten(), unit.top_logprobs.float().exp().flatten()
        )
    return mass.topk(min(size, vocabulary_size)).indices.sort().values


def coverage(collection: Collection, split: str, vocabulary: Tensor) -> float:
    """Share of the full model's tokens that a reduced vocabulary holds."""
    inside = total = 0
    for unit in collection.units(split):
        said = unit.top_tokens[:, 0].long()
        inside += int(torch.isin(said, vocabulary).sum())
        total += len(said)
    return inside / total


def fit_heads(
    collection: Collection,
    readout: Readout,
    strategies: Sequence[str],
    hidden_size: int,
    *,
    epochs: int = 2,
    batch: int = 512,
    rate: float = 2e-3,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[ExitHead]:
    """Fit one head per checkpoint by the KL divergence from the full model to it.

    All heads see the same batches in one pass over the data.

    Args:
        readout: over the vocabulary that the heads are to read.
        strategies: of each checkpoint, in the order of the plan's layers.
    """
    torch.manual_seed(seed)
    heads = [ExitHead(strategy, hidden_size).to(readout.device) for strategy in strategies]
    trained = [(i, head) for i, head in enumerate(heads) if head.affine is not None]
    if not trained:
        return heads
    parameters = [p for _, head in trained for p in head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    total = epochs * count_batches(collection, "fit", batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(total, 2))
    done = 0
    for epoch in range(epochs):
        for piece in batches(collection, "fit", batch, seed + epoch):
            target = _target(piece, readout)
            optimizer.zero_grad(set_to_none=True)
            for i, head in trained:
                states = piece.states[i].to(readout.device)
                _loss(readout(head.lift(states).to(readout.dtype)).float(), *target).backward()
            optimizer.step()
            schedule.step()
            done += 1
            progress(done, total)
    return [head.cpu().requires_grad_(False) for head in heads]


def _target(piece: Batch, readout: Readout) -> tuple[Tensor, Tensor]:
    """Where the full model's top tokens stand in the vocabulary read, and their probabilities.

    Tokens outside of it get no weight; a position of which none is inside teaches nothing.
    """
    index = piece.top_tokens.long().to(readout.device)
    p = piece.top_logprobs.float().exp().to(readout.device)
    if readout.vocabulary is not None:
        place = torch.searchsorted(readout.vocabulary, index).clamp_max(len(readout.vocabulary) - 1)
        p = p * (readout.vocabulary[place] == index)
        index = place
    return index, p


def _loss(logits: Tensor, index: Tensor, p: Tensor) -> Tensor:
    return -(p * logits.log_softmax(-1).gather(1, index)).sum(1).mean()


@torch.no_grad()
def read_out(readout: Readout, head: ExitHead, states: Tensor) -> Iterator[Tensor]:
    """Logits of an exit head, as it is served, for some states; a piece at a time, `[some, v]`."""
    for piece in states.split(_READ):
        yield readout(head.lift(piece.to(readout.device, readout.dtype))).float()


def as_served(heads: Sequence[ExitHead], readout: Readout) -> list[ExitHead]:
    """Copies of exit heads where, and in the precision in which, they will be asked."""
    return [copy.deepcopy(head).to(readout.device, readout.dtype) for head in heads]


def fit_router(
    collection: Collection,
    readout: Readout,
    head: ExitHead,
    checkpoint: int,
    hidden_size: int,
    bottleneck: int,
    stop_on: Sequence[Tensor],
    *,
    label: str = "agreement",
    convergence_threshold: float = 0.98,
    epochs: int = 20,
    patience: int = 3,
    seed: int = 0,
) -> TokenRouter:
    """Fit the router of one checkpoint, class-balanced, stopped early on the gate split.

    Args:
        head: as it is served.
        stop_on: for each unit of the gate split, which positions may stop it early.
        label: "agreement", whether the head says the full model's token; or "cosine", whether the
            state is within `convergence_threshold` of the last one before the final norm, as
            published.
    """
    torch.manual_seed(seed)
    router = TokenRouter(hidden_size, bottleneck)
    optimizer = torch.optim.AdamW(router.parameters(), lr=1e-3, weight_decay=1e-2)
    settled = {
        split: [
            _settled(unit, readout, head, checkpoint, label, convergence_threshold)
            for unit in collection.units(split)
        ]
        for split in ("fit", "gate")
    }
    share = float(torch.cat(settled["fit"]).mean().clamp(1e-3, 1 - 1e-3))
    weights = torch.tensor([0.5 / (1 - share), 0.5 / share])

    def loss_of(states: Tensor, right: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            router.logit(states.float()), right, weight=weights[right.long()]
        )

    best, best_loss, waited = router.state_dict(), float("inf"), 0
    for _ in range(epochs):
        for states, right in zip(collection.states("fit", checkpoint), settled["fit"], strict=True):
            for rows in torch.randperm(len(right)).split(512):
                optimizer.zero_grad(set_to_none=True)
                loss_of(states[rows], right[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            held_out = zip(
                collection.states("gate", checkpoint), settled["gate"], stop_on, strict=True
            )
            losses = [loss_of(states[rows], right[rows]) for states, right, rows in held_out]
        loss_now = float(torch.stack([loss for loss in losses if loss.isfinite()]).mean())
        if loss_now < best_loss:
            best_loss, waited = loss_now, 0
            best = {name: value.clone() for name, value in router.state_dict().items()}
        else:
            waited += 1
            if waited >= patience:
                break
    router.load_state_dict(best)
    return router.eval().requires_grad_(False)


@torch.no_grad()
def _settled(
    unit: Unit,
    readout: Readout,
    head: ExitHead,
    checkpoint: int,
    label: str,
    convergence_threshold: float,
) -> Tensor:
    """1 where a token may leave, `[positions]`."""
    if label == "cosine":
        states, last = unit.states[checkpoint].float(), unit.states[-1].float()
        near = nn.functional.cosine_similarity(states, last, dim=-1) >= convergence_threshold
        return near.float()
    pieces = read_out(readout, head, unit.states[checkpoint])
    said = torch.cat([readout.tokens(logits.argmax(-1)).cpu() for logits in pieces])
    return (said == unit.top_tokens[:, 0]).float()


def count_batches(collection: Collection, split: str, size: int) -> int:
    """How many batches `batches` will give; reads no states."""
    lengths = [sum(map(len, unit)) for unit in collection.answers_by_unit(split)]
    groups = [sum(lengths[k : k + _SHUFFLED]) for k in range(0, len(lengths), _SHUFFLED)]
    return sum(-(-positions // size) for positions in groups)


def batches(collection: Collection, split: str, size: int, seed: int) -> Iterator[Batch]:
    """Positions of a split in random order, mixed from a few units at a time."""
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    held: list[Unit] = []
    units = collection.units(split)
    while True:
        held = [unit for _, unit in zip(range(_SHUFFLED), units, strict=False)]
        if not held:
            return
        order.shuffle(held)
        states = torch.cat([unit.states for unit in held], 1)
        tokens = torch.cat([unit.top_tokens for unit in held])
        logprobs = torch.cat([unit.top_logprobs for unit in held])
        for rows in torch.randperm(len(tokens), generator=generator).split(size):
            yield Batch(states[:, rows].float(), tokens[rows], logprobs[rows])
