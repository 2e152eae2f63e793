"""A session: one `generate` call, from what transformers has prepared to what it returns."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from tide.decode.batch import BatchState
from tide.decode.growth import TreeSource
from tide.decode.loop import DecodeLoop
from tide.decode.machinery import Listener, Machinery
from tide.decode.matches import ContextMatches
from tide.decode.modes import Exit, Lossless, Mode, Off
from tide.decode.output import Output, sequences_of
from tide.decode.recycled import RecycledPredictions
from tide.decode.sampler import Sampler, stateful
from tide.decode.sequence import SequenceState
from tide.decode.sources import DraftSource, draft_sources
from tide.decode.verify import Verifier
from tide.errors import UnsupportedGenerationError
from tide.models.refuse import refuse_replaced_head
from tide.stats import ExitStats

# A tokenizer without a limit gives 10 ** 30 as one, for which there is no memory.
_MOST_NEW = 1 << 20


class FullDepthWarning(UserWarning):
    """A call runs at full depth although exits or drafts were wanted."""


@dataclass(frozen=True)
class GenerateCall:
    """What transformers hands to a decoding loop.

    Attributes:
        input_ids: left-padded prompts, `[sequences, tokens]`.
        attention_mask: 0 at padding; None if there is none.
        logits_processor, stopping_criteria, generation_config: as prepared.
        streamer: transformers' streamer, or None.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    logits_processor: Any
    stopping_criteria: Any
    generation_config: GenerationConfig
    streamer: Any = None

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence: a criterion that is given replaces that of the config.

        The first token is generated in any case, as by `generate`.
        """
        limit = int(self.stopping_criteria.max_length or self.generation_config.max_length)
        prompt = self.input_ids.shape[1]
        return min(max(limit, prompt + 1), prompt + _MOST_NEW)

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.attention_mask
        if not (ids.ndim == 2 and len(ids)) or ids.is_floating_point():
            raise UnsupportedGenerationError(
                f"input_ids are {ids.dtype} of shape {list(ids.shape)}; they must be whole "
                "numbers, [sequences, tokens], of at least one sequence."
            )
        if mask is not None and mask.shape != ids.shape:
            raise UnsupportedGenerationError(
                f"attention_mask has shape {list(mask.shape)}, and input_ids {list(ids.shape)}; "
                "they must be the same."
            )


class DecodeSession:
    """Decodes one batch.

    Args:
        machinery: model, exits, settings, drafter.
        call: what to decode.
        stats: counters to fill.
        on_finished: called with sequences that have ended; returns whether exits may go on.

    Attributes:
        sequences: all sequences of the batch, in the order given.
        sampler: picks tokens.
    """

    def __init__(
        self,
        machinery: Machinery,
        call: GenerateCall,
        stats: ExitStats,
        on_finished: Callable[[Sequence[SequenceState]], bool],
    ) -> None:
        ids, options = call.input_ids, call.generation_config
        pad = getattr(options, "_pad_token_tensor", None)
        padding = 0 if pad is None else int(pad)
        shape = (len(ids), call.max_length)
        contexts = torch.full(shape, padding, dtype=torch.long, device=ids.device)
        self.sequences = sequences_of(ids, call.attention_mask, contexts)
        self.sampler = Sampler(
            contexts, call.logits_processor, call.stopping_criteria, sample=bool(options.do_sample)
        )
        self.machinery = machinery
        config, runner = machinery.config, machinery.runner
        refuse_replaced_head(runner.model, runner.parts)
        self._output = Output(self.sequences, padding, call.streamer)
        self._input_ids = ids
        batch = BatchState(
            self.sequences,
            machinery.exits.segments(runner.n_layers),
            runner.new_cache(len(ids), call.max_length + machinery.nodes),
            config.max_pending,
        )
        recycled = machinery.recycled_for(s.index for s in self.sequences)
        self._loop = DecodeLoop(
            machinery,
            batch,
            mode_of(machinery),
            Verifier(
                runner,
                machinery.exits.target_head,
                self.sampler,
                stats,
                audits=config.kv_cache_strategy == "deferred",
                recycled=recycled,
            ),
            sources_of(machinery, self.sequences, recycled),
            Listener(self._output.stream, on_finished),
        )

    def run(self) -> Tensor:
        """The sequences, prompts included, `[sequences, length]`."""
        self._loop.run()
        self.sampler.finish(self.sequences)
        if "cross-request" in self.machinery.config.drafts:
            answers = self.machinery.answers
            for sequence in self.sequences:
                before = min(sequence.prompt, answers.n)
                answers.learn(sequence.tokens[sequence.prompt - before :], before)
        return self._output.finish(self._input_ids)

    def losses(self, draw: random.Random, rate: float, stats: ExitStats) -> list[float | None]:
        """For each sequence, the share of its new tokens that differ from full depth.

        Deferred KV audits as it goes, with the same processors and the same draws. Other KV is not
        what full depth would have made, so a share `rate` of sequences runs once more; where the
        likeliest token is not what is picked, that could not tell, and the loss is None.
        """
        config, runner = self.machinery.config, self.machinery.runner
        if config.mode != "exit":
            return [0.0] * len(self.sequences)
        if config.kv_cache_strategy == "deferred":
            return [sequence.loss for sequence in self.sequences]
        losses: list[float | None] = []
        for sequence in self.sequences:
            if draw.random() >= rate or not self.sampler.greedy:
                losses.append(None)
                continue
            ids = torch.tensor(sequence.tokens, device=runner.input_device)
            targets = runner.target_tokens(ids[:-1], sequence.prompt - 1)
            differ = [a != b for a, b in zip(targets, sequence.new_tokens, strict=True)]
            losses.append(sum(differ) / len(targets))
            stats.target_tokens[sequence.index][:] = targets
            for place, depth in enumerate(stats.depths[sequence.index]):
                if depth < runner.n_layers:
                    stats.audit(sequence.index, place, targets[place], differs=differ[place])
        return losses


def in_order(machinery: Machinery, call: GenerateCall) -> Machinery:
    """Full depth, token by token, where a logits processor or a criterion may carry state."""
    found = stateful([*call.logits_processor, *call.stopping_criteria])
    if not found or machinery.config.mode == "off":
        return machinery
    names = ", ".join(type(each).__name__ for each in found)
    warnings.warn(
        f"{names} may carry state from token to token, so this call runs at full depth, without "
        "drafts and exits. A logits processor or stopping criterion that looks at nothing but its "
        "arguments, and at each sequence by itself, may have the attribute tide_stateless = True.",
        FullDepthWarning,
        stacklevel=2,
    )
    return machinery.at_full_depth("off")


def mode_of(machinery: Machinery) -> Mode:
    """The mode in which a call decodes."""
    config = machinery.config
    if config.mode == "exit":
        return Exit()
    if config.mode == "lossless":
        drafts = "exit" in config.drafts and bool(machinery.exits.checkpoints)
        return Lossless(machinery.drafter, exit_drafts=drafts, clock=machinery.clock)
    return Off()


def sources_of(
    machinery: Machinery,
    sequences: Sequence[SequenceState],
    recycled: Mapping[int, RecycledPredictions] | None = None,
) -> Mapping[int, Sequence[DraftSource] | TreeSource]:
    """Draft sources by index of a sequence.

    None where tokens exit for good: a token on top of a draft could not, before it is known whether
    the draft is accepted.
    """
    config = machinery.config
    if config.mode == "off" or not config.max_draft or config.kv_cache_strategy != "deferred":
        return {sequence.index: () for sequence in sequences}
    table = machinery.exits.table if "table" in config.drafts else None
    context = "context" in config.drafts
    answers = machinery.answers if "cross-request" in config.drafts else None
    if machinery.nodes:
        rates = machinery.drafter.rates
        return {
            s.index: TreeSource(
                rates,
                ContextMatches() if context else None,
                table,
                recycled[s.index] if recycled else None,
                answers,
            )
            for s in sequences
        }
    return {
        sequence.index: draft_sources(
            table, context=context, index=sequence.ngrams, answers=answers
        )
        for sequence in sequences
    }
