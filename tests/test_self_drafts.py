"""The study of drafts that a model makes for itself: paths, and what drafts give."""

from __future__ import annotations

import copy

import pytest
import torch
from self_drafts import LENGTHS, Costs, Paths, Way, limit, speedup

from tide.models.locate import locate
from tiny import tiny_model

FREE = Costs(dict.fromkeys(LENGTHS, 1.0), dict.fromkeys(LENGTHS, 0.0), 10)


def test_a_path_with_a_gap_is_the_model_without_these_layers():
    model = tiny_model("llama")
    ids = torch.arange(3, 20)[None]
    short = copy.deepcopy(model)
    del short.model.layers[1:3]
    for k, layer in enumerate(short.model.layers):
        layer.self_attn.layer_idx = k
    with torch.no_grad():
        expected = short.model(ids, use_cache=False).last_hidden_state[0]
        states = Paths(locate(model)).states(ids, range(1, 3))
        assert torch.equal(model.model.norm(states[-1]), expected)
        whole = Paths(locate(model)).states(ids)
        assert torch.equal(
            model.model.norm(whole[-1]), model.model(ids, use_cache=False).last_hidden_state[0]
        )
    assert len(whole) == len(model.model.layers) + 1


def test_drafts_that_are_all_right_give_what_their_passes_cost():
    # Two tokens: two layers each, one by one, then eight for both.
    assert speedup(Way("", 2, 0), [[True] * 8], FREE, 2) == pytest.approx(2 * 10 / (2 * 2 + 8))
    # A path of six layers, of which the two below the gap are kept.
    assert speedup(Way("", 2, 4), [[True] * 8], FREE, 2) == pytest.approx(2 * 10 / (4 + 4 + 8))


def test_drafts_that_are_all_wrong_cost_time_unless_one_knows():
    way = Way("", 2, 0)
    assert speedup(way, [[False] * 8], FREE, 2) == pytest.approx(10 / (2 * 2 + 8))
    assert limit(way, [[False] * 8], FREE) == 1


def test_a_drafter_that_knows_when_to_stop_is_the_limit():
    right = [[True, False, True, True, False, True] * 4]
    for below in (2, 5, 8):
        way = Way("", below, 0)
        assert limit(way, right, FREE) >= max(speedup(way, right, FREE, k) for k in (2, 4, 8))
