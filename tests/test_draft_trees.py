"""Draft trees in the decode loop: output and KV are the model's own, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from test_drafter import batch_of
from test_generate import GREEDY, POLICIES, prompts
from test_generate import engine as with_exits
from tide.config import TIDEConfig
from tide.decode.drafter import Drafter
from tide.decode.exits import TreeWarning
from tide.decode.growth import NodeRates, TreeSource
from tide.decode.loop import DecodeLoop
from tide.decode.matches import ContextMatches
from tide.decode.pass_costs import pass_cost
from tide.decode.recycled import RecycledPredictions
from tide.decode.sources import CrossRequestNGrams
from tide.decode.tree import NO_ORIGIN, DraftTree
from tide.engine import TIDE
from tide.kernels.arithmetic import successors_of
from tide.models.cache import WaterlineCache
from tide.models.tokens import TokenBatch
from tiny import FAMILIES, VOCABULARY, tiny_model

EOS = [5, 40]
SAMPLED = {"do_sample": True, "top_k": 7, "temperature": 0.8, "repetition_penalty": 1.2}


def engine(model: Any, **config: Any) -> TIDE:
    """An engine that always drafts as large a tree as it may."""
    settings = {"mode": "lossless", "max_tree": 24, **config}
    made = TIDE(model, None, TIDEConfig(**settings), check=False)
    made.drafter.fixed = True
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_equal_generate_greedy_and_sampled(family: str) -> None:
    model = tiny_model(family)
    tide = engine(model)
    for sequences in (1, 4):
        kwargs = {**prompts(sequences), **GREEDY, "eos_token_id": None}
        expected = model.generate(**kwargs)
        for _ in range(2):  # the second time, what was predicted is recycled
            assert torch.equal(tide.generate(**kwargs), expected)
        stats = tide.last_stats
        assert stats.accepted["tree"] > 0
        assert stats.steps < expected.shape[1] - 9
        kwargs |= {**SAMPLED, "eos_token_id": EOS}
        torch.manual_seed(sequences)
        expected = model.generate(**kwargs)
        state = torch.get_rng_state()
        torch.manual_seed(sequences)
        assert torch.equal(tide.generate(**kwargs), expected)
        assert torch.equal(torch.get_rng_state(), state)


def oracle(texts: Sequence[Sequence[int]], draw: random.Random, right: float = 0.6) -> Any:
    """Random trees: the true continuation somewhere in them, duplicates, and tokens that end.

    Args:
        right: chance that a node goes on with the true continuation; at 0 none does.
    """

    def grow(self: TreeSource, tokens: Sequence[int], nodes: int, depth: int) -> DraftTree:
        tree, on_path, given = DraftTree(), {-1: 0}, len(tokens)
        text = next((t for t in texts if list(t[:given]) == list(tokens)), tokens)
        depths = {-1: 0}
        for node in range(draw.randint(0, nodes)):
            parent = draw.choice([p for p, d in depths.items() if d < depth] or [-2])
            if parent == -2:
                break
            token = draw.choice([draw.randrange(VOCABULARY), *EOS])
            place = on_path.get(parent, -1)
            if place >= 0 and given + place < len(text) and draw.random() < right:
                token = text[given + place]
                on_path[node] = place + 1
            elif not right and place >= 0 and text[given + place : given + place + 1] == [token]:
                token = (token + 1) % VOCABULARY
            depths[node] = depths[parent] + 1
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.origins.append(NO_ORIGIN)
            tree.chances.append(0.1)
        return tree

    return grow


def texts_of(outputs: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The sequences of a batch without left padding."""
    return [line[int((own == 0).sum()) :] for line, own in zip(outputs.tolist(), mask, strict=True)]


def exiting(model: Any, policy: str = "random", **config: Any) -> TIDE:
    """An engine in mode "exit" that always drafts as large a tree as it may."""
    return with_exits(model, "exit", policy, **{"max_tree": 24, "fixed_drafts": True, **config})


