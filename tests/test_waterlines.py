"""The bookkeeping of a batch holds for any order of passes, drafts, commits and rollbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from test_generate import GREEDY, engine, prompts
from tide.decode.batch import BatchState
from tide.decode.pack import pack_tokens
from tide.decode.schedule import next_pass, run_pass
from tide.decode.sequence import ExitRecord, SequenceState
from tide.decode.waterlines import Waterlines
from tide.models.cache import WaterlineCache
from tide.models.tokens import TokenBatch
from tiny import tiny_model


@given(
    segments=st.integers(1, 4),
    cap=st.integers(1, 5),
    sequences=st.integers(1, 3),
    data=st.data(),
)
def test_any_order_of_exit_decisions(
    segments: int, cap: int, sequences: int, data: st.DataObject
) -> None:
    """As the loop does it: one token per sequence and step; all that waits goes along."""
    lines = Waterlines(sequences, segments, cap)
    known = [0] * sequences
    passes: list[dict[tuple[int, int], int]] = [
        {} for _ in range(sequences)
    ]  # (token, segment) -> times
    for _ in range(data.draw(st.integers(1, 20), label="steps")):
        known = [n + 1 for n in known]
        for segment in range(segments):
            spans = [lines.waiting(s, segment, known[s]) for s in range(sequences)]
            lines.advance(segment, [len(span) for span in spans])
            for s, span in enumerate(spans):
                for token in span:
                    passes[s][token, segment] = passes[s].get((token, segment), 0) + 1
            for s in range(sequences):
                passed = lines.passed[s]
                assert passed == sorted(passed, reverse=True)  # never rises with depth
                assert lines.pending(s) <= cap
            exits = data.draw(st.booleans(), label="all exit")
            if exits and not any(lines.full(s) for s in range(sequences)):
                break
        if data.draw(st.booleans(), label="roll back"):
            s = data.draw(st.integers(0, sequences - 1), label="sequence")
            known[s] = data.draw(st.integers(0, known[s]), label="length")
            lines.rollback(s, known[s])
            passes[s] = {k: n for k, n in passes[s].items() if k[0] < known[s]}
    assert all(times == 1 for of in passes for times in of.values())  # at most once


def test_tokens_cannot_pass_a_segment_before_the_one_above() -> None:
    lines = Waterlines(sequences=2, segments=2, cap=4)
    lines.advance(0, [3, 1])
    with pytest.raises(ValueError, match="sequence 1: 2 tokens cannot pass segment 1"):
        lines.advance(1, [3, 2])


def test_finished_sequences_are_dropped() -> None:
    lines = Waterlines(sequences=3, segments=2, cap=4)
    lines.advance(0, [1, 2, 3])
    lines.keep([2, 0])
    assert lines.passed == [[3, 0], [1, 0]]
    assert lines.pending(0) == 3


SEGMENTS = [(0, 2), (2, 3), (3, 5)]
ROOM = 40


class CountingRunner:
    """Runs no model: a token's state is its id and the layers that it has passed.

    Keys are the ids of tokens, values the layer that has written them.
    """

    def run(
        self, tokens: TokenBatch, lo: int, hi: int, *, cache: WaterlineCache, hidden: Any = None
    ) -> Tensor:
        ids = tokens.ids.float()
        if hidden is None:
            hidden = torch.stack([ids, torch.zeros_like(ids)], -1)  # [sequences, tokens, 2]
        cache.open(tokens, (lo, hi))
        valid = torch.ones_like(ids, dtype=torch.bool) if tokens.valid is None else tokens.valid
        assert torch.equal(hidden[valid][:, 0], ids[valid])  # states of these tokens
        assert (hidden[valid][:, 1] == lo).all()  # which have passed the layers below
        for layer in range(lo, hi):
            keys = ids[:, None, :, None]
            cache.layers[layer].update(keys, torch.full_like(keys, float(layer)))
        cache.close(done=True)
        return hidden + torch.tensor([0.0, float(hi - lo)])

    def run_then(self, then: Any, tokens: TokenBatch, layers: Any, **options: Any) -> Any:
        return self.run(tokens, *layers, **options), None


class BatchMachine(RuleBasedStateMachine):
    """A batch against lists of tokens that are kept by hand."""

    @initialize(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=5))
    def start(self, lengths: list[int]) -> None:
        self.runner: Any = CountingRunner()
        contexts = torch.zeros(len(lengths), ROOM, dtype=torch.long)
        longest = max(lengths)
        sequences = []
        for i, n in enumerate(lengths):
            tokens = [1 + (3 * i + k) % 5 for k in range(n)]
            contexts[i, longest - n : longest] = torch.tensor(tokens)
            state = SequenceState(i, contexts[i], longest - n, tokens, prompt=n, committed=n)
            sequences.append(state)
        self.tokens = {s.index: list(s.tokens) for s in sequences}
        self.committed = {s.index: s.committed for s in sequences}
        cache = WaterlineCache(5, len(lengths), ROOM)
        self.batch = BatchState(sequences, SEGMENTS, cache, max_pending=6)
        prompts = [range(n) for n in lengths]
        packed = pack_tokens(sequences, prompts, left=True)
        self.runner.run(packed, 0, 5, cache=cache)
        self.batch.advance(0, self.batch.last, prompts)

    @property
    def unfinished(self) -> list[int]:
        return [i for i, s in enumerate(self.batch.sequences) if not s.finished]

    def pick(self, data: st.DataObject) -> tuple[int, SequenceState]:
        """An unfinished sequence."""
        i = data.draw(st.sampled_from(self.unfinished), label="sequence")
        return i, self.batch.sequences[i]

    @rule(data=st.data(), drafted=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def draft(self, data: st.DataObject, drafted: list[int]) -> None:
        i, sequence = self.pick(data)
        drafted, before = drafted[: sequence.room], sequence.drafted
        self.batch.draft(i, drafted, "context 1")
        self.tokens[sequence.index] += drafted
        assert sequence.drafted == before + len(drafted)

    @rule(data=st.data(), token=st.integers(1, 3), agree=st.booleans())
    def commit(self, data: st.DataObject, token: int, agree: bool) -> None:
        i, sequence = self.pick(data)
        known, at = self.tokens[sequence.index], self.committed[sequence.index]
        if at == len(known) and not sequence.room:
            return
        token = known[at] if agree and at < len(known) else token
        accepted = known[at : at + 1] == [token]
        assert self.batch.commit(i, token) == ("context 1" if accepted else None)
        if not accepted:
            known[at:] = [token]
        self.committed[sequence.index] += 1
        if not sequence.open_drafts:
            for _, drafted, taken in self.batch.end_drafts():
                assert 0 <= taken <= drafted

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        i, sequence = self.pick(data)
        bounds = self.committed[sequence.index], len(self.tokens[sequence.index])
        length = data.draw(st.integers(*bounds), label="length")
        self.batch.rollback(i, length)
        del self.tokens[sequence.index][length:]

    @rule(data=st.data())
    def record_exit(self, data: st.DataObject) -> None:
        _, sequence = self.pick(data)
        at = data.draw(st.integers(sequence.committed - 1, len(sequence.tokens) - 1), label="at")
        sequence.exits[at] = ExitRecord(1, 1, 0.5)

    @precondition(lambda self: len(self.unfinished) > 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        i, sequence = self.pick(data)
        self.batch.finish(i)
        del self.tokens[sequence.index][self.committed[sequence.index] :]
        assert sequence.finished

    @precondition(lambda self: len(self.unfinished) < len(self.batch.sequences))
    @rule()
    def keep_unfinished(self) -> None:
        wanted = {s.index for s in self.batch.sequences if not s.finished}
        self.batch.keep_unfinished()
        assert {s.index for s in self.batch.sequences} == wanted

    @precondition(lambda self: any(self.batch.waiting(0)))
    @rule(stops=st.booleans())
    def run_new_tokens(self, stops: bool) -> None:
        self.run_from(0, stops)

    @precondition(lambda self: any(any(self.batch.waiting(s)) for s in (1, 2)))
    @rule(data=st.data(), stops=st.booleans())
    def run_pending_tokens(self, data: st.DataObject, stops: bool) -> None:
        some = [s for s in (1, 2) if any(self.batch.waiting(s))]
        self.run_from(data.draw(st.sampled_from(some), label="segment"), stops)

    def run_from(self, segment: int, stops: bool) -> None:
        work = next_pass(self.batch, segment, stops=stops)
        states, _ = run_pass(self.runner, self.batch, work)
        for i, span in enumerate(work.spans):
            tokens = self.tokens[self.batch.sequences[i].index]
            expected = [tokens[position] for position in span]
            assert states[i, : len(span), 0].tolist() == expected
            # After a pass the cache holds what the waterlines mean, and no more.
            for segment, (lo, hi) in enumerate(SEGMENTS):
                held = {self.batch.cache.lengths(layer)[i] for layer in range(lo, hi)}
                assert held == {self.batch.passed(i, segment)}

    @invariant()
    def in_step(self) -> None:
        if not hasattr(self, "batch"):
            return
        for i, sequence in enumerate(self.batch.sequences):
            tokens = self.tokens[sequence.index]
            assert sequence.tokens == tokens
            assert sequence.committed == self.committed[sequence.index]
            shown = sequence.context[sequence.padding : sequence.padding + len(tokens)]
            assert shown.tolist() == tokens
            assert all(at < len(tokens) for at in sequence.exits)
            passed = [self.batch.passed(i, segment) for segment in range(3)]
            assert passed == sorted(passed, reverse=True)
            assert passed[0] <= len(tokens)
            assert self.batch.pending(i) == passed[0] - passed[-1]
            for segment, (lo, hi) in enumerate(SEGMENTS):
                for layer in range(lo, hi):
                    keys, values = self.batch.cache.read(layer, i)
                    assert keys[0, : passed[segment], 0].tolist() == tokens[: passed[segment]]
                    assert (values[0, : passed[segment]] == layer).all()
                if segment:
                    held = self.batch._pending._states[i][segment]
                    waiting = [[tokens[at], lo] for at in self.batch.waiting(segment)[i]]
                    assert ([] if held is None else held.tolist()) == waiting


BatchMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderKeepsABatchInStep = BatchMachine.TestCase


@pytest.mark.parametrize("finished", [(0,), (1, 4), (5,), (0, 1, 2), (0, 2, 3, 5)])
def test_only_the_last_sequences_move_into_gaps(finished: tuple[int, ...]) -> None:
    contexts = torch.zeros(6, 8, dtype=torch.long)
    sequences = [SequenceState(i, contexts[i], 0, [i], prompt=1, committed=1) for i in range(6)]
    batch = BatchState(sequences, SEGMENTS, WaterlineCache(5, 6, 8), max_pending=4)
    runner: Any = CountingRunner()
    run_pass(runner, batch, next_pass(batch, 0, stops=False))
    addresses = [layer.keys.data_ptr() for layer in batch.cache.layers]
    for i in finished:
        batch.finish(i)
    batch.keep_unfinished()
    kept = [sequence.index for sequence in batch.sequences]
    assert sorted(kept) == [i for i in range(6) if i not in finished]
    for i, index in enumerate(kept):
        assert index == i or (i in finished and index >= len(kept))
        assert batch.cache.read(4, i)[0].flatten().tolist() == [index]
    # In place: no other line is copied.
    assert [layer.keys.data_ptr() for layer in batch.cache.layers] == addresses


def test_a_batch_that_shrinks_moves_few_sequences(monkeypatch: Any) -> None:
    moves: list[tuple[int, int]] = []  # lines that change place, gaps that there are
    keep = WaterlineCache.keep

    def spy(self: WaterlineCache, sequences: Any) -> None:
        moved = [s for to, s in enumerate(sequences) if s != to]
        gaps = len(set(range(len(sequences))) - set(sequences))
        moves.append((len(moved), gaps))
        keep(self, sequences)

    monkeypatch.setattr(WaterlineCache, "keep", spy)
    model = tiny_model("llama")
    ends = {"eos_token_id": list(range(3, 20)), "repetition_penalty": 1.5}
    kwargs = {**prompts(4), **GREEDY, **ends}
    tide = engine(model, "lossless", "random", fixed_drafts=True)
    assert torch.equal(tide.generate(**kwargs), model.generate(**kwargs))
    assert len(moves) >= 2 and any(moved for moved, _ in moves)
    assert all(moved == gaps for moved, gaps in moves)
