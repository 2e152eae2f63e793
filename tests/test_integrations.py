"""The entry points of `model.generate` lead to the engine's own loop, and drop nothing."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    pipeline,
)

import tide
from test_engine import Recorder
from test_generate import GREEDY, prompts
from test_threads import at_once
from tide.config import TIDEConfig
from tide.errors import ArtifactError, CertificateError, UnsupportedGenerationError
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.thresholds import Thresholds
from tide.integrations import huggingface
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tiny import tiny_model, tiny_tokenizer

EXIT = TIDEConfig(exit_threshold=None, min_layers=0)


@pytest.fixture
def tiny() -> Any:
    return tiny_model("llama")


@pytest.fixture
def router(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of an artifact at whose exits some tokens exit, with other predictions."""
    monkeypatch.setattr(  # or tests would write modules to the user's cache
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    huggingface._shared.cache_clear()
    thresholds = Thresholds(top_probability=0.04)
    exits = [Checkpoint(layer, ExitHead("identity", 32), None, thresholds) for layer in (1, 3)]
    made = Artifact(fingerprint(tiny, locate(tiny)), 32, exits)
    return str(made.save_pretrained(tmp_path / "router"))


def with_exits(tiny: Any, router: str, **kwargs: Any) -> torch.Tensor:
    """The engine's output with exits, which is not the model's."""
    expected = tide.TIDE(tiny, router, EXIT).generate(**kwargs)
    assert not torch.equal(expected, tiny.generate(**kwargs)), "exits change nothing here"
    return expected


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_decoder_generates_what_the_engine_generates(
    tiny: Any, router: str, sequences: int
) -> None:
    kwargs = {**prompts(sequences), **GREEDY}
    lossless = tide.decoder(router)
    assert torch.equal(tiny.generate(**kwargs, custom_generate=lossless), tiny.generate(**kwargs))
    assert lossless.last_stats is not None and lossless.last_stats.exited_tokens == 0
    decoder = tide.decoder(router, EXIT)
    expected = with_exits(tiny, router, **kwargs)
    assert torch.equal(tiny.generate(**kwargs, custom_generate=decoder), expected)
    assert decoder.last_stats is not None and decoder.last_stats.exited_tokens > 0
    assert decoder.last_stats is decoder.engine(tiny).last_stats
    audited = tide.decoder(router, EXIT.with_(kv_cache_strategy="propagate"), audit_rate=1.0)
    tiny.generate(**kwargs, custom_generate=audited)
    assert audited.last_stats is not None and None not in audited.last_stats.losses


def test_a_decoder_streams_what_the_engine_streams(tiny: Any, router: str) -> None:
    kwargs = {**prompts(4), **GREEDY}
    theirs, once, always = Recorder(), Recorder(), Recorder()
    expected = tide.TIDE(tiny, router, EXIT).generate(**kwargs, streamer=theirs)
    decoder = tide.decoder(router, EXIT)
    streaming = decoder.with_streamer(once)
    assert torch.equal(tiny.generate(**kwargs, custom_generate=streaming), expected)
    assert once.ended and once.pieces == theirs.pieces
    assert streaming.engine(tiny) is decoder.engine(tiny)
    tiny.generate(**kwargs, custom_generate=decoder)
    assert once.pieces == theirs.pieces  # no more of it: that decoder does not stream
    decoder = tide.decoder(router, EXIT, streamer=always)
    assert torch.equal(tiny.generate(**kwargs, custom_generate=decoder), expected)
    assert always.ended and always.pieces == theirs.pieces


def test_a_decoder_keeps_one_engine_per_model_and_no_model_alive(tiny: Any, router: str) -> None:
    decoder = tide.decoder(router, allow_mismatch=True)
    other = tiny_model("llama", seed=1)
    for one in (tiny, other, tiny):
        expected = one.generate(**prompts(2), **GREEDY)
        assert torch.equal(one.generate(**prompts(2), **GREEDY, custom_generate=decoder), expected)
    assert len(decoder._engines) == 2
    engine = decoder.engine(tiny)
    assert decoder.engine(tiny) is engine
    tiny.to(torch.float64)
    assert decoder.engine(tiny) is not engine
    tiny.generate(**prompts(2), **GREEDY, custom_generate=decoder)
    gone = weakref.ref(other), weakref.ref(other.model.layers)
    del other, one
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(decoder._engines) == 1


def test_threads_with_decoders_of_their_own_share_a_model(tiny: Any, router: str) -> None:
    kwargs = {**prompts(2), **GREEDY}
    expected = with_exits(tiny, router, **kwargs)

    def work() -> bool:
        # Each decoder is a new engine, which proves the model while the other thread decodes.
        decoders = [tide.decoder(router, EXIT) for _ in range(4)]
        outputs = [tiny.generate(**kwargs, custom_generate=decoder) for decoder in decoders * 2]
        return all(torch.equal(output, expected) for output in outputs)

    assert at_once(work, work) == [True, True]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("decoder", "position_ids"),
        ("decoder", "past_key_values"),
        ("decoder", "an empty cache"),
        ("folder", "assistant_model"),  # generate does not tell a decoding loop of it
        ("folder", "position_ids"),
        ("folder", "past_key_values"),
    ],
)
def test_what_generate_would_drop_is_refused(tiny: Any, router: str, name: str, way: str) -> None:
    given = {
        "assistant_model": tiny_model("llama", seed=2),
        "position_ids": torch.arange(9)[None] + 1,
        "past_key_values": tiny(prompts(1)["input_ids"][:, :4]).past_key_values,
        "an empty cache": DynamicCache(config=tiny.config),
    }[name]
    name = name.replace("an empty cache", "past_key_values")
    entry = {"custom_generate": tide.decoder(router)}
    if way == "folder":
        entry = {"custom_generate": router, "trust_remote_code": True}
    with pytest.raises(UnsupportedGenerationError, match=name):
        tiny.generate(**prompts(1), **GREEDY, **{name: given}, **entry)