@pytest.mark.parametrize("mode", ["lossless", "exit"])
@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text"])
def test_kv_after_each_step_is_that_of_a_full_forward(
    family: str, sequences: int, mode: str, monkeypatch: Any
) -> None:
    model = tiny_model(family)
    tide = engine(model) if mode == "lossless" else exiting(model)
    kwargs = {**prompts(sequences), **GREEDY, "max_new_tokens": 40, "eos_token_id": EOS}
    plain = model if mode == "lossless" else exiting(model, drafts=())
    expected = plain.generate(**kwargs)
    texts = texts_of(expected, kwargs["attention_mask"])
    monkeypatch.setattr(TreeSource, "grow", oracle(texts, random.Random(0)))
    end_step = DecodeLoop.end_step
    moved: list[Any] = []
    keep_paths = WaterlineCache.keep_paths

    def noted(self: WaterlineCache, paths: Any) -> None:
        moved.append(paths)
        keep_paths(self, paths)

    monkeypatch.setattr(WaterlineCache, "keep_paths", noted)

    def checked(self: DecodeLoop) -> None:
        for i, sequence in enumerate(self.batch.sequences):
            known, fresh = self.batch.passed(i, 0), self.runner.new_cache(1)
            if not sequence.finished:
                assert known == sequence.committed - 1
            ids = torch.tensor([sequence.tokens[:known]])
            with self.runner.uncounted():
                self.runner.run(TokenBatch(ids), 0, self.runner.n_layers, cache=fresh)
            for segment, (lo, hi) in enumerate(self.batch.segments):
                passed = self.batch.passed(i, segment)
                waited.append(known - passed)
                for layer in range(lo, hi):
                    pairs = zip(
                        self.batch.cache.read(layer, i), fresh.read(layer, 0), strict=True
                    )  # fmt: skip
                    for own, whole in pairs:
                        torch.testing.assert_close(
                            own[:, :passed], whole[:, :passed], atol=1e-5, rtol=1e-5
                        )
        end_step(self)

    waited: list[int] = []
    monkeypatch.setattr(DecodeLoop, "end_step", checked)
    assert torch.equal(tide.generate(**kwargs), expected)
    assert moved and (max(waited) > 0) == (mode == "exit")
    assert tide.last_stats.accepted["tree"] > (10 if mode == "lossless" else 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees_and_acceptances_change_nothing(family: str, monkeypatch: Any) -> None:
    model, draw = tiny_model(family), random.Random(family)
    for sequences, right in ((1, 0.6), (4, 0.0), (4, 0.6)):
        tide = engine(model, max_tree=draw.choice([1, 5, 64]), max_draft=draw.choice([1, 3, 10]))
        kwargs = {**prompts(sequences), **GREEDY, "max_new_tokens": draw.randint(1, 30)}
        kwargs |= {"eos_token_id": EOS, **(SAMPLED if draw.random() < 0.5 else {})}
        torch.manual_seed(0)
        expected = model.generate(**kwargs)
        texts = texts_of(expected, kwargs["attention_mask"])
        monkeypatch.setattr(TreeSource, "grow", oracle(texts, draw, right))
        torch.manual_seed(0)
        assert torch.equal(tide.generate(**kwargs), expected)
        assert right or not sum(tide.last_stats.accepted.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_change_nothing_where_tokens_exit(family: str, monkeypatch: Any) -> None:
    """What exits, and as what, is the same with trees, with chains and without drafts."""
    model, draw = tiny_model(family), random.Random(family)
    for sequences, policy in ((1, "random"), (4, "adversarial"), (4, "random")):
        config = {"max_pending": draw.choice([1, 4, 16, 100]), "audit_tail": True}
        kwargs = {**prompts(sequences), **GREEDY, "max_new_tokens": draw.randint(8, 30)}
        kwargs |= {"eos_token_id": EOS, **(SAMPLED if draw.random() < 0.5 else {})}
        plain = exiting(model, policy, drafts=(), **config)
        torch.manual_seed(0)
        expected = plain.generate(**kwargs)
        texts = texts_of(expected, kwargs["attention_mask"])
        for grow in (TreeSource.grow, oracle(texts, draw)):
            monkeypatch.setattr(TreeSource, "grow", grow)
            most = draw.choice([1, 5, 64])
            tide = exiting(model, policy, max_tree=most, max_draft=draw.choice([1, 10]), **config)
            torch.manual_seed(0)
            assert torch.equal(tide.generate(**kwargs), expected)
            stats = tide.last_stats
            for counted in ("depths", "target_tokens", "losses", "audited", "differed"):
                assert getattr(stats, counted) == getattr(plain.last_stats, counted), counted
        monkeypatch.undo()


def test_the_layers_above_a_path_that_exits_do_not_run() -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(1), **GREEDY, "max_new_tokens": 60, "eos_token_id": None}
    tide = exiting(model, "always", max_pending=16)
    for _ in range(2):
        tide.generate(**kwargs)
    stats, calls = tide.last_stats, tide.runner.counts.calls
    assert stats.accepted["tree"] > 20 and stats.exits_per_layer == {1: 59}
    assert calls[0] == calls[1] == 1 + stats.steps < 40
    assert calls[2] == calls[-1] < 10  # the prompt, and a deep pass whenever 16 tokens wait


def test_many_tokens_may_wait_before_a_tree(monkeypatch: Any) -> None:
    model, kwargs = tiny_model("llama"), {**prompts(2), **GREEDY, "max_new_tokens": 200}
    kwargs["eos_token_id"] = None
    expected = exiting(model, "always", drafts=(), max_pending=150).generate(**kwargs)
    texts = texts_of(expected, kwargs["attention_mask"])
    monkeypatch.setattr(TreeSource, "grow", oracle(texts, random.Random(0)))
    tide = exiting(model, "always", max_pending=150, max_tree=64)
    assert torch.equal(tide.generate(**kwargs), expected)
    assert tide.last_stats.accepted["tree"] > 10


def test_nothing_is_asked_of_what_follows_the_end(monkeypatch: Any) -> None:
    """A node behind one that ends the text does not take the batch to full depth."""
    model, kwargs = tiny_model("llama"), {**prompts(1), **GREEDY, "max_new_tokens": 20}
    policy = POLICIES["always"]
    text = exiting(model, "always", drafts=()).generate(**kwargs, eos_token_id=None)[0].tolist()
    end = next(at for at in range(12, 29) if text[at] not in text[9:at])
    monkeypatch.setitem(POLICIES, "always", (lambda at, checkpoint: at.position < end, policy[1]))

    def grow(self: TreeSource, tokens: Sequence[int], nodes: int, depth: int) -> DraftTree:
        rest = text[len(tokens) : end + 2]
        size = len(rest)
        return DraftTree(rest, list(range(-1, size - 1)), [NO_ORIGIN] * size, [0.5] * size)

    monkeypatch.setattr(TreeSource, "grow", grow)
    tide = exiting(model, "always")
    output = tide.generate(**kwargs, eos_token_id=text[end])
    assert output[0].tolist() == text[: end + 1]
    assert tide.last_stats.steps == 1
    assert tide.runner.counts.calls[-1] == 1  # the prompt


def test_trees_beside_exit_drafts_equal_generate() -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(4), **GREEDY, "max_new_tokens": 60}
    expected = model.generate(**kwargs)
    tide = with_exits(model, "lossless", "always", max_tree=16, max_pending=4)
    for fixed in (True, False):
        tide.drafter.fixed = fixed
        assert torch.equal(tide.generate(**kwargs), expected)


