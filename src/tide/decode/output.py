"""Gives the borders of the loop: rows from a padded batch, and a padded batch from rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tide.decode.rows import Row
from tide.errors import UnsupportedGenerationError


def rows_of(input_ids: Tensor, mask: Tensor | None, contexts: Tensor) -> list[Row]:
    """Rows of a left-padded batch, their tokens also in `contexts`, `[rows, room]`."""
    rows = []
    for index, ids in enumerate(input_ids.cpu()):
        padding = 0 if mask is None else int((mask[index] == 0).sum())
        if mask is not None and not bool((mask[index, padding:] != 0).all()):
            raise UnsupportedGenerationError(
                f"Row {index} is not padded on the left. Set tokenizer.padding_side = 'left'."
            )
        contexts[index, : len(ids)] = ids
        tokens = ids[padding:].tolist()
        rows.append(Row(index, contexts[index], padding, tokens, len(tokens), len(tokens)))
    return rows


class Output:
    """Streams settled tokens, and puts rows together as `generate` returns them.

    A row that ends is padded from there on. So it is in `generate` where an end-of-text token is
    set; where none is, `generate` goes on with rows that a criterion has stopped.

    Args:
        rows: all rows of the batch.
        pad: token behind rows that ended early.
        streamer: transformers' streamer, or None.
    """

    def __init__(self, rows: Sequence[Row], pad: int, streamer: Any) -> None:
        self.rows, self.pad, self.streamer = rows, pad, streamer
        self._streamed = 0

    def stream(self) -> None:
        """Hand out every column that all unfinished rows have reached."""
        if self.streamer is None:
            return
        unfinished = [row.settled - row.prompt for row in self.rows if not row.finished]
        ready = min(unfinished, default=max(row.settled - row.prompt for row in self.rows))
        for column in range(self._streamed, ready):
            self.streamer.put(torch.tensor([self._token(row, column) for row in self.rows]))
        self._streamed = max(self._streamed, ready)

    def finish(self, input_ids: Tensor) -> Tensor:
        """The sequences, prompt included, `[rows, length]`."""
        if self.streamer is not None:
            self.streamer.end()
        new = [row.new_tokens for row in self.rows]
        length = max(map(len, new))
        padded = [tokens + [self.pad] * (length - len(tokens)) for tokens in new]
        return torch.cat([input_ids, torch.tensor(padded).to(input_ids)], dim=1)

    def _token(self, row: Row, column: int) -> int:
        at = row.prompt + column
        return row.tokens[at] if at < row.settled else self.pad
