"""The engine takes what `generate` takes, refuses the rest by name, and stays usable."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from test_generate import GREEDY, artifact, engine, prompts
from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.decode.loop import DepthDecoder
from tide.engine import TIDE
from tide.errors import ArtifactError, ConfigError, UnsupportedGenerationError
from tide.exits.policy import Gate, GatePolicy, ScriptedPolicy
from tide.models.cache import WaterlineCache
from tiny import tiny_model


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


class Ban(LogitsProcessor):
    """Forbids the token that is likeliest, for some rows by their number in the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row in range(0, len(scores), 2):
            scores[row, scores[row].argmax()] = -torch.inf
        return scores


@pytest.mark.parametrize("mode", ["off", "lossless"])
@pytest.mark.parametrize("rows", [1, 4])
def test_streamer_and_processors_see_what_generate_shows_them(mode: str, rows: int) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "eos_token_id": None, "logits_processor": LogitsProcessorList([Ban()])}
    plain, ours = Recorder(), Recorder()
    expected = model.generate(**prompts(rows), **options, streamer=plain)
    tide = engine(model, mode, "random")
    assert torch.equal(tide.generate(**prompts(rows), **options, streamer=ours), expected)
    assert ours.pieces == plain.pieces
    assert ours.ended


@pytest.mark.parametrize("mode", ["off", "lossless", "exit"])
def test_rows_end_on_their_own_and_leave_the_batch(mode: str) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "max_new_tokens": 40}
    free = model.generate(**prompts(4), **options, eos_token_id=None)[:, 9:]
    # Two end tokens, chosen so that rows end at different lengths.
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
    with pytest.raises(UnsupportedGenerationError, match="tokenizer"):
        tide.generate(ids, stop_strings=["seven"])


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
    ("options", "words"),
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
def test_what_is_not_decoded_by_depth_is_refused_by_name(options: Any, words: str) -> None:
    tide = engine(tiny_model("llama"), "lossless")
    with pytest.raises(UnsupportedGenerationError, match=words):
        tide.generate(**prompts(1), **GREEDY, **options)


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
    assert torch.equal(tide.generate(**prompts(4), **options), expected)
    assert [len(depths) for depths in tide.last_stats.depths] == [3, 5, 7, 9]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_prefix_function_is_asked_only_for_what_was_said(rows: int) -> None:
    model = tiny_model("llama")
    prompt = prompts(rows)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        new = ids[9:].tolist()
        assert all(token % 7 == row for token in new), (row, new)
        return [token for token in range(97) if token % 7 == row]

    options = {**prompt, **GREEDY, "eos_token_id": None, "prefix_allowed_tokens_fn": allowed}
    expected = model.generate(**options)
    tide = engine(model, "lossless", "always", fixed_drafts=True)
    assert torch.equal(tide.generate(**options), expected)


def test_a_token_whose_vocabulary_is_ruled_out_does_not_leave() -> None:
    model = tiny_model("llama")
    exits = artifact()
    exits.vocabulary = torch.arange(3, 40)
    options = {**prompts(2), **GREEDY, "eos_token_id": None, "suppress_tokens": list(range(40))}
    for mode in ("lossless", "exit"):
        tide = TIDE(
            model, exits, TIDEConfig(mode=mode, min_layers=0), allow_mismatch=True, check=False,
            policy=ScriptedPolicy(lambda place, checkpoint: True),
        )  # fmt: skip
        assert torch.equal(tide.generate(**options), model.generate(**options))
        assert tide.last_stats.exited_tokens == 0


def test_a_reduced_vocabulary_says_its_own_tokens() -> None:
    """Its exit says the likeliest of its tokens, as the whole head would with the others barred."""
    model = tiny_model("llama")
    outputs = []
    for vocabulary in (torch.tensor([50, 60, 7, 80]), None):
        exits = artifact()
        exits.vocabulary = vocabulary
        barred = [t for t in range(97) if t not in (50, 60, 7, 80)]
        for extra in ({}, {"suppress_tokens": barred}):
            if vocabulary is None and not extra:
                continue
            tide = TIDE(
                model, exits, TIDEConfig(min_layers=0, drafts=(), max_pending=100),
                policy=ScriptedPolicy(lambda place, checkpoint: True), allow_mismatch=True,
                check=False,
            )  # fmt: skip
            first = {"forced_bos_token_id": None, **prompts(1), **GREEDY, "eos_token_id": None}
            outputs.append(tide.generate(**first, **extra)[0, 10:].tolist())
    # The first new token is the full model's and differs when it is barred; the rest is compared
    # between the two runs that bar.
    assert outputs[1] == outputs[2]
    assert set(outputs[0]) <= {50, 60, 7, 80}


