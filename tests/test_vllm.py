"""The plugin in the real vLLM engine, each case in its own process."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import AutoConfig

import tide.vllm as tide_vllm
from tide.cli import serve
from tide.errors import ArtifactError, CertificateError, ConfigError, UnsupportedModelError
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.thresholds import Thresholds
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.vllm.settings import Settings
from tiny import tiny_model
from vllm_cases import case

aiohttp = pytest.importorskip("aiohttp", reason="comes with vLLM")

NEW = 16
COMPILED = {"enforce_eager": False}  # as vLLM starts by default

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(
        find_spec("vllm") is None,
        reason="vLLM is not installed; see docs/vllm.md",
    ),
]


def added(*counts: list[int]) -> list[int]:
    """Counts by layer, added up."""
    return [sum(of_a_layer) for of_a_layer in zip(*counts, strict=True)]


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """32 prompts of mixed lengths."""
    things = ["the sea", "bread", "a bicycle", "the moon", "chess", "rain", "gold", "a violin"]
    questions = ("What is {}?", "Tell me all you know about {}, at length and in order, please.",
            "Write a poem about {}. " + "It should rhyme. " * 12, "Why {}?")  # fmt: skip
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.format(thing)}],
            add_generation_prompt=True, return_dict=True,
        )["input_ids"]
        for thing in things for question in questions
    ]  # fmt: skip


@pytest.fixture(scope="module")
def baseline(smollm2_path: Path, prompts: list[list[int]]) -> Any:
    """The answers of vLLM with the plugin installed and not configured."""
    return case("answer", model=str(smollm2_path), prompts=prompts, new=NEW)


@pytest.mark.parametrize(
    ("never", "units"),
    [({"uncertified": True, "threshold_scale": -1.0}, 2), ({"script": 0.0}, 4)],
    ids=["unreachable thresholds", "segments, no exits"],
)
def test_without_exits_the_token_ids_are_those_of_vllm(
    smollm2_path: Path, small_artifact: Path, prompts: list[list[int]], baseline: Any,
    never: dict[str, Any], units: int,
) -> None:  # fmt: skip
    tide = {**never, "audit_rate": 0.0}
    if units == 2:
        tide["artifact"] = str(small_artifact)
    found = case("answer", model=str(smollm2_path), prompts=prompts, new=NEW, tide=tide,
                 options={**COMPILED, "max_num_batched_tokens": 64})  # fmt: skip
    assert found["class"] == baseline["class"] == "TideLlamaForCausalLM"
    assert "exits" not in baseline and found["exits"] == {}
    # Two segments, the KV of the second, and the model as vLLM runs it; or the last alone.
    assert found["units"] == units and found["graphs"] == (units if units > 2 else 1)
    assert found["answers"] == baseline["answers"]


@pytest.mark.parametrize("attention", ["subset", "all"])
def test_certified_exits_are_counted_and_stay_within_the_risk(
    smollm2_path: Path, certified_artifact: Path, prompts: list[list[int]], attention: str
) -> None:
    made = Artifact.load(certified_artifact)
    (certificate,) = made.certificates
    tide = {"artifact": str(certified_artifact), "risk": certificate.risk, "attention": attention,
            "audit_rate": 0.3, "gates": "always"}  # fmt: skip
    compiled = attention == "subset"  # the other has no need of graphs
    found = case("answer", model=str(smollm2_path), prompts=prompts, new=NEW, tide=tide,
                 options=COMPILED if compiled else {})  # fmt: skip
    exits = {int(layer): n for layer, n in found["exits"].items()}
    assert sum(exits.values()) > 0
    assert found["tokens"] == found["attended" if compiled else "seen"]
    assert found["graphs"] == (found["units"] if compiled else 0)  # each unit once, and no more
    assert found["stored"] == added(found["tokens"], found["fills"])
    # A token that exited after a layer skips the layers above; nothing else is skipped.
    given = found["tokens"][0]
    for n, tokens in enumerate(found["tokens"]):
        assert tokens == given - sum(count for layer, count in exits.items() if layer < n)
    assert added(found["tokens"], found["fills"]) == [given] * 30
    assert found["audited"] > 0
    texts = [p + answer for p, answer in zip(prompts, found["answers"], strict=True)]
    same = case(
        "target_matches", model=str(smollm2_path), texts=texts, starts=[len(p) for p in prompts]
    )
    assert sum(not all(matches) for matches in same) > 0, "nothing differs: the test cannot fail"
    assert 1 - sum(map(sum, same)) / sum(map(len, same)) <= certificate.risk


def test_preemption_and_prefix_caching_lose_no_token(
    smollm2_path: Path, small_artifact: Path, prompts: list[list[int]], baseline: Any
) -> None:
    tight = {"num_gpu_blocks_override": 20, "block_size": 32, "max_num_seqs": 8,
             "enable_prefix_caching": True, **COMPILED}  # fmt: skip
    exits = {"artifact": str(small_artifact), "uncertified": True, "gates": "always"}
    for tide, same in (({"script": 0.0, "audit_rate": 0.0}, True), (exits, False)):
        found = case("answer", model=str(smollm2_path), prompts=prompts, new=NEW, tide=tide,
                     options=tight)  # fmt: skip
        assert found["metrics"]["vllm:num_preemptions"] > 0
        assert [len(answer) for answer in found["answers"]] == [NEW] * 32
        assert not same or found["answers"] == baseline["answers"]
        texts = [p + answer for p, answer in zip(prompts, found["answers"], strict=True)]
        for seen in found["histories"]:  # the texts that the gates saw
            assert any(text[: len(seen)] == seen for text in texts)
        assert same or len(found["histories"]) > 20


def test_lossless_drafts_keep_the_token_ids_of_vllm(
    smollm2_path: Path, small_artifact: Path, prompts: list[list[int]], baseline: Any
) -> None:
    speculative = {"method": "custom_class", "model": "tide.vllm.proposer.TableProposer",
                   "num_speculative_tokens": 4}  # fmt: skip
    found = case(
        "answer", model=str(smollm2_path), prompts=prompts, new=NEW,
        tide={"artifact": str(small_artifact), "mode": "lossless", "cross_request_drafts": True},
        options={"speculative_config": speculative},
    )  # fmt: skip
    assert found["answers"] == baseline["answers"]
    assert found["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert "exits" not in found


@pytest.mark.parametrize(
    "limits",
    [{"num_gpu_blocks_override": 20, "block_size": 32, "max_num_seqs": 8},
     {"max_num_batched_tokens": 64}],
    ids=["preemption", "prompts in chunks"],
)  # fmt: skip
def test_compiled_drafts_keep_the_token_ids_of_vllm(
    smollm2_path: Path, prompts: list[list[int]], baseline: Any, limits: dict[str, int]
) -> None:
    speculative = {"method": "custom_class", "model": "tide.vllm.proposer.TableProposer",
                   "num_speculative_tokens": 4}  # fmt: skip
    found = case("answer", model=str(smollm2_path), prompts=prompts, new=NEW,
                 tide={"mode": "lossless"},
                 options={"speculative_config": speculative, **COMPILED, **limits})  # fmt: skip
    assert found["answers"] == baseline["answers"]
    assert found["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    if "num_gpu_blocks_override" in limits:
        assert found["metrics"]["vllm:num_preemptions"] > 0
    else:
        assert max(map(len, prompts)) > limits["max_num_batched_tokens"]


def test_drafts_without_an_artifact_keep_the_token_ids_of_vllm(
    smollm2_path: Path, prompts: list[list[int]], baseline: Any
) -> None:
    found = case(
        "drafts", model=str(smollm2_path), prompts=prompts, new=NEW, tide={"mode": "lossless"}
    )
    assert found["answers"] == baseline["answers"]
    counts = found["counts"]
    assert 0 < counts["tide:accepted_tokens_total"] < counts["tide:drafted_tokens_total"]
    assert counts["tide:draft_steps_total drafted"] > 0
    assert found["rejects"] and 0 not in found["rejects"]  # other steps are sampled as without us
    assert found["step_costs"] == {}  # an eager engine on a CPU does not warm up


def test_steps_are_measured_while_a_compiled_engine_warms_up(tmp_path: Path) -> None:
    tiny_model("llama", **SIZES).save_pretrained(tmp_path)
    options = {**SHORT["options"], **COMPILED}
    given = {**SHORT, "model": str(tmp_path), "options": options}
    found = case("drafts", **given, tide={"mode": "lossless"}, inductor=True)
    measured = [int(tokens) for tokens in found["step_costs"]]
    assert measured == [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 256]
    assert all(0 < seconds < 1 for seconds in found["step_costs"].values())
    assert "Drafts pay by requests, at 1: " in found["costs"]
    assert found["answers"] == case("ids", **given)


def test_an_unlisted_architecture_may_have_drafts(tmp_path: Path) -> None:
    tiny_model("granite", **SIZES).save_pretrained(tmp_path)
    # Answers end where the context does.
    short = {**SHORT, "new": 32, "options": {**SHORT["options"], "max_model_len": 32}}
    found = case("drafts", model=str(tmp_path), tide={"mode": "lossless"}, **short)
    assert (
        found["class"] == "GraniteForCausalLM" and found["counts"]["tide:drafted_tokens_total"] > 0
    )
    # Near the end, too, vLLM drafts nothing by itself.
    assert 0 < found["drafted"] <= found["counts"]["tide:drafted_tokens_total"]
    assert found["answers"] == case("ids", model=str(tmp_path), **short)


def test_vllm_answers_for_calibration(
    model: Any, smollm2_path: Path, prompts: list[list[int]]
) -> None:
    greedy, sampled, processes = case(
        "calibration_answers", model=str(smollm2_path), prompts=prompts[:2], new=8
    )
    for prompt, answer in zip(prompts, greedy, strict=False):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert out[0, len(prompt) :].tolist() == answer
    assert [len(answer) for answer in sampled] == [8, 8]
    # No process that would outlive a kill of this one.
    assert not [name for name in processes if "VLLM" in name]


def serve_arguments(*given: str) -> list[str]:
    """The arguments of vLLM for those of `tide serve`."""
    parser = argparse.ArgumentParser()
    serve.options(parser)
    args, args_rest = parser.parse_known_args(given)
    args.rest = args_rest
    return serve.server_arguments(args)


def test_serve_without_an_artifact_drafts_where_that_is_free(
    monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    device = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=device))
    drafts = serve_arguments("model", "--port", "1")
    assert drafts[-4:-2] == ["--additional-config", drafts[-3]] and drafts[-2:] == ["--port", "1"]
    assert json.loads(drafts[-3]) == {"tide": {"mode": "lossless", "cross_request_drafts": False}}
    assert "tide.vllm.proposer.TableProposer" in " ".join(drafts)
    assert drafts[-6:-4] == ["--per-request-spec-decode-metrics", "summary"]
    assert serve_arguments("model", "--lossless", "auto", "--port", "1") == drafts
    assert serve_arguments("model", "--lossless", "--port", "1") == drafts

    device.is_cpu = lambda: False
    off = ["--model", "model", "--dtype", "auto", "--port", "1"]
    assert serve_arguments("model", "--port", "1") == off
    assert "--lossless" in capsys.readouterr().err
    assert serve_arguments("model", "--lossless", "--port", "1") == drafts
    alone = ["model", "--no-async-scheduling"]  # graphs would be lost all the same
    assert serve_arguments(*alone) == [*off[:4], alone[1]]
    assert serve_arguments("model", "--off", "--port", "1") == off
    config = ["--additional-config", "{}"]
    assert serve_arguments("model", "DIR", "--off", *config) == [*off[:4], *config]
    with pytest.raises(ConfigError, match="use --off"):
        serve_arguments("model", *config)
    with pytest.raises(ConfigError, match="Exits need an artifact"):
        serve_arguments("model", "--risk", "0.1")
    with pytest.raises(ConfigError, match="next to each other"):
        serve_arguments("model", "--dtype", "float32", "DIR")


def test_serve_builds_the_arguments_of_vllm(
    smollm2_path: Path, certified_artifact: Path, small_artifact: Path
) -> None:
    def arguments(folder: Path, *more: str) -> list[str]:
        return serve_arguments(str(smollm2_path), str(folder), *more)

    lossless = arguments(small_artifact, "--lossless", "--port", "1")
    assert "tide.vllm.proposer.TableProposer" in " ".join(lossless)
    assert lossless[-2:] == ["--port", "1"] and "--enforce-eager" not in lossless
    assert '"cross_request_drafts": false' in lossless[-3]
    shared = arguments(small_artifact, "--lossless", "--cross-request-drafts")
    assert '"cross_request_drafts": true' in shared[-1]
    certified = arguments(certified_artifact, "--risk", "0.2", "--dtype", "float32")
    assert "--enforce-eager" not in certified and '"risk": 0.2' in certified[-1]
    assert '"gates": "by_cost"' in certified[-1]
    with pytest.raises(CertificateError, match=r"No certificate covers risk 0.01"):
        arguments(certified_artifact, "--risk", "0.01", "--dtype", "float32")
    with pytest.raises(CertificateError, match="is for dtype float32"):
        arguments(certified_artifact, "--risk", "0.2", "--dtype", "bfloat16")
    with pytest.raises(CertificateError, match="Choose how to serve"):
        arguments(small_artifact)
    for given, error in (
        (["--risk", "0.2", "--drafts", "4"], "--drafts is 4, and counts with --lossless only"),
        (["--uncertified", "--on-drift", "full_depth"], "counts with --risk only"),
        (["--lossless", "--audit-rate", "0.5"], "counts with exits only"),
        # As vLLM spells them too.
        (["--risk", "0.2", "--additional_config", "{}"], "--additional-config would"),
        (["--lossless", "-sc", "{}"], "--speculative-config would"),
        (["--lossless", "--speculative-config.method", "ngram"], "--speculative-config would"),
        (["--lossless", "--config", "file.yaml"], "--config would"),
    ):
        with pytest.raises(ConfigError, match=error):
            arguments(certified_artifact, *given)


def test_serve_has_exits_for_the_models_of_the_plugin_only(
    small_artifact: Path, tmp_path: Path
) -> None:
    tiny_model("granite", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GraniteForCausalLM has no exits"):
        serve_arguments(str(tmp_path), str(small_artifact), "--uncertified")


SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
SHORT: dict[str, Any] = {
    "prompts": [[(7 * i + 3 * k) % 250 + 1 for k in range(5 + i)] for i in range(6)],
    "new": 12,
    "options": {"skip_tokenizer_init": True, "max_model_len": 64, "enable_prefix_caching": False},
}


# Mistral and Qwen2 are built like Llama; a minute for each.
SOME = ["llama", "qwen3", "gemma3_text"]
ALL = [*SOME, "mistral", "qwen2"]


@pytest.mark.parametrize("family", ALL if os.environ.get("TIDE_TEST_SWEEP") else SOME)
def test_every_architecture_skips_the_same_layers_in_both_attentions(
    family: str, tmp_path: Path
) -> None:
    tiny_model(family, **SIZES).save_pretrained(tmp_path)
    tide = {"script": 0.5, "audit_rate": 0.0}
    found = case("both_attentions", model=str(tmp_path), tide=tide, **SHORT)
    assert found["no exits"] == found["vLLM"]
    assert found["subset"] == found["all"] != found["vLLM"]
    assert sum(found["exits"].values()) > 20
    compiled = case("compiled", model=str(tmp_path), tide=tide, inductor=family == "llama", **SHORT)
    assert compiled["no exits"] == found["vLLM"] and compiled["exits"] == found["subset"]
    assert compiled["tokens"] == compiled["attended"]
    assert sum(compiled["fills"]) > 0
    assert compiled["stored"] == added(compiled["tokens"], compiled["fills"])
    # Two segments, the KV of the second, and the model as vLLM runs it; no more while serving.
    assert compiled["graphs"] == 4
    # Others norm their keys. What does not compute the layers' KV is not used.
    assert compiled["folded"] == [family in ("llama", "mistral", "qwen2"), False]


def test_the_audit_finds_what_scripted_gates_let_exit() -> None:
    """So the risk is known in `bench/vllm_simulation.py`; its exits are always wrong."""
    exits, losses = case("scripted_losses", audit_rate=1.0)
    assert losses == exits and sum(exits) > 0


def test_two_ranks_predict_the_tokens_of_one(tmp_path: Path) -> None:
    """SmolLM2 has nine heads, which two ranks cannot share."""
    model, tide = tiny_with_exits(tmp_path)
    tide |= {"gates": "always", "audit_rate": 0.3}
    alone = case("answer", model=model, tide=tide, **SHORT)
    assert sum(alone["exits"].values()) > 0 and alone["payoff"] is None
    both = {**SHORT, "options": {**SHORT["options"], "tensor_parallel_size": 2, **COMPILED}}
    assert case("ids", model=model, tide=tide, **both) == alone["answers"]


def test_costs_are_measured_before_the_first_answer_and_compile_nothing_later(
    tmp_path: Path,
) -> None:
    model, tide = tiny_with_exits(tmp_path)
    options = {**SHORT["options"], **COMPILED}
    found = case("answer", model=model, tide=tide, **{**SHORT, "options": options})
    assert found["payoff"].startswith("gates pay ")
    assert found["graphs"] == found["units"] == 6
    assert [len(answer) for answer in found["answers"]] == [SHORT["new"]] * len(SHORT["prompts"])


def tiny_with_exits(folder: Path) -> tuple[str, dict[str, Any]]:
    """A tiny model, and settings for exits at two checkpoints of it."""
    model = tiny_model("llama", **SIZES)
    model.save_pretrained(folder / "model")
    exits = [
        Checkpoint(layer, ExitHead("identity", 128), thresholds=Thresholds(top_probability=0.12))
        for layer in (1, 3)
    ]
    some = torch.arange(0, 256, 2)
    Artifact(fingerprint(model, locate(model)), 128, exits, vocabulary=some).save(folder / "exits")
    return str(folder / "model"), {"artifact": str(folder / "exits"), "uncertified": True}


@pytest.fixture(scope="module")
def server(smollm2_path: Path, certified_artifact: Path, tmp_path_factory: Any) -> Iterator[str]:
    """The address of `tide serve`."""
    risk = Artifact.load(certified_artifact).certificates[0].risk
    port = random.SystemRandom().randint(20000, 40000)
    command = [sys.executable, "-m", "tide.cli", "serve", str(smollm2_path),
               str(certified_artifact), "--risk", str(risk), "--dtype", "float32",
               "--port", str(port), "--audit-rate", "0", "--gates", "always",
               "--max-model-len", "512", "--max-num-seqs", "32"]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                   "VLLM_CPU_CI_ENV": "1"}  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    address = f"http://127.0.0.1:{port}"
    for _ in range(900):  # a minute where nothing else runs
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if urllib.request.urlopen(f"{address}/health").status == 200:
                break
        except OSError:
            time.sleep(1)
    else:
        pytest.fail(f"The server does not answer:\n{log.read_text()[-3000:]}")
    yield address
    process.terminate()
    assert process.wait(60) is not None


def test_a_server_under_load_neither_loses_nor_mixes_answers(
    server: str, smollm2_path: Path, prompts: list[list[int]]
) -> None:
    draw = random.Random(0)
    plans = [
        (draw.randrange(32), draw.randint(4, 16), draw.random() < 0.5, draw.random() < 0.2)
        for _ in range(100)
    ]

    async def request(session: Any, plan: tuple[int, int, bool, bool]) -> str | None:
        """The answer; None if the client disconnects before it comes."""
        prompt, new, streams, aborts = plan
        body = {"model": str(smollm2_path), "prompt": prompts[prompt], "max_tokens": new,
                "temperature": 0, "ignore_eos": True, "stream": streams}  # fmt: skip
        limit = aiohttp.ClientTimeout(total=draw.uniform(0.1, 3.0) if aborts else 300)
        try:
            async with session.post(f"{server}/v1/completions", json=body, timeout=limit) as got:
                assert got.status == 200, await got.text()
                if not streams:
                    return (await got.json())["choices"][0]["text"]
                lines = [line async for line in got.content if line.startswith(b"data: {")]
                return "".join(json.loads(x[6:])["choices"][0]["text"] for x in lines)
        except asyncio.TimeoutError:
            assert aborts
            return None

    async def all_at_once() -> list[str | None]:
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connections) as session:
            return await asyncio.gather(*(request(session, plan) for plan in plans))

    async def one_by_one() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return [str(await request(session, (p, 16, False, False))) for p in range(32)]

    texts, alone = asyncio.run(all_at_once()), asyncio.run(one_by_one())
    answered = [(plan, text) for plan, text in zip(plans, texts, strict=True) if text is not None]
    assert len(answered) >= sum(not plan[3] for plan in plans)
    for plan, text in answered:
        assert text and alone[plan[0]].startswith(text.removesuffix("\ufffd"))
    metrics = urllib.request.urlopen(f"{server}/metrics").read().decode()
    counted = dict(re.findall(r'^tide:tokens_total\{layer="(\w+)"\} (\S+)$', metrics, re.M))
    assert float(counted["24"]) > 0 and float(counted["full"]) > 0
    assert re.search(r'^tide:token_layers_total\{done="saved"\} [1-9]', metrics, re.M)


def configuration(path: Path, tide: Any, **changes: Any) -> Any:
    """The part of vLLM's configuration that the settings read."""
    config = AutoConfig.from_pretrained(path)
    config.architectures = changes.pop("architectures", config.architectures)
    from vllm.config import CUDAGraphMode

    mode = changes.pop("graphs", CUDAGraphMode.NONE)
    model = {"dtype": torch.float32, "hf_config": config,
             "hf_text_config": config, "quantization": None, "is_multimodal_model": False,
             "runner_type": "generate", "enable_prompt_embeds": False, "is_hybrid": False,
             "is_attention_free": False,
             **changes.pop("model", {})}  # fmt: skip
    parallel = {"pipeline_parallel_size": 1, "use_ubatching": False,
                "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
                **changes.pop("parallel", {})}  # fmt: skip
    return SimpleNamespace(
        additional_config={"tide": tide},
        model_config=SimpleNamespace(**model),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(**parallel),
        use_v2_model_runner=changes.pop("second_runner", False),
        speculative_config=changes.pop("speculative", None),
        lora_config=changes.pop("lora", None),
        kv_transfer_config=changes.pop("transfer", None),
        cache_config=SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
    )


