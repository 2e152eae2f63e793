"""The sampler: from logits to tokens, with transformers' own processors and criteria.

A draw is made as `torch.multinomial` makes it: the likeliest token after dividing the probabilities
by exponential noise. The noise belongs to the sequence and the place of the token, and is drawn in
the order in which `generate` draws it. So the exit heads and the full model divide by the same
noise at a place: a draft is accepted where full depth draws the same token, and the output is the
full model's own draw whatever was drafted. With the same seed, it is what `generate` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, MaxTimeCriteria
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, StopStringCriteria

from tide.decode.noise import PlacedNoise
from tide.decode.sequence import SequenceState

# A token whose successor is wanted: its sequence and its position there.
At = tuple[SequenceState, int]

# Processors of transformers that look at nothing but what they are given, each sequence by itself.
_STATELESS = {
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper",
        "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
    )
    if hasattr(logits_process, name)
}  # fmt: skip


# Criteria of transformers that look at each sequence by itself. The first two are never called:
# what they say is known without it.
_UNCALLED = MaxLengthCriteria, EosTokenCriteria
_BY_SEQUENCE = StopStringCriteria, MaxTimeCriteria


def stateful(given: Sequence[Any]) -> list[Any]:
    """Logits processors and stopping criteria that may carry state, or look at a whole batch.

    They must see every token once, in order, and no draft. One of your own that looks at nothing
    but its arguments, and at each sequence by itself, may have `tide_stateless = True`.
    """
    known = {*_STATELESS, *_UNCALLED, *_BY_SEQUENCE}
    return [
        each for each in given
        if type(each) not in known and not getattr(each, "tide_stateless", False)
    ]  # fmt: skip


def _place(sequence: SequenceState, position: int) -> int:
    """Where the token after a position stands in its context."""
    return sequence.padding + sequence.place(position) + 1


class Sampler:
    """Picks tokens as `generate` would: processors, then argmax or a draw; then criteria.

    Args:
        contexts: tokens of all sequences as `generate` shows them to processors and criteria, on
            the device where it does, `[sequences, room]`; sequences share it.
        processors: transformers' prepared logits processors.
        criteria: transformers' prepared stopping criteria.
        sample: draw, instead of taking the likeliest.
    """

    def __init__(self, contexts: Tensor, processors: Any, criteria: Any, *, sample: bool) -> None:
        self.contexts, self.processors, self.sample = contexts, processors, sample
        self.ordered = bool(stateful(processors))
        self._noise = PlacedNoise(len(contexts))
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self._max_length = min(lengths, default=contexts.shape[1])
        ends = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
        self._eos = {token for ids in ends for token in ids.tolist()}
        # Criteria of which nothing is known are shown the whole batch, once in each step.
        self._of_batch = type(criteria)(stateful(criteria))
        self._by_line = [
            c for c in criteria if type(c) not in _UNCALLED and c not in self._of_batch
        ]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken as it is."""
        return not self.processors and not self.sample

    def scores(self, at: Sequence[At], logits: Tensor) -> Tensor:
        """Processed scores for the token after each position, `[n, vocabulary]`."""
        if not self.processors:
            return logits
        logits = logits.to(self.contexts.device, torch.float32)
        out = torch.empty_like(logits)
        by_length: dict[int, list[int]] = {}
        for k, (sequence, position) in enumerate(at):
            by_length.setdefault(_place(sequence, position), []).append(k)
        for length, here in sorted(by_length.items()):
            lines = [at[k][0].index for k in here]
            if self.ordered:
                # The whole batch, as `generate` shows it; sequences that have ended only fill it.
                whole = logits.new_zeros(len(self.contexts), logits.shape[1])
                whole[lines] = logits[here]
                out[here] = self.processors(self.contexts[:, :length], whole)[lines]
            else:
                every = lines == list(range(len(self.contexts)))
                contexts = (self.contexts if every else self.contexts[lines])[:, :length]
                paths = [at[k][0].path_to(at[k][1]) for k in here]
                if any(paths):  # what a tree drafts is no text yet
                    contexts = contexts.clone()
                    for line, path in enumerate(paths):
                        contexts[line, length - len(path) :] = contexts.new_tensor(path)
                out[here] = self.processors(contexts, logits[here])
        return out

    def pick(self, at: Sequence[At], scores: Tensor) -> Tensor:
        """The token after each position, `[n]`, from its processed scores, `[n, vocabulary]`.

        -1 where it is to be drawn and the scores give no probabilities: one is NaN or infinite, or
        all are ruled out.
        """
        if not self.sample:
            return scores.argmax(-1)
        places = [(s.index, _place(s, position)) for s, position in at]
        probabilities = scores.float().softmax(-1)
        drawn = (probabilities / self._noise.at(places, scores)).argmax(-1)
        return drawn.masked_fill(probabilities[:, 0].isnan(), -1)  # if one is NaN, all are

    def stops(self, token: int) -> bool:
        """Whether a sequence ends with this token, wherever it comes."""
        return token in self._eos

    def ends(self, sequence: SequenceState) -> bool:
        """Whether a sequence ends with its last committed token."""
        length = sequence.padding + sequence.committed
        if length >= self._max_length or self.stops(sequence.tokens[sequence.committed - 1]):
            return True
        line = slice(sequence.index, sequence.index + 1)
        return any(bool(c(self.contexts[line, :length], None)) for c in self._by_line)

    def ended(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Which of the sequences end by a criterion of the whole batch; called once a step."""
        if not self._of_batch:
            return []
        length = max(s.padding + s.committed for s in sequences)
        ended = self._of_batch(self.contexts[:, :length], None).tolist()
        return [i for i, s in enumerate(sequences) if ended[s.index] and not s.finished]

    def finish(self, sequences: Sequence[SequenceState]) -> None:
        """Set torch's generator back to where `generate` has it: drafts may have drawn more."""
        self._noise.rewind(max(s.padding + s.committed for s in sequences))

    def forget(self, sequences: Sequence[SequenceState]) -> None:
        """Drop the noise of places that are decided for all sequences."""
        # Exited tokens are picked once more, by full depth, when they are audited.
        open_places = [
            s.padding + min(s.pending_audit, default=s.committed - 1) + 1 for s in sequences
        ]
        self._noise.forget_before(min(open_places, default=0))
