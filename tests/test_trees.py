"""Draft trees: every node of a tree gets what it gets at the end of its path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios import error, full_depth
from tide.models.attach import attach
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch
from tiny import FAMILIES, VOCABULARY, tiny_model

# Parents of the nodes of one tree for each sequence; -1 is the token before the tree.
TREES = [[-1, 0, 0, -1, 3, 2, 4, 6], [-1, 0, 1, 2, 3], [-1, -1, -1], []]
PROMPTS = (4, 9, 6, 2)


def path(parents: list[int], node: int) -> list[int]:
    """Nodes from the top of a tree to `node`."""
    return [] if node < 0 else [*path(parents, parents[node]), node]


def tokens_of(roots: list[int], nodes: list[list[int]], trees: list[list[int]]) -> TokenBatch:
    """The pass over a token and its tree in every sequence."""
    longest = 1 + max(map(len, trees))
    ids = torch.zeros(len(trees), longest, dtype=torch.long)
    valid = torch.zeros(len(trees), longest, dtype=torch.bool)
    parents = np.tile(np.arange(longest) - 1, (len(trees), 1))
    for i, tree in enumerate(trees):
        ids[i, : 1 + len(tree)] = torch.tensor([roots[i], *nodes[i]])
        valid[i, : 1 + len(tree)] = True
        parents[i, 1 : 1 + len(tree)] = np.array(tree, int) + 1
    return TokenBatch(ids, valid, parents=parents)


def run_trees(
    runner: DepthRunner, prompts: list[list[int]], nodes: list[list[int]], trees: list[list[int]]
) -> tuple[torch.Tensor, object]:
    """States of the last token of each prompt and of its tree, and the cache."""
    cache = runner.new_cache(len(prompts))
    longest = max(map(len, prompts)) - 1
    ids = torch.tensor([[0] * (longest + 1 - len(p)) + p[:-1] for p in prompts])
    valid = torch.tensor([[False] * (longest + 1 - len(p)) + [True] * len(p[:-1]) for p in prompts])
    runner.run(TokenBatch(ids, valid), 0, runner.n_layers, cache=cache)
    tokens, hidden = tokens_of([p[-1] for p in prompts], nodes, trees), None
    for lo, hi in ((0, 2), (2, runner.n_layers)):
        hidden = runner.run(tokens, lo, hi, cache=cache, hidden=hidden)
    assert hidden is not None
    return hidden, cache


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "sdpa") for family in FAMILIES), ("llama", "eager"), ("gemma3_text", "eager")],
)
def test_every_node_gets_what_it_gets_at_the_end_of_its_path(family: str, attention: str) -> None:
    model = tiny_model(family, attention=attention)
    runner = attach(model)
    assert runner.takes_trees
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, VOCABULARY, n).tolist() for n in PROMPTS]
    nodes = [draw.integers(3, VOCABULARY, len(tree)).tolist() for tree in TREES]
    states, _ = run_trees(runner, prompts, nodes, TREES)
    for i, tree in enumerate(TREES):
        for node in range(-1, len(tree)):
            ids = torch.tensor(prompts[i] + [nodes[i][n] for n in path(tree, node)])
            assert error(states[i, node + 1], full_depth(model, runner, ids)[-1]) < 1e-5


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_kv_of_any_path_of_any_tree_is_that_of_a_full_forward(data: st.DataObject) -> None:
    runner = RUNNER
    count = data.draw(st.integers(1, 3))
    trees = [
        [data.draw(st.integers(-1, k - 1)) for k in range(data.draw(st.integers(0, 12)))]
        for _ in range(count)
    ]
    token = st.integers(3, VOCABULARY - 1)
    prompts = [data.draw(st.lists(token, min_size=2, max_size=9)) for _ in range(count)]
    nodes = [[data.draw(token) for _ in tree] for tree in trees]
    _, cache = run_trees(runner, prompts, nodes, trees)
    paths = [path(tree, data.draw(st.integers(-1, len(tree) - 1))) for tree in trees]
    cache.keep_paths({i: (len(prompts[i]), kept) for i, kept in enumerate(paths)})
    cache.rollback([len(p) + len(kept) for p, kept in zip(prompts, paths, strict=True)])
    for i, kept in enumerate(paths):
        ids = torch.tensor([prompts[i] + [nodes[i][n] for n in kept]])
        fresh = runner.new_cache(1)
        runner.run(TokenBatch(ids), 0, runner.n_layers, cache=fresh)
        for layer in range(runner.n_layers):
            for own, expected in zip(cache.read(layer, i), fresh.read(layer, 0), strict=True):
                torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


RUNNER = attach(tiny_model("gemma3_text"))