def test_a_table_is_used_and_an_affine_head_is_asked() -> None:
    model = tiny_model("llama")
    options = {**prompts(1), **GREEDY, "eos_token_id": None}
    said = model.generate(**options)[0].tolist()
    exits = artifact(strategy="affine")
    exits.table = build_table([said], 97)
    config = TIDEConfig(mode="lossless", min_layers=0, drafts=("table",), fixed_drafts=True)
    tide = TIDE(model, exits, config, allow_mismatch=True, check=False)
    assert tide.generate(**options)[0].tolist() == said
    assert sum(tide.last_stats.accepted.values()) > 15

    def says(fill: float) -> list[int]:
        made = artifact(strategy="affine")
        for checkpoint in made.checkpoints:
            checkpoint.head.affine.bias.data.fill_(fill)  # type: ignore[union-attr]
        early = TIDE(
            model, made, TIDEConfig(min_layers=0, drafts=()), allow_mismatch=True, check=False,
            policy=ScriptedPolicy(lambda place, checkpoint: True),
        )  # fmt: skip
        return early.generate(**options)[0].tolist()

    assert says(0.0) != says(3.0)


def test_thresholds_come_from_the_settings_or_from_calibration() -> None:
    model = tiny_model("llama")
    exits = artifact()
    for checkpoint in exits.checkpoints:
        checkpoint.gate = Gate(top_probability=0.0)

    def rate(**config: Any) -> float:
        tide = TIDE(
            model, exits, TIDEConfig(min_layers=0, drafts=(), **config), allow_mismatch=True,
            check=False,
        )  # fmt: skip
        tide.generate(**prompts(1), **GREEDY, eos_token_id=None)
        return tide.last_stats.exit_rate

    assert rate(exit_threshold=None) == 23 / 24  # calibrated: all but the first
    assert rate(exit_threshold=2.0) == 0
    assert 0 < rate(exit_threshold=0.05) < 23 / 24
    with pytest.raises(ConfigError, match="needs an exit"):
        TIDE(model, exits, TIDEConfig(), allow_mismatch=True, check=False)
    with pytest.raises(ValueError, match="no router"):
        GatePolicy([None], [Gate(router=0.5)])
    exits.hidden_size = 64
    with pytest.raises(ArtifactError, match="hidden size 64; the model has 32"):
        TIDE(model, exits, allow_mismatch=True, check=False)


def test_positions_that_change_meaning_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=20)
    options = {**prompts(1), **GREEDY}
    with pytest.raises(UnsupportedGenerationError, match="beyond 20 tokens"):
        engine(model, "lossless").generate(**options)
    short = {**options, "max_new_tokens": 11}
    tide = engine(model, "lossless", fixed_drafts=True)
    assert torch.equal(tide.generate(**short), model.generate(**short))


def test_the_last_place_is_not_guessed_beyond() -> None:
    model = tiny_model("gpt2", n_positions=32)
    options = {**prompts(1), "max_length": 33, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None}
    tide = engine(model, "lossless", "always", fixed_drafts=True)
    assert torch.equal(tide.generate(**options), model.generate(**options))


def test_one_artifact_serves_engines_of_different_dtypes() -> None:
    exits = artifact(strategy="affine")
    options = {**prompts(1), **GREEDY, "eos_token_id": None}
    kinds = (torch.float32, torch.bfloat16)
    engines = [
        TIDE(
            tiny_model("llama", dtype=dtype), exits, TIDEConfig(min_layers=0), check=False,
            policy=ScriptedPolicy(lambda place, checkpoint: True), allow_mismatch=True,
        )
        for dtype in kinds
    ]  # fmt: skip
    for tide in engines:
        tide.generate(**options)


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


def test_an_interruption_leaves_engine_and_model_usable() -> None:
    model = tiny_model("llama")
    expected = model.generate(**prompts(4), **GREEDY)

    class Interrupt(BaseStreamer):
        left = 5

        def put(self, value: torch.Tensor) -> None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    class Fail(LogitsProcessor):
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


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """What `work(0)` and `work(1)` return, in threads that take turns in the middle of passes."""
    turns = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, (0, 1)))  # raises what a thread raised
    finally:
        sys.setswitchinterval(turns)


def test_two_threads_share_one_engine() -> None:
    model = tiny_model("llama")
    tide = engine(model, "lossless", "random")
    batches = [prompts(rows) for rows in (1, 4)]
    expected = [model.generate(**batch, **GREEDY) for batch in batches]

    def work(k: int) -> bool:
        return all(
            torch.equal(tide.generate(**batches[k], **GREEDY), expected[k]) for _ in range(6)
        )

    assert at_once(work) == [True, True]