def test_a_model_that_does_not_take_trees_drafts_chains_and_is_named(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    wrong = "tide.models.selfcheck._by_tree"
    monkeypatch.setattr(wrong, lambda runner, sequence: torch.ones(3, 32))
    with pytest.warns(TreeWarning, match="LlamaForCausalLM"):
        tide = TIDE(model, None, TIDEConfig(mode="lossless", max_tree=16))
    tide.drafter.fixed = True
    kwargs = {**prompts(1), **GREEDY, "max_new_tokens": 60}
    assert torch.equal(tide.generate(**kwargs), model.generate(**kwargs))
    assert tide.last_stats.drafted and "tree" not in tide.last_stats.drafted


def test_what_is_recycled_is_shared_unless_told_otherwise() -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(1), **GREEDY}
    steps = {}
    for share in (True, False):
        tide = engine(model, drafts=("recycled",), share_recycled=share)
        steps[share] = []
        for _ in range(2):
            tide.drafter.rates = NodeRates()  # which is shared in any case
            tide.generate(**kwargs)
            steps[share].append(tide.last_stats.steps)
    assert steps[True][0] == steps[False][0] == steps[False][1]
    assert steps[True][1] < steps[True][0]


@pytest.mark.parametrize("tree", [0, 24])
def test_answers_of_earlier_calls_are_drafted_if_asked_for(tree: int) -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(3), **GREEDY}
    expected, steps = model.generate(**kwargs), {}
    for drafts in (("context",), ("context", "cross-request")):
        tide = engine(model, drafts=drafts, max_tree=tree)
        for call in range(2):
            tide.drafter.rates = NodeRates()
            assert torch.equal(tide.generate(**kwargs), expected)
            steps[len(drafts), call] = tide.last_stats.steps
    assert steps[1, 0] == steps[1, 1] == steps[2, 0]
    assert steps[2, 1] < steps[2, 0]
    assert "cross-request" not in TIDEConfig().drafts


