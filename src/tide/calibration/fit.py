"""Gives the fitting of exit heads and routers from a collection, unit by unit.

Heads learn the full model's distribution (its top tokens). Routers learn whether the head's token
is the full model's. Neither ever sees more than a few units at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tide.calibration.collect import Collection, Unit
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter, head_features

Progress = Callable[[int, int], None]
_SHUFFLED = 8  # units that are mixed at a time


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
    rate: float = 1e-3,
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
    heads = [ExitHead(strategy, hidden_size) for strategy in strategies]
    trained = [(i, head) for i, head in enumerate(heads) if head.affine is not None]
    if not trained:
        return heads
    parameters = [p for _, head in trained for p in head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    total = epochs * sum(1 for _ in batches(collection, "fit", batch, seed))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(total, 2))
    done = 0
    for epoch in range(epochs):
        for piece in batches(collection, "fit", batch, seed + epoch):
            target = _target(piece, readout)
            optimizer.zero_grad(set_to_none=True)
            for i, head in trained:
                logits = readout(head.lift(piece.states[i]).to(readout.dtype)).float()
                _loss(logits, *target).backward()
            optimizer.step()
            schedule.step()
            done += 1
            progress(done, total)
    for head in heads:
        head.requires_grad_(False)
    return heads


def _target(piece: Batch, readout: Readout) -> tuple[Tensor, Tensor]:
    """Where the full model's top tokens stand in the vocabulary read, and their probabilities.

    Tokens outside of it get no weight; a position of which none is inside teaches nothing.
    """
    index, p = piece.top_tokens.long(), piece.top_logprobs.float().exp()
    if readout.vocabulary is not None:
        place = torch.searchsorted(readout.vocabulary, index).clamp_max(len(readout.vocabulary) - 1)
        p = p * (readout.vocabulary[place] == index)
        index = place
    return index, p


def _loss(logits: Tensor, index: Tensor, p: Tensor) -> Tensor:
    return -(p * logits.log_softmax(-1).gather(1, index)).sum(1).mean()


@torch.no_grad()
def agreement(
    collection: Collection, split: str, readout: Readout, heads: Sequence[ExitHead]
) -> list[float]:
    """Share of positions at which each head says the full model's token."""
    right, total = torch.zeros(len(heads)), 0
    for unit in collection.units(split):
        total += unit.states.shape[1]
        for i, head in enumerate(heads):
            said = _say(readout, head, unit.states[i].float())[0]
            right[i] += (said == unit.top_tokens[:, 0]).sum()
    return (right / total).tolist()


def _say(readout: Readout, head: ExitHead, states: Tensor) -> tuple[Tensor, Tensor]:
    """The head's token, `[n]`, and its logits, `[n, v]`."""
    logits = readout(head.lift(states).to(readout.dtype))
    return readout.tokens(logits.argmax(-1)), logits


@dataclass
class _Scored:
    """What a router learns from, at one checkpoint."""

    states: Tensor  # [n, hidden]
    features: Tensor | None  # [n, features]
    settled: Tensor  # [n], 1 where the token may leave


def fit_router(
    collection: Collection,
    readout: Readout,
    heads: Sequence[ExitHead],
    checkpoint: int,
    hidden_size: int,
    bottleneck: int,
    *,
    features: tuple[str, ...] = (),
    label: str = "agreement",
    convergence_threshold: float = 0.98,
    epochs: int = 20,
    patience: int = 3,
    seed: int = 0,
) -> TokenRouter:
    """Fit the router of one checkpoint, class-balanced, stopped early on the gate split.

    Args:
        label: "agreement", whether the head says the full model's token; or "cosine", whether the
            state is within `convergence_threshold` of the last one before the final norm, as
            published.
    """
    torch.manual_seed(seed)
    router = TokenRouter(hidden_size, bottleneck, features)
    optimizer = torch.optim.AdamW(router.parameters(), lr=1e-3, weight_decay=1e-2)

    def scored(split: str) -> Iterator[_Scored]:
        for unit in collection.units(split):
            yield _score(unit, readout, heads, checkpoint, features, label, convergence_threshold)

    positives = total = 0.0
    for piece in scored("fit"):
        positives += float(piece.settled.sum())
        total += len(piece.settled)
    share = min(max(positives / total, 1e-3), 1 - 1e-3)
    weights = torch.tensor([0.5 / (1 - share), 0.5 / share])

    best, best_loss, waited = router.state_dict(), float("inf"), 0
    for _ in range(epochs):
        router.train()
        for piece in scored("fit"):
            for rows in torch.randperm(len(piece.settled)).split(512):
                loss = _router_loss(router, piece, rows, weights)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        router.eval()
        with torch.no_grad():
            losses = [
                float(_router_loss(router, piece, torch.arange(len(piece.settled)), weights))
                for piece in scored("gate")
            ]
        loss_now = sum(losses) / len(losses)
        if loss_now < best_loss:
            best_loss, waited = loss_now, 0
            best = {name: value.clone() for name, value in router.state_dict().items()}
        else:
            waited += 1
            if waited >= patience:
                break
    router.load_state_dict(best)
    return router.eval().requires_grad_(False)


def _router_loss(router: TokenRouter, piece: _Scored, rows: Tensor, weights: Tensor) -> Tensor:
    features = None if piece.features is None else piece.features[rows]
    settled = piece.settled[rows]
    logits = router.logit(piece.states[rows], features)
    return nn.functional.binary_cross_entropy_with_logits(
        logits, settled, weight=weights[settled.long()]
    )


@torch.no_grad()
def _score(
    unit: Unit,
    readout: Readout,
    heads: Sequence[ExitHead],
    checkpoint: int,
    features: tuple[str, ...],
    label: str,
    convergence_threshold: float,
) -> _Scored:
    states = unit.states[checkpoint].float()
    said, logits = _say(readout, heads[checkpoint], states)
    settled = said == unit.top_tokens[:, 0]
    if label == "cosine":
        last = unit.states[-1].float()
        settled = nn.functional.cosine_similarity(states, last, dim=-1) >= convergence_threshold
    seen = None
    if features:
        before = None
        if checkpoint:
            above = unit.states[checkpoint - 1].float()
            before = _say(readout, heads[checkpoint - 1], above)[1].argmax(-1).tolist()
        seen = head_features(features, logits, before)
    return _Scored(states, seen, settled.float())


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
