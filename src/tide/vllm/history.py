"""Gives the tokens of a request, kept where vLLM keeps their K and V.

A model's forward sees the new tokens only. Their ids are stored in the slots of their K and V, so
prefix caching, preemption and aborts need no care: whoever may read a slot's K and V may read its
token. Slots are those of a layer without a sliding window, whose blocks vLLM keeps to the end.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from tide.exits.hints import Hint, RowHints
from tide.exits.table import ContinuationTable
from tide.vllm.metadata import Rows


class History:
    """Tokens by slot, and hints from them.

    Args:
        block: slots of a block.
        table: the artifact's; None if it has none.
        most: requests whose n-grams are remembered.
    """

    def __init__(self, block: int, table: ContinuationTable | None, most: int = 512) -> None:
        self._tokens = torch.zeros(0, dtype=torch.int32)
        self._block, self._table, self._most = block, table, most
        # By the block of a request's newest token, which no other request shares.
        self._known: OrderedDict[int, tuple[list[int], RowHints]] = OrderedDict()

    def write(self, rows: Rows, ids: Tensor) -> None:
        """Keep the tokens of a pass."""
        count = int(rows.starts[-1])
        slots = rows.slots[:count].cpu()
        room = int(slots.max()) + 1
        if room > len(self._tokens):
            more = torch.zeros(2 * room - len(self._tokens), dtype=torch.int32)
            self._tokens = torch.cat([self._tokens, more])
        self._tokens[slots] = ids[:count].to("cpu", torch.int32)

    def tokens(self, rows: Rows, request: int) -> list[int]:
        """All tokens of a request so far."""
        places = torch.arange(int(rows.lengths[request]))
        blocks = rows.blocks[request].cpu().long()
        return self._tokens[
            blocks[places // self._block] * self._block + places % self._block
        ].tolist()

    def hint(self, rows: Rows, request: int) -> Hint:
        """What the request's own text and the table would say next."""
        tokens = self.tokens(rows, request)
        blocks, last = rows.blocks[request], (len(tokens) - 1) // self._block
        key = int(blocks[last])
        found = self._known.pop(key, None)
        if found is None and last:
            found = self._known.pop(int(blocks[last - 1]), None)
        # Another request may have had the block before; then begin anew.
        if found is None or tokens[: len(found[0])] != found[0]:
            found = [], RowHints(self._table)
        self._known[key] = tokens, found[1]
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return found[1].at(tokens, len(tokens) - 1, len(tokens))
