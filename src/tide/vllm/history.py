"""The tokens of each request, stored by KV cache slot.

A model's forward pass sees the new tokens only. Their ids are stored under the slots of their KV,
so prefix caching, preemption and aborts need no extra handling: a request that may read the KV of a
slot may read its token. The slots are those of a layer without a sliding window, whose blocks vLLM
keeps until the request ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from tide.exits.ngrams import NGramPrediction, NGramPredictor
from tide.exits.table import ContinuationTable
from tide.vllm.metadata import Requests


@dataclass
class _Text:
    """What is known of a request's text.

    Attributes:
        ids: of its tokens, as they were found last.
        tokens: the same as a list, which grows.
        predictor: has seen them.
        prediction: of the next token.
    """

    ids: Tensor
    tokens: list[int]
    predictor: NGramPredictor
    prediction: NGramPrediction


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
        self._texts: OrderedDict[int, _Text] = OrderedDict()

    def write(self, requests: Requests, ids: Tensor) -> None:
        """Store the tokens of a pass."""
        count = int(requests.starts[-1])
        slots = requests.slots[:count].cpu()
        size = int(slots.max()) + 1
        if size > len(self._tokens):
            more = torch.zeros(2 * size - len(self._tokens), dtype=torch.int32)
            self._tokens = torch.cat([self._tokens, more])
        self._tokens[slots] = ids[:count].to("cpu", torch.int32)

    def tokens(self, blocks: Tensor, length: int, block: int) -> Tensor:
        """All tokens of a request so far, by its KV cache blocks, `[length]`."""
        positions = torch.arange(length)
        return self._tokens[blocks[positions // block].long() * block + positions % block]

    def predict(self, requests: Requests, request: int) -> NGramPrediction:
        """The n-gram prediction for a request's next token, from its own text and the table."""
        length, blocks = int(requests.lengths[request]), requests.blocks[request].cpu()
        ids, last = self.tokens(blocks, length, requests.block), (length - 1) // requests.block
        found = self._texts.pop(int(blocks[last]), None)
        if found is None and last:
            found = self._texts.pop(int(blocks[last - 1]), None)
        # Another request may have used the block before; then start with an empty index.
        if found is None or not found.ids.equal(ids[: len(found.ids)]):
            found = _Text(ids[:0], [], NGramPredictor(self._table), NGramPrediction())
        if len(found.ids) < length:  # else another gate of the same pass
            found.tokens += ids[len(found.ids) :].tolist()
            found.prediction = found.predictor.at(found.tokens, length - 1, length)
            found.ids = ids
        self._texts[int(blocks[last])] = found
        if len(self._texts) > self._max_requests:
            self._texts.popitem(last=False)
        return found.prediction
