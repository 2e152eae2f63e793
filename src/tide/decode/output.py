"""The borders of a session: sequences from a padded batch, and a padded batch from sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tide.decode.sequence import SequenceState
from tide.errors import UnsupportedGenerationError


def sequences_of(input_ids: Tensor, mask: Tensor | None, contexts: Tensor) -> list[SequenceState]:
    """Sequences of a left-padded batch, their tokens also in `contexts`, `[sequences, room]`."""
    sequences = []
    contexts[:, : input_ids.shape[1]] = input_ids
    lines = input_ids.tolist()
    masks = [[1] * len(line) for line in lines] if mask is None else mask.tolist()
    for index, (line, valid) in enumerate(zip(lines, masks, strict=True)):
        padding = valid.count(0)
        if any(value == 0 for value in valid[padding:]):
            raise UnsupportedGenerationError(
                f"Sequence {index} is not padded on the left. Set tokenizer.padding_side = 'left'."
            )
        tokens = line[padding:]
        count = len(tokens)
        if not tokens:
            raise UnsupportedGenerationError(
                f"Sequence {index} has no token that is not padding. Begin it with a token, such "
                "as the tokenizer's bos_token, or take it out of the batch."
            )
        sequences.append(
            SequenceState(index, contexts[index], padding, tokens, prompt=count, committed=count)
        )
    return sequences


class Output:
    """Streams committed tokens, and puts sequences together as `generate` returns them.

    A sequence that ends is padded from there on. So it is in `generate` where an end-of-text token
    is set; where none is, `generate` goes on with sequences that a criterion has stopped.

    Args:
        sequences: all sequences of the batch.
        pad: token behind sequences that ended before the longest.
        streamer: transformers' streamer, or None.
    """

    def __init__(self, sequences: Sequence[SequenceState], pad: int, streamer: Any) -> None:
        self.sequences, self.pad, self.streamer = sequences, pad, streamer
        self._streamed = 0

    def stream(self) -> None:
        """Hand out every place that all unfinished sequences have reached."""
        if self.streamer is None:
            return
        lengths = [s.committed - s.prompt for s in self.sequences]
        unfinished = [n for n, s in zip(lengths, self.sequences, strict=True) if not s.finished]
        ready = min(unfinished, default=max(lengths))
        for place in range(self._streamed, ready):
            self.streamer.put(torch.tensor([self._token(s, place) for s in self.sequences]))
        self._streamed = max(self._streamed, ready)

    def finish(self, input_ids: Tensor) -> Tensor:
        """The sequences, prompts included, `[sequences, length]`."""
        if self.streamer is not None:
            self.streamer.end()
        new = [sequence.new_tokens for sequence in self.sequences]
        length = max(map(len, new))
        padded = [tokens + [self.pad] * (length - len(tokens)) for tokens in new]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)

    def _token(self, sequence: SequenceState, place: int) -> int:
        at = sequence.prompt + place
        return sequence.tokens[at] if at < sequence.committed else self.pad
