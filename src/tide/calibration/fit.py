"""The fitting of exit heads and routers from a collection, unit by unit.

Heads learn the full model's distribution over its top tokens. Routers learn whether the head's
token is the target token. Only a few units are in memory at a time.
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


@dataclass(frozen=True)
class HeadFit:
    """How exit heads are fitted.

    Attributes:
        epochs: passes over the collected states.
        batch: positions per step.
        rate: peak learning rate.
        seed: of the order of the positions.
    """

    epochs: int = 2
    batch: int = 512
    rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RouterFit:
    """How routers are fitted.

    Attributes:
        hidden_size: size of the states.
        bottleneck: hidden size of a router.
        label: "agreement", whether the head predicts the target token; or "cosine", whether the
            state is within `convergence_threshold` of the last one before the final norm, as
            published.
        convergence_threshold: least cosine similarity, for the label "cosine".
        epochs: most passes over the collected states.
        patience: epochs without a lower loss on the tuning split before fitting stops.
        seed: of the weights and of the order of the positions.
    """

    hidden_size: int
    bottleneck: int
    label: str = "agreement"
    convergence_threshold: float = 0.98
    epochs: int = 20
    patience: int = 3
    seed: int = 0


@dataclass
class Batch:
    """Some positions, mixed from several units; fields as in `Unit`."""

    states: Tensor  # [layers + 1, n, hidden]
    top_tokens: Tensor  # [n, top_k]
    top_logprobs: Tensor  # [n, top_k]


def choose_vocabulary(collection: Collection, size: int, vocabulary_size: int) -> Tensor:
    """The `size` tokens with the highest total probability under the full model.

    Soft on-policy counts were the best of the orders measured; see docs/log.md.
    """
    mass = torch.zeros(vocabulary_size)
    for unit in collection.units("fit"):
        mass.index_add_(
            0, unit.top_tokens.long().flatten(), unit.top_logprobs.float().exp().flatten()
        )
    return mass.topk(min(size, vocabulary_size)).indices.sort().values


def coverage(collection: Collection, split: str, vocabulary: Tensor) -> float:
    """Share of the target tokens that a reduced vocabulary contains."""
    inside = total = 0
    for unit in collection.units(split):
        target = unit.top_tokens[:, 0].long()
        inside += int(torch.isin(target, vocabulary).sum())
        total += len(target)
    return inside / total


def fit_heads(
    heads: Sequence[ExitHead],
    collection: Collection,
    readout: Readout,
    how: HeadFit,
    progress: Progress = lambda done, total: None,
) -> None:
    """Fit exit heads in place by the KL divergence from the full model to each head.

    All heads see the same batches in one pass over the data. They end on the CPU, frozen.

    Args:
        heads: one per checkpoint, in the order of the plan's layers.
        readout: over the vocabulary that the heads read.
    """
    trained = [(i, head) for i, head in enumerate(heads) if head.affine is not None]
    if not trained:
        return
    parameters = [p for _, head in trained for p in head.to(readout.device).parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=how.rate, weight_decay=0.0)
    total = how.epochs * count_batches(collection, "fit", how.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.rate, total_steps=max(total, 2))
    done = 0
    for epoch in range(how.epochs):
        for piece in batches(collection, "fit", how.batch, how.seed + epoch):
            target = _target(piece, readout)
            optimizer.zero_grad(set_to_none=True)
            for i, head in trained:
                states = piece.states[i].to(readout.device)
                _loss(readout(head.transform(states).to(readout.dtype)).float(), *target).backward()
            optimizer.step()
            schedule.step()
            done += 1
            progress(done, total)
    for _, head in trained:
        head.cpu().requires_grad_(False)
        assert head.affine is not None
        weight = head.affine.weight
        weight.copy_(weight.bfloat16())  # compiled gates then read half the bytes; see `FusedGate`


def _target(piece: Batch, readout: Readout) -> tuple[Tensor, Tensor]:
    """Indices of the full model's top tokens in the vocabulary read, and their probabilities.

    Tokens outside of it get no weight; a position with no token inside teaches nothing.
    """
    index = piece.top_tokens.long().to(readout.device)
    p = piece.top_logprobs.float().exp().to(readout.device)
    if readout.vocabulary is not None:
        found = torch.searchsorted(readout.vocabulary, index).clamp_max(len(readout.vocabulary) - 1)
        p = p * (readout.vocabulary[found] == index)
        index = found
    return index, p


def _loss(logits: Tensor, index: Tensor, p: Tensor) -> Tensor:
    return -(p * logits.log_softmax(-1).gather(1, index)).sum(1).mean()


@torch.no_grad()
def read_out(readout: Readout, head: ExitHead, states: Tensor) -> Iterator[Tensor]:
    """Logits of an exit head, as it is served, for some states; a piece at a time, `[n, v]`."""
    for piece in states.split(_READ):
        yield readout(head.transform(piece.to(readout.device, readout.dtype))).float()


def as_served(heads: Sequence[ExitHead], readout: Readout) -> list[ExitHead]:
    """Copies of exit heads on the device and in the dtype in which they are served."""
    return [copy.deepcopy(head).to(readout.device, readout.dtype) for head in heads]


@torch.no_grad()
def router_labels(
    collection: Collection, readout: Readout, head: ExitHead, checkpoint: int, how: RouterFit
) -> dict[str, list[Tensor]]:
    """1 where a token may exit, else 0, for each unit of the splits, `[positions]` each.

    Args:
        head: as it is served.
    """

    def label(unit: Unit) -> Tensor:
        if how.label == "cosine":
            states, last = unit.states[checkpoint].float(), unit.states[-1].float()
            similarity = nn.functional.cosine_similarity(states, last, dim=-1)
            return (similarity >= how.convergence_threshold).float()
        pieces = read_out(readout, head, unit.states[checkpoint])
        predicted = torch.cat([readout.tokens(logits.argmax(-1)).cpu() for logits in pieces])
        return (predicted == unit.top_tokens[:, 0]).float()

    return {split: [label(unit) for unit in collection.units(split)] for split in ("fit", "tuning")}


def fit_router(
    collection: Collection,
    checkpoint: int,
    labels: dict[str, list[Tensor]],
    stop_on: Sequence[Tensor],
    how: RouterFit,
) -> TokenRouter:
    """Fit the router of one checkpoint, class-balanced, until the loss on the tuning split rises.

    Args:
        labels: from `router_labels`.
        stop_on: for each unit of the tuning split, the positions that decide when to stop.
    """
    torch.manual_seed(how.seed)
    router = TokenRouter(how.hidden_size, how.bottleneck)
    optimizer = torch.optim.AdamW(router.parameters(), lr=1e-3, weight_decay=1e-2)
    share = float(torch.cat(labels["fit"]).mean().clamp(1e-3, 1 - 1e-3))
    weights = torch.tensor([0.5 / (1 - share), 0.5 / share])

    def loss_of(states: Tensor, correct: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            router.logit(states.float()), correct, weight=weights[correct.long()]
        )

    best, best_loss, waited = router.state_dict(), float("inf"), 0
    for _ in range(how.epochs):
        for states, correct in zip(
            collection.states("fit", checkpoint), labels["fit"], strict=True
        ):
            for some in torch.randperm(len(correct)).split(512):
                optimizer.zero_grad(set_to_none=True)
                loss_of(states[some], correct[some]).backward()
                optimizer.step()
        with torch.no_grad():
            held_out = zip(
                collection.states("tuning", checkpoint), labels["tuning"], stop_on, strict=True
            )
            losses = [loss_of(states[some], correct[some]) for states, correct, some in held_out]
        loss_now = float(torch.stack([loss for loss in losses if loss.isfinite()]).mean())
        if loss_now < best_loss:
            best_loss, waited = loss_now, 0
            best = {name: value.clone() for name, value in router.state_dict().items()}
        else:
            waited += 1
            if waited >= how.patience:
                break
    router.load_state_dict(best)
    return router.eval().requires_grad_(False)


def count_batches(collection: Collection, split: str, size: int) -> int:
    """The number of batches that `batches` yields; reads no states."""
    lengths = [sum(map(len, unit)) for unit in collection.answers_by_unit(split)]
    groups = [sum(lengths[k : k + _SHUFFLED]) for k in range(0, len(lengths), _SHUFFLED)]
    return sum(-(-positions // size) for positions in groups)


def batches(collection: Collection, split: str, size: int, seed: int) -> Iterator[Batch]:
    """Positions of a split in random order, mixed from a few units at a time."""
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    units = collection.units(split)
    while held := [unit for _, unit in zip(range(_SHUFFLED), units, strict=False)]:
        order.shuffle(held)
        states = torch.cat([unit.states for unit in held], 1)
        tokens = torch.cat([unit.top_tokens for unit in held])
        logprobs = torch.cat([unit.top_logprobs for unit in held])
        for some in torch.randperm(len(tokens), generator=generator).split(size):
            yield Batch(states[:, some].float(), tokens[some], logprobs[some])
