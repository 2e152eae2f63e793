"""Noise that belongs to a place: drawn once in the order of `generate`, and again when needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DTYPE = torch.float32  # of the probabilities from which `generate` draws, whatever the default is
_HELD = 32  # tensors of noise that are kept: about what a pass needs; others are drawn again


class PlacedNoise:
    """Exponential noise for every place of a batch, of which only a few tensors are held.

    Args:
        sequences: sequences of the batch as given.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._states: dict[int, Tensor] = {}  # place -> the generator's state before its draw
        self._held: dict[int, Tensor] = {}  # place -> noise, [sequences, vocabulary]
        self._next: int | None = None
        self._generator: torch.Generator | None = None
        self._after: Tensor | None = None  # the generator's state after the last draw

    def at(self, places: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
        """Noise for (sequence, place) pairs, `[n, vocabulary]`."""
        if self._next is None:
            self._next = min(place for _, place in places)  # sequences are padded on the left
        out = torch.empty(len(places), like.shape[1], dtype=_DTYPE, device=like.device)
        by_place: dict[int, list[int]] = {}
        for k, (_, place) in enumerate(places):
            by_place.setdefault(place, []).append(k)
        for place, here in sorted(by_place.items()):
            out[here] = self._of(place, like)[[places[k][0] for k in here]]
        return out

    def forget_before(self, place: int) -> None:
        """Drop places before `place`."""
        self._states = {at: state for at, state in self._states.items() if at >= place}
        self._held = {at: noise for at, noise in self._held.items() if at >= place}

    def rewind(self, place: int) -> None:
        """Set the generator back to before `place`: what was drawn from there on was for drafts.

        Not if others have drawn from it since.
        """
        if self._generator is None or self._after is None or place not in self._states:
            return
        if torch.equal(self._generator.get_state(), self._after):
            self._generator.set_state(self._states[place])

    def _of(self, place: int, like: Tensor) -> Tensor:
        """The noise of a place, `[sequences, vocabulary]`."""
        assert self._next is not None
        generator = self._generator = default_generator(like.device)
        while self._next <= place:
            self._states[self._next] = generator.get_state()
            self._hold(self._next, self._draw(generator, like))
            self._after = generator.get_state()
            self._next += 1
        if place not in self._held:
            again = torch.Generator(like.device)
            again.set_state(self._states[place])
            self._hold(place, self._draw(again, like))
        return self._held[place]

    def _draw(self, generator: torch.Generator, like: Tensor) -> Tensor:
        shape = (self._sequences, like.shape[1])
        noise = torch.empty(shape, dtype=_DTYPE, device=like.device)
        return noise.exponential_(generator=generator)

    def _hold(self, place: int, noise: Tensor) -> None:
        self._held[place] = noise
        while len(self._held) > _HELD:
            del self._held[next(iter(self._held))]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch draws from where none is given."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    of_type = getattr(torch, device.type)  # torch.cuda, torch.xpu
    index = of_type.current_device() if device.index is None else device.index
    return of_type.default_generators[index]
