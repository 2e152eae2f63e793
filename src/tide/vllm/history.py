"""The tokens of each request, stored by KV cache slot.

A model's forward pass sees the new tokens only. Their ids are stored under the slots of their KV,
so prefix caching, preemption and aborts need no extra handling: a request that may read the KV of a
slot may read its token. The slots are those of a layer without a sliding window, whose blocks vLLM
keeps until the request ends.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.exits.table import ContinuationTable
from tide.vllm.metadata import Requests


class History:
    """Tokens by slot, and n-gram predictions from them.

    Args:
        table: the artifact's; None if it has none.
        max_requests: requests whose n-grams are kept.
    """

    def __init__(self, table: ContinuationTable | None, max_requests: int = 512) -> None:
        self._tokens = torch.zeros(0, dtype=torch.int32)
        self._table, self._max_requests = table, max_requests
        # By the block of a request's newest token, which no other request shares.
        self._predictors: OrderedDict[int, tuple[list[int], NGramPredictor]] = OrderedDict()

    def write(self, requests: Requests, ids: Tensor) -> None:
        """Store the tokens of a pass."""
        count = int(requests.starts[-1])
        slots = requests.slots[:count].cpu()
        size = int(slots.max()) + 1
        if size > len(self._tokens):
            more = torch.zeros(2 * size - len(self._tokens), dtype=torch.int32)
            self._tokens = torch.cat([self._tokens, more])
        self._tokens[slots] = ids[:count].to("cpu", torch.int32)

    def tokens(self, requests: Requests, request: int) -> list[int]:
        """All tokens of a request so far."""
        positions = torch.arange(int(requests.lengths[request]))
        blocks = requests.blocks[request].cpu().long()
        return self._tokens[
            blocks[positions // requests.block] * requests.block + positions % requests.block
        ].tolist()

    def predict(self, requests: Requests, request: int) -> NGramPrediction:
        """The n-gram prediction for a request's next token, from its own text and the table."""
        tokens = self.tokens(requests, request)
        blocks, last = requests.blocks[request], (len(tokens) - 1) // requests.block
        key = int(blocks[last])
        found = self._predictors.pop(key, None)
        if found is None and last:
            found = self._predictors.pop(int(blocks[last - 1]), None)
        # Another request may have used the block before; then start with an empty index.
        if found is None or tokens[: len(found[0])] != found[0]:
            found = [], NGramPredictor(self._table)
        self._predictors[key] = tokens, found[1]
        if len(self._predictors) > self._max_requests:
            self._predictors.popitem(last=False)
        return found[1].at(tokens, len(tokens) - 1, len(tokens))
