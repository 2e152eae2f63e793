"""The sampler: stateful processors, stopping criteria, and what the host reads."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from test_drafter import Cycle
from test_generate import GREEDY, NEW, engine, prompts
from tide.config import TIDEConfig
from tide.decode.loop import DecodeLoop
from tide.decode.noise import PlacedNoise
from tide.decode.sampler import _STATELESS, Sampler, stateful
from tide.decode.session import FullDepthWarning
from tide.engine import TIDE
from tiny import tiny_model

WATERMARK = {"ngram_len": 3, "keys": [654, 400, 836, 123, 340, 443], "context_history_size": 64}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3, "pad_token_id": 0}


class Grammar(LogitsProcessor):
    """Allows a third of the vocabulary, by a state that every call moves on from the last token.

    Attributes:
        seen: tokens that it was shown, call by call.
    """

    def __init__(self) -> None:
        self.states: Tensor | None = None
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = input_ids[:, -1]
        if self.seen:
            # One token more than the last call, behind tokens that have not changed since.
            assert torch.equal(input_ids[:, :-1], self.seen[-1])
        self.seen.append(input_ids.clone())
        self.states = last % 3 if self.states is None else (2 * self.states + last + 1) % 3
        allowed = torch.arange(scores.shape[1])[None] % 3 == self.states[:, None]
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("mode", ["lossless", "exit"])
@pytest.mark.parametrize("sample", [False, True])
def test_a_stateful_processor_is_called_once_for_every_token_in_order(
    sample: bool, mode: str, sequences: int
) -> None:
    model, expected, given = tiny_model("llama"), Grammar(), Grammar()
    kwargs = {**prompts(sequences), **SAMPLED, "do_sample": sample, "eos_token_id": [5, 40]}
    torch.manual_seed(3)
    wanted = model.generate(**kwargs, logits_processor=LogitsProcessorList([expected]))
    tide = engine(model, mode, "always", fixed_drafts=True)
    torch.manual_seed(3)
    with pytest.warns(FullDepthWarning, match="Grammar may carry state"):
        out = tide.generate(**kwargs, logits_processor=LogitsProcessorList([given]))
    assert torch.equal(out, wanted)
    assert len(given.seen) == out.shape[1] - 9
    assert all(map(torch.equal, given.seen, expected.seen))
    assert not tide.last_stats.drafted and tide.last_stats.exit_rate == 0
    if sequences == 4:
        lengths = [len(depths) for depths in tide.last_stats.depths]
        assert min(lengths) < max(lengths)


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("mode", ["lossless", "exit"])
def test_a_watermark_that_carries_state_is_that_of_generate(mode: str, sequences: int) -> None:
    model = tiny_model("llama")
    config = SynthIDTextWatermarkingConfig(**WATERMARK)
    # One or two of the four sequences end before the others.
    kwargs = {**prompts(sequences), **SAMPLED, "eos_token_id": [5, 40], "max_new_tokens": 40}
    torch.manual_seed(3)
    wanted = model.generate(**kwargs, watermarking_config=config)
    torch.manual_seed(3)
    assert not torch.equal(model.generate(**kwargs), wanted)
    tide = engine(model, mode, "random", fixed_drafts=True)
    for _ in range(2):
        torch.manual_seed(3)
        with pytest.warns(FullDepthWarning, match="SynthIDTextWatermarkLogitsProcessor"):
            assert torch.equal(tide.generate(**kwargs, watermarking_config=config), wanted)
    if sequences == 4:
        lengths = [len(depths) for depths in tide.last_stats.depths]
        assert min(lengths) < max(lengths)


class Favourite(LogitsProcessor):
    """Raises the score of the token after the last one; looks at nothing but its arguments.

    Attributes:
        lines: sequences that it was shown, over all calls.
    """

    tide_stateless = True

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores)
        self.lines += len(scores)
        favourite = 3 + (input_ids[:, -1:] - 2) % 7
        return scores.scatter_add(1, favourite, torch.full_like(favourite, 20).to(scores))


def test_a_processor_that_is_declared_stateless_keeps_its_drafts() -> None:
    model = tiny_model("llama")
    processors = LogitsProcessorList([Favourite()])
    kwargs = {**prompts(4), **GREEDY, "eos_token_id": None, "logits_processor": processors}
    wanted = model.generate(**kwargs)
    tide = engine(model, "lossless", "always", fixed_drafts=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FullDepthWarning)
        assert torch.equal(tide.generate(**kwargs), wanted)
    assert sum(tide.last_stats.accepted.values()) > 20


def test_which_processors_are_stateful() -> None:
    made = [
        logits_process.TemperatureLogitsWarper(0.5),
        logits_process.PrefixConstrainedLogitsProcessor(lambda batch, ids: [3], 1),
        Favourite(),
        Grammar(),
    ]
    assert [type(one).__name__ for one in stateful(made)] == [
        "PrefixConstrainedLogitsProcessor", "Grammar"
    ]  # fmt: skip

    class Changed(logits_process.TemperatureLogitsWarper):
        """May do anything, so what is known of its base does not count."""

    assert [type(one).__name__ for one in stateful([Changed(0.5)])] == ["Changed"]


STATELESS = {
    "EpsilonLogitsWarper": (0.02,),
    "EtaLogitsWarper": (0.02,),
    "ExponentialDecayLengthPenalty": ((1, 1.5), 5, 9),
    "ForcedBOSTokenLogitsProcessor": (5,),
    "ForcedEOSTokenLogitsProcessor": (8, 5),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "MinLengthLogitsProcessor": (7, 5),
    "MinNewTokensLengthLogitsProcessor": (4, 3, 5),
    "MinPLogitsWarper": (0.1,),
    "NoBadWordsLogitsProcessor": ([[5], [6, 7]], 9),
    "NoRepeatNGramLogitsProcessor": (2,),
    "RepetitionPenaltyLogitsProcessor": (1.5,),
    "SequenceBiasLogitsProcessor": ([[[5], 3.0], [[6, 7], -3.0]],),
    "SuppressTokensAtBeginLogitsProcessor": ([5, 6], 6),
    "SuppressTokensLogitsProcessor": ([5, 6],),
    "TemperatureLogitsWarper": (0.7,),
    "TopHLogitsWarper": (0.5,),
    "TopKLogitsWarper": (3,),
    "TopPLogitsWarper": (0.7,),
    "TypicalLogitsWarper": (0.7,),
}


@pytest.mark.parametrize("processor", sorted(c.__name__ for c in _STATELESS))
def test_processors_that_are_taken_for_stateless_are(processor: str) -> None:
    """In any order, one sequence at a time or all at once, a call gives the same."""
    make = getattr(logits_process, processor)
    generator = torch.Generator().manual_seed(0)
    calls = []
    for length in (1, 4, 5, 6, 7):
        ids = torch.randint(3, 11, (4, length), generator=generator)
        calls.append((ids, torch.randn(4, 11, generator=generator)))
    in_order, shuffled = make(*STATELESS[processor]), make(*STATELESS[processor])
    wanted = [in_order(ids, scores.clone()) for ids, scores in calls]
    for k in (3, 0, 4, 2, 2, 1):
        ids, scores = calls[k]
        for s in (2, 0, 3, 1):
            alone = shuffled(ids[s : s + 1], scores[s : s + 1].clone())
            assert torch.equal(alone[0], wanted[k][s])


def test_mode_off_takes_stateful_processors_as_they_are() -> None:
    tide = engine(tiny_model("llama"), "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FullDepthWarning)
        tide.generate(**prompts(1), **GREEDY, logits_processor=LogitsProcessorList([Grammar()]))


@pytest.mark.parametrize("mode", ["off", "lossless"])
def test_processors_see_only_the_sequences_at_a_length(mode: str, monkeypatch: Any) -> None:
    wanted = 0
    scores = Sampler.scores

    def spy(self: Sampler, at: Sequence[Any], logits: Tensor) -> Tensor:
        nonlocal wanted
        wanted += len(at)
        return scores(self, at, logits)

    monkeypatch.setattr(Sampler, "scores", spy)
    processor = Favourite()
    # Sequences end at different places, and drafts take them to different lengths.
    kwargs = {**prompts(4), **SAMPLED, "max_new_tokens": 60, "temperature": 5.0}
    kwargs["eos_token_id"] = [5]
    torch.manual_seed(0)
    tide = engine(tiny_model("llama"), mode, drafts=("context",), fixed_drafts=True)
    tide.generate(**kwargs, logits_processor=LogitsProcessorList([processor]))
    assert processor.lines == wanted
    lengths = [len(depths) for depths in tide.last_stats.depths]
    assert min(lengths) < max(lengths)
    if mode == "off":
        assert processor.lines == sum(lengths)  # one for each token
    else:
        drafts = sum(tide.last_stats.drafted.values())
        assert drafts > 20
        assert processor.lines <= sum(lengths) + drafts


class Called(StoppingCriteria):
    """Ends a sequence whose last token is 85; remembers the shapes that it was shown."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shapes.append(tuple(input_ids.shape))
        return input_ids[:, -1] == 85