def test_unsupported_settings_raise(
    smollm2_path: Path, small_artifact: Path, monkeypatch: Any
) -> None:
    from vllm.config import CUDAGraphMode

    good = {"artifact": str(small_artifact), "uncertified": True}

    def read(tide: Any = good, **changes: Any) -> Any:
        config = configuration(smollm2_path, tide, **changes)
        found = Settings.read(config)
        return found and found.load(config)

    assert read()[2] == 1.0
    assert Settings.read(SimpleNamespace(additional_config={})) is None
    any_model = {"architectures": ["OPTForCausalLM"]}  # and no artifact
    speculation = SimpleNamespace(method="custom_class")
    lossless = {"mode": "lossless"}
    drafts = configuration(smollm2_path, lossless, speculative=speculation, **any_model)
    assert Settings.read(drafts) == Settings(mode="lossless")
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ConfigError, "has \\['riks'\\]", {**good, "riks": 1}, {}),
        (ConfigError, "names no artifact", {"uncertified": True}, {}),
        (CertificateError, "names no risk", {"artifact": "x"}, {}),
        (CertificateError, "tide certify.*propagate", {**good, "uncertified": False, "risk": 0.02},
         {}),
        (ConfigError, "PIECEWISE", good, {"graphs": CUDAGraphMode.FULL_AND_PIECEWISE}),
        (ConfigError, "gates is 'never'", {**good, "gates": "never"}, {}),
        (ConfigError, "mode is 'fast'", {**good, "mode": "fast"}, {}),
        (ConfigError, "on_drift is 'stop'", {**good, "on_drift": "stop"}, {}),
        (ConfigError, "attention is 'some'", {**good, "attention": "some"}, {}),
        (ConfigError, "audit_rate is '0.1'; it must be", {**good, "audit_rate": "0.1"}, {}),
        (ConfigError, "uncertified is 'false'; it must be true or false",
         {**good, "uncertified": "false"}, {}),
        (ConfigError, "Omit threshold_scale", {"artifact": "x", "risk": 0.1, "threshold_scale": 2},
         {}),
        (ConfigError, "Omit uncertified", {**good, "risk": 0.1}, {}),
        (ConfigError, "Omit script", {"script": 0.5, "risk": 0.1}, {}),
        (ConfigError, "speculation, which is not configured", lossless, {}),
        (ConfigError, "speculation, which is not configured", lossless,
         {"speculative": SimpleNamespace(method="ngram")}),
        (ConfigError, "risk is 0.02, and counts with mode 'exit' only", {**lossless, "risk": 0.02},
         {"speculative": speculation}),
        (ConfigError, "cross_request_drafts is True, and counts with mode 'lossless' only",
         {**good, "cross_request_drafts": True}, {}),
        (ConfigError, "on_drift is 'full_depth', and counts with risk only",
         {**good, "on_drift": "full_depth"}, {}),
        (ConfigError, "on_drift is 'full_depth', and counts with an audit_rate above 0 only",
         {"artifact": "x", "risk": 0.1, "on_drift": "full_depth", "audit_rate": 0.0}, {}),
        (UnsupportedModelError, "MambaForCausalLM keeps recurrent state", lossless,
         {"speculative": speculation, "architectures": ["MambaForCausalLM"],
          "model": {"is_attention_free": True}}),
        (ConfigError, "VLLM_USE_V2_MODEL_RUNNER=0", good, {"second_runner": True}),
        (ConfigError, "do not combine", good, {"speculative": object()}),
        (UnsupportedModelError, "pipeline_parallel_size", good,
         {"parallel": {"pipeline_parallel_size": 2}}),
        (UnsupportedModelError, "microbatches", good, {"parallel": {"use_ubatching": True}}),
        (UnsupportedModelError, "context parallelism", good,
         {"parallel": {"decode_context_parallel_size": 2}}),
        (UnsupportedModelError, "images or sound", good, {"model": {"is_multimodal_model": True}}),
        (UnsupportedModelError, "pooling", good, {"model": {"runner_type": "pooling"}}),
        (UnsupportedModelError, "embeddings", good, {"model": {"enable_prompt_embeds": True}}),
        (UnsupportedModelError, "quantised weights", good, {"model": {"quantization": "awq"}}),
        (UnsupportedModelError, "KV transfer", good, {"transfer": object()}),
        (UnsupportedModelError, "LoRA adapters", good, {"lora": object()}),
        (UnsupportedModelError, "set it to auto", good, {"cache_dtype": "fp8"}),
        (UnsupportedModelError, "OPTForCausalLM has no exits", good, any_model),
    ]  # fmt: skip
    for error, message, tide, changes in cases:
        with pytest.raises(error, match=message):
            read(tide, **changes)
    other = AutoConfig.from_pretrained(smollm2_path)
    other.rope_theta = 7.0
    with pytest.raises(ArtifactError, match="made for another model"):
        read(model={"hf_text_config": other})
    monkeypatch.setattr(tide_vllm, "TESTED", (Version("0.1"), Version("0.2")))
    with pytest.raises(UnsupportedModelError, match=r"tested with 0.1 up to, not including, 0.2"):
        read()
    assert Settings.read(SimpleNamespace(additional_config={})) is None  # other models keep working