def test_what_was_never_right_is_tried_again() -> None:
    answers, rates = CrossRequestNGrams(), NodeRates()
    answers.learn([1, 2, 3, 4], 3)
    source = TreeSource(rates, None, None, None, answers)
    assert source.grow([1, 2, 3], 4, 4).origins == [(0, 0, 0, 0, 3)]
    steps = 0
    while (tree := source.grow([1, 2, 3], 4, 4)).tokens:
        tree.decide([0, 0])
        rates.record(tree)
        steps += 1
        assert steps < 10_000
    while not source.grow([1, 2, 3], 4, 4).tokens:
        steps -= 1
        assert steps > 0  # it does not take longer than it took to be given up


@pytest.mark.parametrize("size", [97, 512])
def test_the_likeliest_successors_are_found_in_groups(size: int) -> None:
    logits = torch.randn(20, size, generator=torch.Generator().manual_seed(0))
    logits[3] = logits[3].round()  # equals
    found = successors_of(logits, 8)
    assert torch.equal(found[:, 0], logits.argmax(-1))
    assert torch.equal(logits.gather(1, found[:, 1:]), logits.topk(8).values)
    assert all(len(set(line)) == 8 for line in found[:, 1:].tolist())


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_matches_are_as_long_as_they_can_be(tokens: list[int]) -> None:
    matches, tail = ContextMatches(), tokens[-8:]
    matches.grow(tokens)
    expected: dict[int, int] = {}
    for n in (3, 2, 1):
        places = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tail[-n:]]
        for end in places[-8:] if len(tail) >= n else []:
            shared = [a == b for a, b in zip(tail[::-1], tokens[:end][::-1], strict=False)]
            length = [*shared, False].index(False)
            expected[tokens[end]] = max(length, expected.get(tokens[end], 0))
        if expected:
            break
    assert matches.followers(tokens, tail) == expected