def test_wrong_options_are_found_before_a_model_is(router: str) -> None:
    with pytest.raises(TypeError, match="riks"):
        tide.decoder(router, riks=0.1)
    with pytest.raises(ArtifactError, match="There is no artifact"):
        tide.decoder(router + "s")


def test_stop_strings(tiny: Any, router: str) -> None:
    tokenizer = tiny_tokenizer()
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    free = with_exits(tiny, router, **kwargs)
    stop = tokenizer.decode(free[0, -9:-7])
    decoder = tide.decoder(router, EXIT)
    # transformers keeps the tokenizer to itself; it must raise, not go on without the strings
    with pytest.raises(ValueError, match="stop strings"):
        tiny.generate(**kwargs, custom_generate=decoder, stop_strings=stop, tokenizer=tokenizer)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop)])
    out = tiny.generate(**kwargs, custom_generate=decoder, stopping_criteria=criteria)
    assert torch.equal(out, free[:, :-7])
    entry = {"custom_generate": router, "trust_remote_code": True, "config": EXIT}
    out = tiny.generate(**kwargs, **entry, stop_strings=stop, tokenizer=tokenizer)
    assert torch.equal(out, free[:, :-7])


def test_a_folder_generates_what_the_engine_generates(
    tiny: Any, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {**prompts(4), **GREEDY}
    entry = {"custom_generate": router, "trust_remote_code": True}
    assert torch.equal(tiny.generate(**kwargs, **entry), tiny.generate(**kwargs))
    ours = Recorder()
    out = tiny.generate(**kwargs, **entry, config=EXIT, streamer=ours)
    assert torch.equal(out, with_exits(tiny, router, **kwargs))
    theirs = Recorder()
    tide.TIDE(tiny, router, EXIT).generate(**kwargs, streamer=theirs)
    assert ours.ended and ours.pieces == theirs.pieces
    assert len(ours.pieces) == 1 + out.shape[1] - 9
    assert huggingface._shared.cache_info().misses == 2
    tiny.generate(**kwargs, **entry, config=EXIT)
    assert huggingface._shared.cache_info().misses == 2
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny.generate(**kwargs, custom_generate=router, trust_remote_code=False)
    with pytest.raises(CertificateError, match=r"risk 0\.02"):
        tiny.generate(**kwargs, **entry, risk=0.02)
    next(Path(router).glob("*.safetensors")).write_bytes(b"")
    os.utime(Path(router, "tide.json"), (1, 1))
    with pytest.raises(ArtifactError, match="damaged"):  # not the artifact that was there before
        tiny.generate(**kwargs, **entry)
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name == "tide-llm":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"tide-llm \(installed: None\)"):
        tiny.generate(**kwargs, **entry)