@pytest.mark.parametrize("mode", ["off", "lossless", "exit"])
def test_a_call_leaves_nothing_for_the_garbage_collector(mode: str) -> None:
    """A cache in a reference cycle would live on until a collection, gigabytes later."""
    tide = engine(tiny_model("llama"), mode)
    gc.collect()
    gc.disable()
    try:
        tide.generate(**prompts(2), **GREEDY)
        left = [o for o in gc.get_objects() if isinstance(o, (DepthDecoder, WaterlineCache))]
    finally:
        gc.enable()
    assert not left


def test_memory_stays_flat_over_a_thousand_calls() -> None:
    tide = engine(tiny_model("llama"), "lossless", "random")
    process = psutil.Process()

    def calls(count: int) -> int:
        for k in range(count):
            tide.generate(**prompts(1 + k % 4), **{**GREEDY, "max_new_tokens": 2 + k % 5})
        gc.collect()
        return process.memory_info().rss

    calls(150)
    warm = calls(50)
    assert calls(800) - warm < 20e6


@torch.no_grad()
def test_calling_the_engine_gives_logits_with_per_token_exit() -> None:
    model = tiny_model("llama")
    batch = prompts(3)
    off = engine(model, "off")
    assert torch.equal(off(**batch), model(**batch).logits)

    never = engine(model, "exit", "never")
    valid = batch["attention_mask"].bool()
    assert torch.allclose(never(**batch)[valid], model(**batch).logits[valid], atol=1e-5)

    some = engine(model, "exit", "random")
    logits = some(**batch)
    stats = some.last_stats
    assert 0 < stats.exited_tokens < stats.total_tokens == int(valid.sum())
    assert stats.tokens_run < 6 * stats.total_tokens  # computed less, not only read earlier
    assert logits.shape == (3, 9, 97)
    assert not torch.allclose(logits[valid], model(**batch).logits[valid], atol=1e-3)


@torch.no_grad()
def test_calling_the_engine_reads_tokens_that_leave_over_the_whole_vocabulary() -> None:
    model, batch, made = tiny_model("llama"), prompts(3), artifact()
    made.vocabulary = torch.arange(5, 20)
    config, policy = TIDEConfig(min_layers=0), ScriptedPolicy(lambda place, checkpoint: True)
    tide = TIDE(model, made, config, policy=policy, allow_mismatch=True, check=False)
    valid = batch["attention_mask"].bool()
    logits = tide(**batch)
    assert logits.isfinite().all()
    # All leave after the first two layers, the last token of a row too.
    assert tide.last_stats.exits_per_layer == {1: int(valid.sum())}
    assert tide.last_stats.depths == (2 * valid.int()).tolist()
    with tide.runner as runner:
        states = runner.run(batch["input_ids"], 0, 2, cache=runner.new_cache(3), valid=valid)
        lifted = tide.artifact.checkpoints[0].head.lift(states)
        assert torch.allclose(logits[valid], runner.logits(lifted)[valid], atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_prefill_exit_saves_work_and_keeps_the_last_token_deep(rows: int) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "max_new_tokens": 1, "eos_token_id": None}

    def run(policy: str, compaction_threshold: float) -> TIDE:
        config = {
            "prefill_exit": True,
            "kv_cache_strategy": "propagate",
            "compaction_threshold": compaction_threshold,
        }
        tide = engine(model, "exit", policy, **config)
        tide.generate(**prompts(rows), **options)
        return tide

    tokens = int(prompts(rows)["attention_mask"].sum())
    always = run("always", 0.25).runner.counts
    assert always.tokens == [tokens] * 2 + [rows] * 4
    assert always.fills == [0, 0] + [tokens - rows] * 4
    assert run("always", 1.0).runner.counts.tokens == [tokens] * 6  # never more than all
    never = run("never", 0.25)
    assert never.runner.counts.tokens == [tokens] * 6
    expected = model.generate(**prompts(rows), **options)
    assert torch.equal(never.generate(**prompts(rows), **options), expected)


def test_checkpoints_that_make_no_sense_are_refused() -> None:
    model = tiny_model("llama")
    late = artifact()
    late.checkpoints[1].layer = 5
    with pytest.raises(ConfigError, match="before the last of 6 layers"):
        TIDE(model, late, TIDEConfig(min_layers=0), allow_mismatch=True, check=False)
    tail = artifact(strategy="tail", tail_layers=4)
    with pytest.raises(ConfigError, match="which lie above every checkpoint"):
        TIDE(model, tail, TIDEConfig(min_layers=0), allow_mismatch=True, check=False)
    # min_layers leaves out the checkpoints before it.
    tide = TIDE(
        model, artifact(), TIDEConfig(min_layers=4, drafts=()), allow_mismatch=True, check=False,
        policy=ScriptedPolicy(lambda place, checkpoint: True),
    )  # fmt: skip
    tide.generate(**prompts(1), **GREEDY)
    assert set(tide.last_stats.exits_per_layer) == {3}
