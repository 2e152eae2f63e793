"""The engine takes what `generate` takes, refuses the rest by name, and stays usable."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from test_generate import GREEDY, artifact, engine, prompts
from tide import decoder
from tide.config import TIDEConfig
from tide.decode.session import FullDepthWarning
from tide.engine import TIDE
from tide.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from tiny import tiny_config, tiny_model


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


class Ban(LogitsProcessor):
    """Bars the likeliest token."""

    tide_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, scores.argmax(1, keepdim=True), -torch.inf)


class BanInSome(LogitsProcessor):
    """Bars the likeliest token in every second sequence, by its number in the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[::2] = Ban()(input_ids, scores[::2])
        return scores


@pytest.mark.parametrize("processor", [Ban, BanInSome])
@pytest.mark.parametrize("mode", ["off", "lossless"])
@pytest.mark.parametrize("sequences", [1, 4])
def test_streamer_and_processors_see_what_generate_shows_them(
    mode: str, sequences: int, processor: type[LogitsProcessor]
) -> None:
    model = tiny_model("llama")
    options = {"eos_token_id": None, "logits_processor": LogitsProcessorList([processor()])}
    options = {**prompts(sequences), **GREEDY, **options}
    theirs, ours = Recorder(), Recorder()
    expected = model.generate(**options, streamer=theirs)
    tide = engine(model, mode, "random", fixed_drafts=True)
    if processor is BanInSome and mode == "lossless":
        with pytest.warns(FullDepthWarning, match=r"BanInSome may carry state.*tide_stateless"):
            output = tide.generate(**options, streamer=ours)
        assert not tide.last_stats.drafted
    else:
        output = tide.generate(**options, streamer=ours)
        assert bool(tide.last_stats.drafted) == (mode == "lossless")
    assert torch.equal(output, expected)
    assert ours.pieces == theirs.pieces
    assert ours.ended


@pytest.mark.parametrize("mode", ["off", "lossless", "exit"])
def test_sequences_end_on_their_own_and_are_dropped_from_the_batch(mode: str) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "max_new_tokens": 40}
    free = model.generate(**prompts(4), **options, eos_token_id=None)[:, 9:]
    # Two end tokens, chosen so that sequences end at different lengths.
    eos = [int(free[1, 5]), int(free[2, 11])]
    expected = model.generate(**prompts(4), **options, eos_token_id=eos)
    tide = engine(model, mode, "never", drafts=("context",))
    assert torch.equal(tide.generate(**prompts(4), **options, eos_token_id=eos), expected)
    lengths = [len(depths) for depths in tide.last_stats.depths]
    assert len(set(lengths)) > 1
    assert tide.runner.counts.tokens[0] < 4 * (9 + max(lengths))


@pytest.mark.real
@pytest.mark.xdist_group("smollm2")
def test_stop_strings(smollm2_path: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_path)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    ids = tokenizer("One, two, three, four, five,", return_tensors="pt").input_ids
    options = {**GREEDY, "stop_strings": ["seven", " eight"], "tokenizer": tokenizer}
    expected = model.generate(ids, **options)
    assert 10 < expected.shape[1] < 10 + 24
    for mode in ("off", "lossless"):
        tide = TIDE(model, config=TIDEConfig(mode=mode), check=False)
        assert torch.equal(tide.generate(ids, **options), expected)
        in_config = GenerationConfig(**{k: v for k, v in options.items() if k != "tokenizer"})
        out = tide.generate(ids, generation_config=in_config, tokenizer=tokenizer)
        assert torch.equal(out, expected)
        model.generation_config.stop_strings = options["stop_strings"]
        assert torch.equal(tide.generate(ids, **GREEDY, tokenizer=tokenizer), expected)
        off = tide.generate(ids, **GREEDY, stop_strings=None)
        assert torch.equal(off, model.generate(ids, **GREEDY, stop_strings=None))
        model.generation_config.stop_strings = None
    with pytest.raises(UnsupportedGenerationError, match="tokenizer"):
        tide.generate(ids, stop_strings=["seven"])


@pytest.mark.parametrize("mode", ["off", "lossless"])
def test_a_length_criterion_replaces_the_length_of_the_config(mode: str) -> None:
    model = tiny_model("llama")
    options = {"do_sample": False, "eos_token_id": None}
    options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(9 + 40)])
    expected = model.generate(**prompts(2), **options)
    assert expected.shape[1] == 9 + 40
    assert torch.equal(engine(model, mode).generate(**prompts(2), **options), expected)