def test_an_artifact_in_the_folder_of_its_model(tiny: Any, router: str) -> None:
    tiny.save_pretrained(router)
    loaded = AutoModelForCausalLM.from_pretrained(router, trust_remote_code=True)
    made, kwargs = Artifact.load(router), {**prompts(2), **GREEDY}
    made.fingerprint = fingerprint(tiny, locate(tiny))  # a stored model names its architecture
    made.save_pretrained(router)
    expected = with_exits(tiny, router, **kwargs)
    assert torch.equal(loaded.generate(**kwargs, config=EXIT), expected)
    assert torch.equal(loaded.generate(**kwargs), tiny.generate(**kwargs))
    assert torch.equal(tide.TIDE(loaded, router, EXIT).generate(**kwargs), expected)


def test_a_folder_that_was_moved_is_an_error_that_names_the_way_out(
    tiny: Any, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, kwargs = router + "-moved", {**prompts(2), **GREEDY}
    shutil.move(router, moved)
    entry = {"custom_generate": moved, "trust_remote_code": True, "config": EXIT}
    monkeypatch.chdir(moved)  # an artifact that happens to be there is not meant
    with pytest.raises(ArtifactError, match=r"moved since it was written.*artifact='FOLDER'") as e:
        tiny.generate(**kwargs, **entry)
    assert router in str(e.value) and "save_pretrained(FOLDER)" in str(e.value)
    # Both ways out, as the message has them.
    expected = with_exits(tiny, moved, **kwargs)
    assert torch.equal(tiny.generate(**kwargs, **entry, artifact=moved), expected)
    Artifact.load(moved).save_pretrained(moved)
    assert torch.equal(tiny.generate(**kwargs, **entry), expected)


def test_single_files_and_folders_without_a_card_hold_the_same(router: str, tmp_path: Path) -> None:
    made = Artifact.load(router)
    for name in ("router.pt", "router.safetensors", "folder"):
        assert Artifact.load(made.save(tmp_path / name))._header() == made._header()
    found = {str(p.relative_to(router)) for p in Path(router).rglob("*") if p.is_file()}
    digest = json.loads(Path(router, "tide.json").read_text())["digest"]
    assert found == {
        "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt",
        "tide.json", f"tide-{digest[:16]}.safetensors",
    }  # fmt: skip
    made.save_pretrained(router)  # again, over itself
    assert "custom_generate" in Path(router, "README.md").read_text().splitlines()[2]


@pytest.mark.real
@pytest.mark.xdist_group("smollm2")
def test_chat_stream_and_pipeline_on_real_weights(
    model: Any, tokenizer: Any, small_artifact: Path
) -> None:
    chat = [{"role": "user", "content": "Why is the sea salty?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    config = TIDEConfig(exit_threshold=0.5)
    options: Any = {"max_new_tokens": 32, "do_sample": False}
    engine = tide.TIDE(model, small_artifact, config)
    new = engine.generate(**ids, **options)[0, ids["input_ids"].shape[1] :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    assert engine.last_stats.exited_tokens > 0

    decoder = tide.decoder(small_artifact, config)
    streamer = TextIteratorStreamer(
        tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120
    )
    streaming = decoder.with_streamer(streamer)
    thread = threading.Thread(
        target=model.generate, kwargs={**ids, **options, "custom_generate": streaming}
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected and len([p for p in pieces if p]) > 5

    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = pipe(chat, **options, custom_generate=decoder)
    assert answer["generated_text"][-1]["content"] == expected
    (answer,) = pipe(
        chat, **options, custom_generate=str(small_artifact), trust_remote_code=True, config=config
    )
    assert answer["generated_text"][-1]["content"] == expected
