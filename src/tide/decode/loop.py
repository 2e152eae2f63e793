"""The decode step: from drafts to committed tokens, segment by segment.

One step drafts, runs the first segment on each sequence's newest tokens and evaluates the gate at
the checkpoint there. Where no sequence needs more, the step ends. Else the next segment runs over
everything that waits before it, for every sequence, and so on to full depth, whose predictions are
final. Where no gate is evaluated, one pass runs through to full depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tide.decode.batch import BatchState
from tide.decode.exit_stage import ExitStage
from tide.decode.fill import fill_above
from tide.decode.growth import TreeSource
from tide.decode.machinery import Listener, Machinery
from tide.decode.modes import Mode
from tide.decode.prefill import prefill_prompts
from tide.decode.sampler import Sampler
from tide.decode.schedule import Pass, next_pass, run_pass
from tide.decode.sources import DraftSource
from tide.decode.verify import Verifier
from tide.stats import ExitStats


class DecodeLoop:
    """Decodes one batch.

    Args:
        machinery: model, exits, settings, drafter.
        batch: prompts only.
        mode: what a prediction at a checkpoint means.
        verifier: commits and audits; its sampler picks tokens, its stats are filled.
        sources: draft sources by index of a sequence.
        listener: is told how it goes.
    """

    def __init__(
        self,
        machinery: Machinery,
        batch: BatchState,
        mode: Mode,
        verifier: Verifier,
        sources: Mapping[int, Sequence[DraftSource] | TreeSource],
        listener: Listener,
    ) -> None:
        self.runner, self.config = machinery.runner, machinery.config
        self.drafter, self.exits = machinery.drafter, machinery.exits
        self.clock = machinery.clock
        self.batch, self.mode, self.verifier = batch, mode, verifier
        self.sampler: Sampler = verifier.sampler
        self.stats: ExitStats = verifier.stats
        self.exit_stage = ExitStage(self.runner, self.exits, self.sampler)
        self.sources, self.listener = sources, listener

    def run(self) -> None:
        """Decode every sequence to its end."""
        self.verifier.verify(
            self.batch, *prefill_prompts(self.runner, self.exits, self.config, self.batch)
        )
        self.end_step()
        while self.batch.sequences:
            self.step()

    def step(self) -> None:
        """Give every sequence at least one token, or a draft of one."""
        began, batch = self.clock(), self.batch
        self.mode.start_step(batch)
        self.drafter.propose(batch, self.sources)
        segment = new = 0
        while True:
            work = next_pass(batch, segment, stops=self.mode.evaluates(batch))
            segment, new = work.last, new or work.longest
            if segment == batch.last:
                self.verifier.run(batch, work)
                self.mode.reached_full_depth(batch)
                break
            self.run_to_gate(work)
            if not any(self.mode.goes_deeper(batch, i) for i in range(len(batch.sequences))):
                break
            segment += 1
        if self.config.mode == "exit":
            # By the tokens that it began with, however deep it went and whatever it took along.
            self.drafter.costs.add(batch, new, self.clock() - began)
        elif segment == batch.last:  # with what exit heads have drafted since the last
            self.drafter.costs.add(batch, work.longest, self.clock() - began)
        self.stats.steps += 1
        self.end_step()

    def run_to_gate(self, work: Pass) -> None:
        """Run a pass with the gate at its end, and do with exits what they mean in this mode."""
        batch = self.batch
        if self.mode.evaluates(batch):
            spans = enumerate(work.spans)
            candidates = [self.mode.candidates(batch, i, span) for i, span in spans]
            self.exit_stage.run(batch, work, candidates)
            self.mode.apply(batch, self.verifier)
        else:
            run_pass(self.runner, batch, work)
        if self.config.kv_cache_strategy != "deferred":
            fill_above(self.runner, batch, work.last, self.config.kv_cache_strategy)

    def end_step(self) -> None:
        """Learn from drafts that are decided, stream, and drop finished sequences."""
        for sequence in self.batch.sequences:
            if (tree := sequence.tree) is not None:
                self.drafter.rates.record(tree.drafted or tree)
        for draft_type, drafted, accepted in self.batch.end_drafts():
            self.stats.count_drafts(draft_type, drafted, accepted)
            self.drafter.accepted.record(draft_type, drafted, accepted)
        for i in self.sampler.ended(self.batch.sequences):
            self.batch.finish(i)
        self.listener.on_step()
        self.sampler.forget(self.batch.sequences)
        finished = [sequence for sequence in self.batch.sequences if sequence.finished]
        if not finished:
            return
        if self.config.audit_tail and any(sequence.pending_audit for sequence in finished):
            self.audit_pending()
        if not self.listener.on_finished(finished):
            self.mode.stop_exits(self.batch)
        self.batch.keep_unfinished()

    def audit_pending(self) -> None:
        """Send all that waits to full depth, so that no exited token stays unaudited."""
        batch, segment = self.batch, 1
        while segment <= batch.last:
            if any(batch.waiting(segment)):
                work = next_pass(batch, segment, stops=False)
                segment = work.last
                if segment == batch.last:
                    self.verifier.run(batch, work)
                else:
                    run_pass(self.runner, batch, work)
            segment += 1
