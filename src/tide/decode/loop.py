"""Gives the loop: decode a batch so that easy tokens stop early and deep layers catch up later.

One step: run the first segment on each row's newest tokens and ask at the checkpoint there. Where
all rows are sure, the step is over. Where one is not, the next segment runs over all that waits
before it, for every row, and so on to full depth, whose word is final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tide.config import TIDEConfig
from tide.decode.choose import Chooser
from tide.decode.columns import columns, finish_by_tail, stack
from tide.decode.drafts import DraftLength, DraftSource, Trial
from tide.decode.exits import Exits
from tide.decode.ledges import Ledges
from tide.decode.prefill import prefill
from tide.decode.rows import Left, Row
from tide.decode.waterline import Waterlines
from tide.exits.hints import Hint, RowHints
from tide.exits.policy import Decision, Place
from tide.models.depth import DepthRunner
from tide.stats import ExitStats


@dataclass
class _Round:
    """The steps from one pass at full depth to the next.

    Attributes:
        began: when.
        settled: tokens of all rows that were settled then.
        exits_guess: whether exit heads guess in it.
    """

    began: float
    settled: int
    exits_guess: bool


class DepthDecoder:
    """Decodes one batch.

    Args:
        runner: attached to the model.
        exits: its exits; none in mode "off".
        config: mode and limits.
        rows: the batch, prompts only.
        chooser: from logits to tokens.
        sources: for each row, its draft sources.
        lengths: how many tokens to guess; remembers between calls.
        exit_trial: whether guesses by the exit head pay; remembers between calls.
        stats: counters to fill.
        on_settled: called after each step, to stream.
        on_finished: called with rows that have ended, once all is known of them; says whether exits
            may go on.
    """

    def __init__(
        self,
        runner: DepthRunner,
        exits: Exits,
        config: TIDEConfig,
        rows: Sequence[Row],
        chooser: Chooser,
        sources: Sequence[Sequence[DraftSource]],
        lengths: DraftLength,
        exit_trial: Trial,
        stats: ExitStats,
        on_settled: Callable[[], None] = lambda: None,
        on_finished: Callable[[Sequence[Row]], bool] = lambda rows: True,
    ) -> None:
        self.runner, self.exits, self.config, self.chooser = runner, exits, config, chooser
        self.lengths, self.exit_trial = lengths, exit_trial
        self.stats, self.on_settled, self.on_finished = stats, on_settled, on_finished
        self.lossless = config.mode == "lossless"
        self.segments = exits.segments(runner.n_layers)
        self.rows = list(rows)
        self.sources = {row.index: list(s) for row, s in zip(rows, sources, strict=True)}
        self.cache = runner.new_cache(len(rows))
        self.waterlines = Waterlines(len(rows), len(self.segments), config.max_pending)
        self.ledges = Ledges(len(rows), len(self.segments))
        self.hints = {row.index: RowHints(exits.table) for row in rows}
        self._round: _Round | None = None
        self._exits_are_on = True

    @property
    def last(self) -> int:
        """The deepest segment."""
        return len(self.segments) - 1

    def decode(self) -> None:
        """Decode every row to its end."""
        self.prefill()
        while self.rows:
            self.step()

    def prefill(self) -> None:
        """Run the prompts and settle each row's first token, at full depth."""
        counts = [len(row.tokens) for row in self.rows]
        prompts = [range(count) for count in counts]
        ids, valid = columns(self.rows, prompts, self.runner.input_device, left=True)
        if self.config.prefill_exit:
            valid = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
            numbers = [row.index for row in self.rows]
            done = prefill(self.runner, self.exits, self.config, self.cache, ids, valid, numbers)
            last = done.last[:, None]
        else:
            n = self.runner.n_layers
            last = self.runner.run(ids, 0, n, cache=self.cache, valid=valid)[:, -1:]
        for segment in range(len(self.segments)):
            self.waterlines.advance(segment, counts)
        self._settle_at_full_depth([range(count - 1, count) for count in counts], last)
        self._end_step()

    def step(self) -> None:
        """Give every row at least one token, or a guess at one."""
        began = time.perf_counter()
        if self._round is None:
            self._round = _Round(began, sum(row.settled for row in self.rows), self._exits_guess())
        self._guess()
        fed = [passed[0] for passed in self.waterlines.passed]
        chunk = max(len(row.tokens) - fed[r] for r, row in enumerate(self.rows))
        segment = 0
        while True:
            segment, spans, states = self._pass(segment)
            if segment == self.last:
                self._settle_at_full_depth(spans, states)
                self._end_round(chunk, began)
                break
            self._put_on_ledge(segment, spans, states)
            self._ask(segment)
            if self.config.kv_cache_strategy != "deferred":
                self._fill_above(segment)
            if not any(self._goes_deeper(r, row) for r, row in enumerate(self.rows)):
                break
            segment += 1
        self.stats.rounds += 1
        self._end_step()

    def _exits_guess(self) -> bool:
        """Mode "lossless": whether the exit heads are to guess until the next deep pass."""
        if not self.lossless or "exit" not in self.config.drafts or not self.exits.checkpoints:
            return False
        return self.config.fixed_drafts or self.exit_trial.choose()

    def _end_round(self, chunk: int, began: float) -> None:
        """Remember what the way to this deep pass has cost and given."""
        assert self._round is not None
        now = time.perf_counter()
        self.lengths.cost(chunk, now - began)
        tokens = sum(row.settled for row in self.rows) - self._round.settled
        if self.lossless and not any(row.guessed_by not in (None, "exit") for row in self.rows):
            self.exit_trial.outcome(self._round.exits_guess, tokens, now - self._round.began)
        self._round = None

    # ---- a step, part by part

    def _guess(self) -> None:
        """Let draft sources guess for every row that has no guesses."""
        for r, row in enumerate(self.rows):
            if row.guesses:
                continue
            room = min(
                self.config.max_pending - self.waterlines.pending(r) - 1,
                len(row.context) - row.padding - len(row.tokens) - 1,
            )
            limit = min(self.lengths.limit, room)
            if limit < 1:
                continue
            found = self.lengths.accepted.best(self.sources[row.index], row.tokens, limit)
            if found is not None:
                for token in found.tokens[: self.lengths.choose(found.kind)]:
                    row.guess(token, found.kind)

    def _pass(self, segment: int) -> tuple[int, list[range], Tensor]:
        """Run a segment over everything that waits before it.

        Runs on through the next ones in the same pass, as far as nobody waits or is asked between.

        Returns:
            The last segment run, the positions run in each row, and their states.
        """
        spans = [
            self.waterlines.ledge(r, segment, len(row.tokens)) for r, row in enumerate(self.rows)
        ]
        ids, valid = columns(self.rows, spans, self.runner.input_device)
        hidden = None
        if segment:
            hidden = stack(
                [self.ledges.take(r, segment, len(s)) if s else None for r, s in enumerate(spans)]
            )
        through = segment
        while through < self.last and not self._asks() and not self._waiting_before(through + 1):
            through += 1
        lo, hi = self.segments[segment][0], self.segments[through][1]
        states = self.runner.run(ids, lo, hi, cache=self.cache, hidden=hidden, valid=valid)
        for passed in range(segment, through + 1):
            self.waterlines.advance(passed, [len(span) for span in spans])
        return through, spans, states

    def _asks(self) -> bool:
        """Whether any row is to be asked at a checkpoint."""
        if not self.lossless:
            return self._exits_are_on
        return any(self._may_guess_early(r, row) for r, row in enumerate(self.rows))

    def _waiting_before(self, segment: int) -> bool:
        """Whether any row has tokens on the ledge before `segment`."""
        return any(
            self.waterlines.ledge(r, segment, len(row.tokens)) for r, row in enumerate(self.rows)
        )

    def _may_guess_early(self, r: int, row: Row) -> bool:
        """Mode "lossless": a guess is made on the newest token, not on top of a draft."""
        drafted = row.guesses > 0 and row.guessed_by != "exit"
        guesses = self._round is not None and self._round.exits_guess
        return guesses and not drafted and not self.waterlines.full(r)

    def _put_on_ledge(self, segment: int, spans: list[range], states: Tensor) -> None:
        for r, span in enumerate(spans):
            if span:
                self.ledges.put(r, segment + 1, states[r, : len(span)])

    def _ask(self, segment: int) -> None:
        """Ask at the checkpoint after `segment` for every token whose successor is open."""
        if not self._asks():
            return
        at: list[tuple[int, int]] = []  # (row of the batch, position)
        for r, row in enumerate(self.rows):
            at += [(r, position) for position in self._open_positions(r, row, segment)]
        if not at:
            return
        states = torch.stack([self._waiting(r, segment, position) for r, position in at])
        places = [Place(self.rows[r].index, position) for r, position in at]
        decision = self.exits.policy.decide(
            segment,
            states,
            places,
            lambda chosen: self._read(segment, [at[k] for k in chosen]),
            lambda chosen: [self._hint(*at[k]) for k in chosen],
        )
        if decision.leaves:
            self._leave(segment, decision, [at[k] for k in decision.leaves])
        for r, row in enumerate(self.rows):
            if self.lossless:
                self._guess_early(row)
            else:
                self._settle(r, row)

    def _leave(self, segment: int, decision: Decision, at: Sequence[tuple[int, int]]) -> None:
        """Note how tokens leave at the checkpoint after `segment`."""
        assert decision.logits is not None
        here = [(self.rows[r], position) for r, position in at]
        plain, readout = self.chooser.plain, self.exits.readout
        logits = decision.logits if plain else readout.widen(decision.logits)
        scores = self.chooser.scores(here, logits)
        said = self.chooser.pick(here, scores)
        if plain:
            said = readout.tokens(torch.tensor(said)).tolist()
        # Processors may have ruled out every token that a reduced vocabulary has.
        barred = [False] * len(here) if plain else scores.isneginf().all(-1).tolist()
        for k, (row, position) in enumerate(here):
            if not barred[k]:
                layer = self.exits.checkpoints[segment].layer
                row.left[position] = Left(layer, said[k], decision.scores[decision.leaves[k]])

    def _open_positions(self, r: int, row: Row, segment: int) -> Iterable[int]:
        """Positions at a checkpoint that have not left, and whose successor is not settled."""
        if self.lossless:
            if not self._may_guess_early(r, row):
                return ()
            first = len(row.tokens) - 1
        else:
            first = row.settled - 1
        reached = range(first, self.waterlines.passed[r][segment])
        return [position for position in reached if position not in row.left]

    def _guess_early(self, row: Row) -> None:
        """Mode "lossless": what the exit head says is a guess, to be checked by a deep pass."""
        left = row.left.pop(len(row.tokens) - 1, None)
        # The last token that there is room for need not be guessed: nothing follows it.
        if left is not None and row.padding + len(row.tokens) < len(row.context) - 1:
            row.guess(left.token, "exit")

    def _settle_at_full_depth(self, spans: list[range], states: Tensor) -> None:
        """Settle what is open with the full model's word, and check what had left early."""
        at = [
            (r, position, k)
            for r, span in enumerate(spans)
            for k, position in enumerate(span)
            if position >= self.rows[r].settled - 1 or position in self.rows[r].early
        ]
        if not at:
            return
        picked = torch.stack([states[r, k] for r, _, k in at])
        here = [(self.rows[r], position) for r, position, _ in at]
        scores = self.chooser.scores(here, self.runner.logits(picked))
        said = self.chooser.pick(here, scores)
        for r, row in enumerate(self.rows):
            full = {position: said[k] for k, (s, position, _) in enumerate(at) if s == r}
            self._settle(r, row, full)
            for position in [i for i in row.early if i in full]:
                differs = row.early.pop(position) != full[position]
                row.full[position + 1 - row.prompt] = full[position]
                row.differed += differs
                self.stats.audit(differs)

    def _settle(self, r: int, row: Row, full: Mapping[int, int] | None = None) -> None:
        """Settle the tokens of a row in order, up to the first of which nothing final is known.

        A token that left is settled by what its exit head said, however deep it has gone since: its
        batch mates and guesses may have taken it along, and must not change what is said.

        Args:
            full: what full depth says after each position that it has seen.
        """
        full, as_guessed = full or {}, True
        while as_guessed and not row.finished:
            position = row.settled - 1
            left = row.left.pop(position, None)
            if left is not None:
                token, depth, score = left.token, left.layer + 1, left.score
                self.stats.exit_at(left.layer)
                if self.config.kv_cache_strategy == "deferred":
                    row.early[position] = token
            elif position in full:
                token, depth, score = full[position], self.runner.n_layers, float("nan")
                self.stats.full_depth()
            else:
                return
            as_guessed = row.guesses > 0 and row.tokens[row.settled] == token
            if not as_guessed:
                self._fall_back(r, row, row.settled)
                row.append(token)
            row.settled += 1
            row.accepted += as_guessed
            row.depths.append(depth)
            row.scores.append(score)
            row.sources.append(row.guessed_by if as_guessed else None)
            row.full.append(None if left is not None else token)
            if self.chooser.ends(row):
                row.finished = True
                self._fall_back(r, row, row.settled)

    def _fall_back(self, r: int, row: Row, length: int) -> None:
        """Forget the guesses of a row, and all that was computed for them."""
        row.truncate(length)
        self.waterlines.fall_back(r, length)
        for segment in range(1, len(self.segments)):
            waiting = self.waterlines.ledge(r, segment, length)
            self.ledges.cut(r, segment, len(waiting))

    def _fill_above(self, segment: int) -> None:
        """`propagate`, `zero_pad`: tokens that have left write K and V above, and are done."""
        counts = []
        for r, row in enumerate(self.rows):
            done = min(self.waterlines.passed[r][segment], row.settled - 1)
            counts.append(max(0, done - self.waterlines.passed[r][segment + 1]))
        if not any(counts):
            return
        self._sync_cache()
        spans = [
            range(
                self.waterlines.passed[r][segment + 1], self.waterlines.passed[r][segment + 1] + n
            )
            for r, n in enumerate(counts)
        ]
        ids, valid = columns(self.rows, spans, self.runner.input_device)
        states = stack(
            [self.ledges.take(r, segment + 1, n) if n else None for r, n in enumerate(counts)]
        )
        lo, hi = self.segments[segment][1], self.runner.n_layers
        if self.config.kv_cache_strategy == "propagate":
            self.runner.fill_kv(ids, lo, hi, cache=self.cache, hidden=states, valid=valid)
        else:
            self.cache.append_zeros(lo, hi, counts)
        for above in range(segment + 1, len(self.segments)):
            self.waterlines.advance(above, counts)

    def _goes_deeper(self, r: int, row: Row) -> bool:
        """Whether a row still has no successor to its newest token, or no room to wait."""
        if row.finished:
            return False
        known = len(row.tokens) if self.lossless and row.guessed_by == "exit" else row.settled
        return self.waterlines.passed[r][0] >= known or self.waterlines.full(r)

    def _end_step(self) -> None:
        """Bring the cache down to the waterlines, stream, and let finished rows go."""
        self._sync_cache()
        for row in self.rows:
            if row.guessed_by and not row.guesses:
                self.stats.drafts(row.guessed_by, row.guessed, row.accepted)
                self.lengths.accepted.outcome(row.guessed_by, row.guessed, row.accepted)
                row.guessed_by, row.guessed, row.accepted = None, 0, 0
        self.on_settled()
        self.chooser.forget(self.rows)
        finished = [r for r, row in enumerate(self.rows) if row.finished]
        if not finished:
            return
        if self.config.audit_tail and any(self.rows[r].early for r in finished):
            self._check_all_that_waits()
        if not self.on_finished([self.rows[r] for r in finished]):
            self._stop_exits()
        kept = [r for r, row in enumerate(self.rows) if not row.finished]
        self.rows = [self.rows[r] for r in kept]
        self.waterlines.keep(kept)
        self.ledges.keep(kept)
        if kept:
            self.cache.keep(kept)

    def _stop_exits(self) -> None:
        """From the next token on, let full depth say everything."""
        self._exits_are_on = False
        for row in self.rows:  # what had left on top of guesses is not said yet
            row.left.clear()

    def _check_all_that_waits(self) -> None:
        """Send all that waits to full depth, so that no early token stays unchecked."""
        segment = 0
        while segment < self.last:
            segment += 1
            if self._waiting_before(segment):
                segment, spans, states = self._pass(segment)
                if segment < self.last:
                    self._put_on_ledge(segment, spans, states)
        self._settle_at_full_depth(spans, states)

    def _sync_cache(self) -> None:
        known = [passed[0] for passed in self.waterlines.passed]
        if any(self.cache.lengths(0)[r] > k for r, k in enumerate(known)):
            self.cache.fall_back(known)

    def _waiting(self, r: int, segment: int, position: int) -> Tensor:
        """The state of a token at the checkpoint after `segment`, `[hidden]`."""
        states = self.ledges.look(r, segment + 1)
        return states[position - self.waterlines.passed[r][segment + 1]]

    def _hint(self, r: int, position: int) -> Hint:
        row = self.rows[r]
        return self.hints[row.index].at(row.tokens, position, row.settled)

    def _read(self, segment: int, at: Sequence[tuple[int, int]]) -> Tensor:
        """Logits of the exit head at a checkpoint for some tokens, `[n, v]`."""
        head = self.exits.checkpoints[segment].head
        states = head.lift(torch.stack([self._waiting(r, segment, p) for r, p in at]))
        if head.tail_layers:
            states = finish_by_tail(
                self.runner, self.cache, self.rows, head.tail_layers, at, states
            )
        return self.exits.readout(states)