def test_the_likeliest_paths_come_first_and_sources_that_agree_are_one_node() -> None:
    recycled, rates = RecycledPredictions(), NodeRates()
    recycled.learn(1, 2, [3, 4])
    recycled.learn(2, 3, [9])
    source = TreeSource(rates, ContextMatches(), None, recycled)
    tree = source.grow([1, 2, 3, 9, 1, 2], 8, 4)
    assert tree.tokens[:2] == [3, 9] and tree.parents[:2] == [-1, 0]
    assert tree.origins[0] == (2, 0, 1, 1, 0)
    assert tree.chances == sorted(tree.chances, reverse=True)
    assert 4 in tree.tokens
    assert all(parent < node for node, parent in enumerate(tree.parents))
    before = rates.of(tree.origins[0])
    tree.decide([3, *([0] * 8)])
    assert tree.path == [0]
    rates.record(tree)
    assert rates.of(tree.origins[0]) > before


def test_the_rest_of_a_tree_follows_its_path() -> None:
    """Twice: what was drafted learns the whole path, the rest has numbers of its own."""
    parents = [-1, -1, 0, 1, 1, 3, 3, 6]
    size = len(parents)
    drafted = DraftTree(list(range(size)), parents, [NO_ORIGIN] * size, [0.5] * size)
    drafted.decide([1, *[None] * size])  # node 1, which has not exited
    assert drafted.path == [1] and not drafted.decided
    nodes, rest = drafted.rest()
    assert nodes == rest.tokens == [3, 4, 5, 6, 7]
    assert rest.parents == [-1, -1, 0, 0, 3]
    rest.decide([3, *[None] * 5])
    assert drafted.path == [1, 3] and not rest.decided
    nodes, rest = rest.rest()
    assert nodes == [2, 3, 4] and rest.tokens == [5, 6, 7] and rest.parents == [-1, -1, 1]
    rest.decide([6, None, 7, 90])
    assert rest.decided and rest.path == [1, 2] and drafted.path == [1, 3, 6, 7]


def test_sizes_of_trees_follow_what_passes_cost() -> None:
    class Bush(TreeSource):
        def grow(self, tokens: Sequence[int], nodes: int, depth: int) -> DraftTree:
            chances = [0.5 * 0.9**n for n in range(nodes)]
            return DraftTree([7] * nodes, [-1] * nodes, [NO_ORIGIN] * nodes, chances)

    sizes = []
    for cost in (dict.fromkeys([1, 65], 1.0), {1: 1.0, 9: 2.0, 65: 9.0}, {1: 1.0, 2: 4.0}):
        drafter, batch = Drafter(10, 64), batch_of(2, 100)
        drafter.costs.start(2, cost)
        bush = Bush(NodeRates(), None, None, None)
        drafter.propose(batch, {0: bush, 1: bush})
        sizes.append([sequence.open_drafts for sequence in batch.sequences])
    assert sizes[0] == [64, 64]
    assert 0 < sizes[1][0] <= 8
    assert sizes[2] == [0, 0]


def test_what_trees_gave_lately_bounds_what_is_expected_of_them() -> None:
    """Nodes are chosen by their chance, so those that look too good are chosen first."""
    costs = {1: 1.0, 2: 1.2, 3: 1.4, 5: 1.8, 9: 2.6}
    tree = DraftTree([1, 2, 3, 4], [-1, 0, 1, 2], [NO_ORIGIN] * 4, [0.8, 0.6, 0.5, 0.4])
    drafter = Drafter(limit=8, nodes=8)
    assert drafter.rates.held == 1 and drafter._best_length(costs, 1, [tree]) == 4
    for _ in range(200):
        tree.path = [0]  # 1 of 2.3
        drafter.rates.record(tree)
    assert drafter.rates.held == pytest.approx(1 / 2.3, rel=0.05)
    assert drafter._best_length(costs, 1, [tree]) == 2
    for _ in range(200):
        tree.path = []
        drafter.rates.record(tree)
    assert drafter._best_length(costs, 1, [tree]) == 0


def test_a_pass_is_not_taken_to_cost_more_than_a_longer_one() -> None:
    known = {1: 1.0, 5: 3.0, 6: 2.0}
    assert [pass_cost(known, n) for n in (1, 2, 3, 5, 6)] == [1.0, 1.5, 2.0, 2.0, 2.0]
    assert pass_cost(known, 7) > 2.0