@pytest.mark.parametrize("mode", ["off", "lossless"])
def test_a_first_token_is_generated_whatever_the_length(mode: str) -> None:
    model = tiny_model("llama")
    tide, options = engine(model, mode), {"do_sample": False, "eos_token_id": None}
    for limit in (5, 9, 10):
        options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(limit)])
        expected = model.generate(**prompts(2), **options)
        assert torch.equal(tide.generate(**prompts(2), **options), expected)
        assert expected.shape[1] == 10


def test_a_length_without_limit_takes_no_memory() -> None:
    """As tokenizers give it that know none."""
    model = tiny_model("llama")
    kwargs = {
        **prompts(1),
        "do_sample": False,
        "max_length": int(1e30),
        "eos_token_id": list(range(48)),
    }
    assert torch.equal(engine(model, "lossless").generate(**kwargs), model.generate(**kwargs))


def test_a_head_that_is_replaced_is_refused_by_name() -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    tide = engine(model, "lossless")
    tide.generate(**prompts(1), **GREEDY)
    model.resize_token_embeddings(120)
    with pytest.raises(UnsupportedModelError, match=r"another output head .* Attach again"):
        tide.generate(**prompts(1), **GREEDY)
    expected = model.generate(**prompts(1), **GREEDY)
    assert torch.equal(engine(model, "lossless").generate(**prompts(1), **GREEDY), expected)


def test_a_threshold_scale_without_effect_is_refused() -> None:
    model, made = tiny_model("llama"), artifact()
    options = {"threshold_scale": 0.5, "allow_mismatch": True, "check": False}
    with pytest.raises(ConfigError, match="Set exit_threshold=None"):
        TIDE(model, made, TIDEConfig(min_layers=0), **options)
    TIDE(model, made, TIDEConfig(min_layers=0, exit_threshold=None), **options)
    TIDE(model, made, TIDEConfig(mode="lossless"), **options)


def test_exit_heads_are_left_out_where_predictions_are_recycled() -> None:
    model, options = tiny_model("llama"), {"allow_mismatch": True}

    def checkpoints(**config: Any) -> int:
        made = TIDE(
            model, artifact(), TIDEConfig(mode="lossless", min_layers=0, **config), **options
        )
        return len(made._machinery.exits.checkpoints)

    assert checkpoints() == 0  # in trees
    assert checkpoints(max_tree=0) == checkpoints(drafts=("exit",)) == len(artifact().checkpoints)


def test_generation_config_and_dict_output() -> None:
    model = tiny_model("llama")
    config = GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(**prompts(2), generation_config=config)
    out = engine(model, "lossless").generate(
        **prompts(2), generation_config=config, return_dict_in_generate=True
    )
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"position_ids": [1]}, "position_ids"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"token_healing": True}, "token_healing"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"custom_generate": "a/b"}, "custom_generate"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
    ],
)
def test_what_is_not_decoded_by_depth_is_refused_by_name(options: Any, named: str) -> None:
    tide = engine(tiny_model("llama"), "lossless")
    with pytest.raises(UnsupportedGenerationError, match=named):
        tide.generate(**prompts(1), **GREEDY, **options)


@pytest.mark.parametrize("way", ["engine", "decoder"])
def test_a_cache_named_in_the_generation_config_is_refused(way: str) -> None:
    model = tiny_model("llama")
    config = GenerationConfig(**GREEDY, cache_implementation="static")
    if way == "engine":
        generate = engine(model, "lossless").generate
    else:
        generate = partial(model.generate, custom_generate=decoder(check=False))
    with pytest.raises(UnsupportedGenerationError, match="cache_implementation='static'"):
        generate(**prompts(1), generation_config=config)
    config.cache_implementation = "dynamic"
    expected = model.generate(**prompts(1), **GREEDY)
    assert torch.equal(generate(**prompts(1), generation_config=config), expected)


def test_criteria_see_the_whole_batch() -> None:
    class Limits(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= n for n in (12, 14, 16, 18)])

    model = tiny_model("llama")
    options = {
        **GREEDY,
        "eos_token_id": [96],
        "stopping_criteria": StoppingCriteriaList([Limits()]),
    }
    expected = model.generate(**prompts(4), **options)
    tide = engine(model, "lossless", "random", fixed_drafts=True)
    with pytest.warns(FullDepthWarning, match="Limits may carry state"):
        assert torch.equal(tide.generate(**prompts(4), **options), expected)
    assert [len(depths) for depths in tide.last_stats.depths] == [3, 5, 7, 9]


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_prefix_function_sees_committed_tokens_only(sequences: int) -> None:
    model = tiny_model("llama")

    def allowed(sequence: int, ids: torch.Tensor) -> list[int]:
        new = ids[9:].tolist()
        assert all(token % 7 == sequence for token in new), (sequence, new)
        return [token for token in range(97) if token % 7 == sequence]

    options = {**prompts(sequences), **GREEDY, "eos_token_id": None}
    options["prefix_allowed_tokens_fn"] = allowed
    expected = model.generate(**options)
    tide = engine(model, "lossless", "always", fixed_drafts=True)
    with pytest.warns(FullDepthWarning, match="PrefixConstrainedLogitsProcessor"):
        assert torch.equal(tide.generate(**options), expected)