@pytest.mark.parametrize("mode", ["off", "lossless", "exit"])
def test_end_of_text_and_length_need_no_criterion_called(mode: str, monkeypatch: Any) -> None:
    called: Counter[str] = Counter()
    for criterion in (EosTokenCriteria, MaxLengthCriteria):
        original = criterion.__call__

        def spy(self: Any, *args: Any, _call: Any = original, **kwargs: Any) -> Tensor:
            called[type(self).__name__] += 1
            return _call(self, *args, **kwargs)

        monkeypatch.setattr(criterion, "__call__", spy)
    kwargs = {**prompts(4), **GREEDY, "repetition_penalty": 1.3, "eos_token_id": [85, 42]}
    model = tiny_model("llama")
    wanted = model.generate(**kwargs)
    assert called["EosTokenCriteria"] and called["MaxLengthCriteria"]
    called.clear()
    tide = engine(model, mode, "never" if mode == "exit" else "random")
    assert torch.equal(tide.generate(**kwargs), wanted)
    assert not called
    lengths = [len(depths) for depths in tide.last_stats.depths]
    assert min(lengths) < NEW == max(lengths)  # by end of text, and by length


@pytest.mark.parametrize("stateless", [False, True])
def test_other_criteria_are_called_as_generate_calls_them(stateless: bool) -> None:
    """Unless they say that they look at each sequence by itself: then drafts and exits go on."""
    model = tiny_model("llama")
    kwargs = {**prompts(4), **GREEDY, "repetition_penalty": 1.3, "eos_token_id": [42]}
    theirs, ours = Called(), Called()
    wanted = model.generate(**kwargs, stopping_criteria=StoppingCriteriaList([theirs]))
    assert (wanted == 85).any()
    tide = engine(model, "lossless", "random", fixed_drafts=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FullDepthWarning)
        ours.tide_stateless = stateless
        out = tide.generate(**kwargs, stopping_criteria=StoppingCriteriaList([ours]))
    assert torch.equal(out, wanted)
    if stateless:
        assert not caught and tide.last_stats.drafted
        assert {sequences for sequences, _ in ours.shapes} == {1}
    else:
        assert "Called may carry state" in str(caught[0].message) and not tide.last_stats.drafted
        assert ours.shapes == theirs.shapes


