"""Scoring: logits of given tokens with per-token exit, in one pass over the depth."""

from __future__ import annotations

import torch
from torch import Tensor

from tide.decode.machinery import Machinery
from tide.decode.prefill import PrefillWithExits
from tide.models.tokens import TokenBatch
from tide.stats import ExitStats


def score_tokens(machinery: Machinery, tokens: TokenBatch, stats: ExitStats) -> Tensor:
    """Logits of every token, `[sequences, tokens, vocabulary]`; any token may exit."""
    runner, ids = machinery.runner, tokens.ids
    valid = torch.ones_like(ids) if tokens.valid is None else tokens.valid
    tokens = TokenBatch(ids, valid.bool())
    runner.counts.reset()
    cache = runner.new_cache(len(ids), ids.shape[1])
    prefill = PrefillWithExits(runner, machinery.exits, machinery.config, cache)
    done = prefill.run(tokens, range(len(ids)), with_logits=True)
    assert done.logits is not None
    for depth in done.depths[valid.bool()].tolist():
        stats.count_depth(depth)
    stats.depths = done.depths.tolist()
    stats.count_layers(runner.counts, runner.n_layers)
    return done.logits