def test_positions_that_change_meaning_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=20)
    options = {**prompts(1), **GREEDY}
    with pytest.raises(UnsupportedGenerationError, match="beyond 20 tokens"):
        engine(model, "lossless").generate(**options)
    short = {**options, "max_new_tokens": 11}
    tide = engine(model, "lossless", fixed_drafts=True)
    assert torch.equal(tide.generate(**short), model.generate(**short))


def test_no_draft_goes_beyond_the_last_position() -> None:
    model = tiny_model("gpt2", n_positions=32)
    options = {**prompts(1), "max_length": 33, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None}
    tide = engine(model, "lossless", "always", fixed_drafts=True)
    assert torch.equal(tide.generate(**options), model.generate(**options))


def test_a_streamer_may_use_the_engine() -> None:
    model = tiny_model("llama")
    tide = engine(model, "lossless")
    inner: list[Any] = []

    class Nested(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if len(inner) < 2:
                inner.append(None)
                inner[-1] = tide.generate(**prompts(1), **GREEDY)

    out = tide.generate(**prompts(4), **GREEDY, streamer=Nested())
    assert torch.equal(out, model.generate(**prompts(4), **GREEDY))
    assert torch.equal(inner[0], model.generate(**prompts(1), **GREEDY))


def test_right_padding_is_refused() -> None:
    batch = {k: v.flip(1) for k, v in prompts(2).items()}
    with pytest.raises(UnsupportedGenerationError, match="padding_side = 'left'"):
        engine(tiny_model("llama"), "lossless").generate(**batch, **GREEDY)


def test_engine_and_model_are_usable_after_an_interruption() -> None:
    model = tiny_model("llama")
    expected = model.generate(**prompts(4), **GREEDY)

    class Interrupt(BaseStreamer):
        puts = 5

        def put(self, value: torch.Tensor) -> None:
            self.puts -= 1
            if not self.puts:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    class Fail(LogitsProcessor):
        tide_stateless = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > 14:
                raise RuntimeError("in a processor")
            return scores

    tide = engine(model, "lossless", "always")
    with pytest.raises(KeyboardInterrupt):
        tide.generate(**prompts(4), **GREEDY, streamer=Interrupt())
    with pytest.raises(RuntimeError, match="in a processor"):
        tide.generate(**prompts(4), **GREEDY, logits_processor=LogitsProcessorList([Fail()]))
    assert type(model.model.layers) is torch.nn.ModuleList
    assert torch.equal(model.generate(**prompts(4), **GREEDY), expected)
    assert torch.equal(tide.generate(**prompts(4), **GREEDY), expected)


def larger_model() -> Any:
    """A language model that is part of a model which also takes images."""
    text = tiny_config("gemma3_text")
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "gemma3", text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4,
        image_token_index=96,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()


TYPES = torch.zeros(1, 9, dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (partial(tiny_model, "llama"), "inputs_embeds", torch.ones(1, 9, 32)),
        (partial(tiny_model, "gpt2"), "token_type_ids", TYPES + 1),
        (partial(tiny_model, "gpt2"), "token_type_ids", TYPES),  # embedded like any other
        (larger_model, "token_type_ids", TYPES + 1),
        (larger_model, "pixel_values", torch.ones(1, 3, 8, 8)),
    ],
)
@pytest.mark.parametrize("way", ["engine", "decoder"])
def test_inputs_that_the_loop_would_drop_are_refused(
    way: str, make: Any, name: str, value: torch.Tensor
) -> None:
    model = make()
    generate = TIDE(model, check=False).generate
    if way == "decoder":
        generate = partial(model.generate, custom_generate=decoder(check=False))
    with pytest.raises(UnsupportedGenerationError, match=rf"no ({name}|image)\. Omit it, or call"):
        generate(**prompts(1), **GREEDY, **{name: value})


def test_types_of_text_are_taken_where_other_types_mark_images() -> None:
    model = larger_model()
    options = {**prompts(1), **GREEDY, "token_type_ids": TYPES}
    assert torch.equal(TIDE(model).generate(**options), model.generate(**options))