def test_a_criterion_that_counts_its_calls_counts_as_in_generate() -> None:
    class Fifth(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            return torch.full((len(input_ids),), self.calls >= 5)

    model, kwargs = tiny_model("llama"), {**prompts(4), **GREEDY, "eos_token_id": [42]}
    wanted = model.generate(**kwargs, stopping_criteria=StoppingCriteriaList([Fifth()]))
    assert wanted.shape[1] == 9 + 5
    for mode in ("off", "lossless"):
        tide = engine(model, mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FullDepthWarning)
            out = tide.generate(**kwargs, stopping_criteria=StoppingCriteriaList([Fifth()]))
        assert torch.equal(out, wanted)


def test_noise_does_not_follow_the_default_dtype() -> None:
    model, kwargs = tiny_model("llama"), {**prompts(2), **GREEDY, "do_sample": True, "top_k": 3}
    tide = engine(model, "lossless", "random", fixed_drafts=True)
    torch.set_default_dtype(torch.float16)
    try:
        torch.manual_seed(3)
        wanted = model.generate(**kwargs)
        torch.manual_seed(3)
        assert torch.equal(tide.generate(**kwargs), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_draws_of_others_are_not_undone() -> None:
    """As of an engine in another thread, or of a streamer."""
    noise, like = PlacedNoise(1), torch.zeros(1, 8)
    torch.manual_seed(0)
    noise.at([(0, 4)], like)
    before = torch.default_generator.get_state()
    noise.at([(0, 5)], like)
    noise.rewind(5)
    assert torch.equal(torch.default_generator.get_state(), before)
    noise = PlacedNoise(1)
    noise.at([(0, 4), (0, 5)], like)
    torch.rand(1)
    after = torch.default_generator.get_state()
    noise.rewind(5)
    assert torch.equal(torch.default_generator.get_state(), after)


def test_a_call_leaves_the_random_state_where_generate_leaves_it() -> None:
    """Drafts behind the end of a text are drawn for too, and must not change the next call."""
    model = tiny_model("llama")
    kwargs = {**prompts(2), **GREEDY, "do_sample": True, "eos_token_id": list(range(80, 97))}
    wanted = []
    torch.manual_seed(3)
    for _ in range(4):
        wanted.append(model.generate(**kwargs))
    assert any(out.shape[1] < 9 + NEW for out in wanted)  # by end of text
    torch.manual_seed(3)
    tide = engine(model, "lossless", "always", fixed_drafts=True)
    for out in wanted:
        assert torch.equal(tide.generate(**kwargs), out)


class HostReads(TorchDispatchMode):
    """Counts what the host reads from tensors, and what is copied to another device or dtype.

    Attributes:
        counts: steps; reads, of one number or of a list; numbers read; tensors copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def read(self, numbers: int) -> None:
        self.counts["reads"] += 1
        self.counts["numbers"] += numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read(1)
        elif func is torch.ops.aten._to_copy.default:
            self.counts["copies"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("drafts", "nodes", "steps"), [((), 0, 240), (("context",), 0, 40), (("context",), 20, 22)]
)
def test_host_reads_per_token_do_not_grow_with_length(
    drafts: tuple[str, ...], nodes: int, steps: int, monkeypatch: Any
) -> None:
    """One read a step, at the 500th token and at the 4,000th."""
    windows = {500: HostReads(), 3990: HostReads()}  # over the 240 tokens before
    active: list[HostReads] = []
    step, to_list = DecodeLoop.step, Tensor.tolist

    def counted(self: DecodeLoop) -> None:
        tokens = self.stats.total_tokens
        active[:] = [reads for end, reads in windows.items() if end - 240 <= tokens < end]
        if not active:
            return step(self)
        active[0].counts["steps"] += 1
        with active[0]:
            step(self)

    def listed(tensor: Tensor) -> Any:
        for reads in active:  # a tensor on the host becomes a list without a dispatch
            reads.read(tensor.numel())
        return to_list(tensor)

    monkeypatch.setattr(DecodeLoop, "step", counted)
    monkeypatch.setattr(Tensor, "tolist", listed)
    model = tiny_model(
        "llama", num_hidden_layers=2, max_position_embeddings=8192, hidden_size=16,
        intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    config = TIDEConfig(mode="lossless", drafts=drafts, max_tree=nodes)
    tide = TIDE(model, None, config, check=False)
    tide.drafter.fixed = True
    ids = torch.tensor([[7, 8, 9, 10, 11]])  # continues as a cycle of five: drafts are accepted
    options = {**GREEDY, "max_new_tokens": 4000, "eos_token_id": [96]}
    processors = LogitsProcessorList([Cycle()])
    out = tide.generate(
        ids, attention_mask=torch.ones_like(ids), logits_processor=processors, **options
    )
    assert out.shape[1] == 4005
    counts = windows[500].counts
    assert windows[3990].counts == counts
    assert counts["steps"] == steps
    assert counts["reads"] == counts["steps"]
    assert counts["numbers"] == (242 if nodes else 240)  # of whole steps
