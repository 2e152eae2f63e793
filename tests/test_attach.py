"""What cannot be run correctly is refused by name; what can is proven, found and told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import tide
from scenarios import SCENARIOS, error, full_depth
from tide.errors import (
    ConfigError,
    SelfCheckError,
    TideError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from tide.models import segments, shims
from tide.models.attach import RUNNERS, attach
from tide.models.chunk import Places
from tide.models.families import EAGER_ONLY
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tide.models.masks import attention_mask
from tide.models.runner import DepthRunner
from tide.models.selfcheck import self_check
from tide.models.tokens import TokenBatch
from tiny import _ROPE, FAMILIES, tiny_model

every_runner = pytest.mark.parametrize("runner", RUNNERS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@every_runner
def test_every_family_attaches_proven(runner: str, family: str, attention: str) -> None:
    made = tide.attach(tiny_model(family, attention=attention), runner=runner)
    assert made.name == runner
    assert max(self_check(made)) < 1e-5
    assert sum(made.counts.calls) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_as_segments(family: str) -> None:
    assert tide.attach(tiny_model(family)).name == "segments"


@pytest.mark.parametrize(
    ("family", "known_by"),
    [
        ("granite", "EMBEDDING_SCALES"),
        ("gpt2", "LEARNED_POSITIONS"),
        ("opt", "LEARNED_POSITIONS"),
    ],
)
def test_what_a_decoder_adds_to_its_input_is_added_once(
    family: str, known_by: str, monkeypatch: Any
) -> None:
    """By a row of data; without the row the slice is not proven, and shims run the model."""
    changes = {"embedding_multiplier": 3.0} if family == "granite" else {}
    model = tiny_model(family, **changes)
    runner = tide.attach(model)
    assert runner.name == "segments"
    check_scenarios(model, runner)
    monkeypatch.setattr(segments, known_by, ())
    with pytest.raises(SelfCheckError, match=r"layer 2 of 6.* as segments"):
        tide.attach(model, runner="segments")
    runner = tide.attach(model)
    assert runner.name == "shims"
    check_scenarios(model, runner)


# CTRL adds sines to whatever it is given; NanoChat applies its norm before its layers too.
UNSLICED = {
    "ctrl": {"vocab_size": 97, "n_embd": 32, "dff": 64, "n_layer": 6, "n_head": 4},
    "nanochat": _ROPE,
}


@pytest.mark.parametrize("family", UNSLICED)
def test_a_decoder_whose_slices_are_not_equal_runs_with_shims(
    family: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(FAMILIES, family, UNSLICED[family])
    model = tiny_model(family)
    with pytest.raises(SelfCheckError, match=r"layer \d of 6.* as segments"):
        tide.attach(model, runner="segments")
    runner = tide.attach(model)
    assert runner.name == "shims"
    check_scenarios(model, runner)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_decoder_with_accelerate_hooks_runs_with_shims(family: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model(family)

    class Counting(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    hook = Counting()
    hooks.add_hook_to_module(locate(model).decoder, hook)
    with pytest.raises(UnsupportedModelError, match="forward of its own, as accelerate's hooks"):
        tide.attach(model, runner="segments")
    runner = tide.attach(model)
    assert runner.name == "shims"
    calls = hook.calls
    runner.run(TokenBatch(torch.ones(1, 3, dtype=torch.long)), 0, 6, cache=runner.new_cache(1))
    assert hook.calls == calls + 1
    check_scenarios(model, runner)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_a_dispatched_decoder_runs_with_shims(device_map: dict[str, str]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(tiny_model("llama"), device_map, force_hooks=True)
    runner = tide.attach(model)
    assert runner.name == "shims"
    check_scenarios(model, runner)


@every_runner
def test_without_the_check_nothing_is_proven(runner: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("tide.models.attach.self_check", lambda made: pytest.fail("checked"))
    assert tide.attach(tiny_model("llama"), check=False).name == "segments"
    assert tide.attach(tiny_model("llama"), check=False, runner=runner).name == runner


def test_an_unknown_runner_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runner is 'layers'; .*one of segments, compiled"):
        tide.attach(tiny_model("llama"), runner="layers")


def from_config(model_type: str, auto: Any = AutoModelForCausalLM, **config: Any) -> Any:
    return auto.from_config(AutoConfig.for_model(model_type, **config)).eval()


def mamba() -> Any:
    return from_config("mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)


def hybrid() -> Any:
    return from_config("lfm2", **_ROPE, full_attn_idxs=[1, 3])


def shared_kv() -> Any:
    model = tiny_model("llama")
    model.config.num_kv_shared_layers = 2
    return model


def bloom() -> Any:
    return from_config("bloom", vocab_size=97, hidden_size=32, n_layer=2, n_head=4)


def falcon_alibi() -> Any:
    return tiny_model("falcon", alibi=True)


def encoder_decoder() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return from_config("t5", auto=AutoModelForSeq2SeqLM, vocab_size=97, **sizes)


def flash_attention() -> Any:
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    return model


def flex_attention() -> Any:
    return tiny_model("llama", attention="flex_attention")


def gemma2_flash_attention() -> Any:
    model = tiny_model("gemma2")
    model.config._attn_implementation = "flash_attention_2"
    return model


def gpt_oss_flash_attention() -> Any:
    model = tiny_model("gpt_oss")
    model.config._attn_implementation = "flash_attention_2"
    return model


def tensor_parallel() -> Any:
    model = tiny_model("llama")
    model._tp_size = 2
    return model


def test_models_sharded_over_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr("tide.models.refuse.is_fsdp_managed_module", lambda _: True)
    attach(model)  # one process holds all of it
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(UnsupportedModelError, match=r"sharded over processes .*FSDP"):
        attach(model)


def training() -> Any:
    return tiny_model("gpt2").train()


def no_head() -> Any:
    return from_config("llama", auto=AutoModel, **_ROPE)


def not_hugging_face() -> Any:
    return nn.Linear(2, 2)


def gpt_neo() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_layers": 4, "num_heads": 4}
    return from_config("gpt_neo", **sizes, attention_types=[[["global", "local"], 2]])


def mpt() -> Any:
    return from_config("mpt", vocab_size=97, d_model=32, n_layers=2, n_heads=4)


def rwkv() -> Any:
    return from_config("rwkv", vocab_size=97, hidden_size=32, num_hidden_layers=2)


def bert_as_decoder() -> Any:
    return from_config(
        "bert", vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, is_decoder=True,
    )  # fmt: skip


REFUSED = {
    mpt: ("MptForCausalLM", "ALiBi", "rotary or learned positions"),
    rwkv: ("RwkvForCausalLM", "recurrent or hybrid state", "needs attention with KV"),
    bert_as_decoder: ("BertLMHeadModel", "its own code failed", "AutoModelForCausalLM"),
    mamba: ("MambaForCausalLM", "recurrent or hybrid state", "needs attention with KV"),
    hybrid: ("Lfm2ForCausalLM", "recurrent or hybrid state", "needs attention with KV"),
    shared_kv: ("LlamaForCausalLM", "shares KV", "Use a model"),
    bloom: ("BloomForCausalLM", "ALiBi", "rotary or learned positions"),
    falcon_alibi: ("FalconForCausalLM", "ALiBi", "rotary or learned positions"),
    encoder_decoder: ("T5ForConditionalGeneration", "encoder-decoder", "AutoModelForCausalLM"),
    flash_attention: ("LlamaForCausalLM", "flash_attention_2", "attn_implementation='sdpa'"),
    flex_attention: ("LlamaForCausalLM", "flex_attention", "attn_implementation='sdpa'"),
    gemma2_flash_attention: (
        "Gemma2ForCausalLM",
        "flash_attention_2",
        "attn_implementation='eager' (allowed: eager)",
    ),
    gpt_oss_flash_attention: (
        "GptOssForCausalLM",
        "flash_attention_2",
        "attn_implementation='eager' (allowed: eager)",
    ),
    tensor_parallel: ("LlamaForCausalLM", "over 2 processes (tensor parallelism", "vLLM"),
    training: ("GPT2LMHeadModel", "training mode", "model.eval()"),
    no_head: ("LlamaModel", "head", "AutoModelForCausalLM"),
    not_hugging_face: ("Linear", "no config", "AutoModelForCausalLM"),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_at_attach_with_name_reason_and_way_out(make: Any) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        tide.attach(make())
    for words in REFUSED[make]:
        assert words in str(refusal.value)
    assert isinstance(refusal.value, TideError) and isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    "make", [training, bert_as_decoder, no_head, gpt_neo], ids=lambda make: make.__name__
)
def test_a_decoder_names_the_class_of_a_model_that_it_refuses(make: Any) -> None:
    """Its engine holds the model by a weak reference, which has a class of its own."""
    model = make()
    with pytest.raises(TideError, match=rf"^{type(model).__name__}\b"):
        tide.decoder().engine(model)


def test_every_family_for_which_eager_is_named_is_tested() -> None:
    assert set(EAGER_ONLY) == {"gemma2", "gpt_oss"}


def test_one_process_of_tensor_parallelism_is_taken() -> None:
    model = tiny_model("llama")
    model._tp_size = 1
    assert tide.attach(model).name == "segments"


def test_a_family_that_counts_keys_by_slot_fails_the_self_check() -> None:
    """GPT-Neo masks by slot inside its layers, which no explicit mask can put right."""
    with pytest.raises(SelfCheckError, match=r"GPTNeoForCausalLM: layer \d of 4"):
        tide.attach(gpt_neo())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@every_runner
def test_a_wrong_mask_fails_the_self_check(
    runner: str, family: str, dtype: Any, monkeypatch: Any
) -> None:
    def forgets_padding(chunk: Any, *args: Any) -> Any:
        packed = chunk.places.packed.clone()
        packed[..., 1] += packed[..., 2]  # positions count from slot 0
        packed[..., 2] = 0
        return attention_mask(replace(chunk, places=Places(packed)), *args)

    model = tiny_model(family, dtype=dtype)
    for module in (segments, shims):
        monkeypatch.setattr(module, "attention_mask", forgets_padding)
    with pytest.raises(SelfCheckError, match=f"layer 0 of 6.* as {runner}"):
        tide.attach(model, runner=runner)


def test_a_cache_setting_of_older_gemma_folders_is_taken() -> None:
    model = tiny_model("gemma3_text")
    model.generation_config.cache_implementation = "hybrid"
    tide.attach(model)


@every_runner
def test_layers_that_store_no_kv_cannot_be_filled(runner: str) -> None:
    model = tiny_model("llama")
    made = tide.attach(model, runner=runner)
    model.model.layers[3].forward = lambda hidden_states, **_: hidden_states
    tokens = TokenBatch(torch.randint(3, 97, (1, 4)))
    cache = made.new_cache(1)
    hidden = made.run(tokens, 0, 3, cache=cache)
    with pytest.raises(UnsupportedModelError, match="without storing KV"):
        made.fill_kv(tokens, 3, 6, cache=cache, hidden=hidden)
    assert cache.lengths(3) == (0,)


@pytest.mark.parametrize("setting", ["static", "offloaded_static", "quantized", "offloaded"])
def test_cache_settings_that_cannot_hold_different_depths_are_refused(setting: str) -> None:
    model = tiny_model("llama")
    model.generation_config.cache_implementation = setting
    with pytest.raises(
        UnsupportedCacheError, match=f"LlamaForCausalLM.*'{setting}'.*cache_implementation = None"
    ):
        tide.attach(model)


@every_runner
def test_self_check_names_the_first_layer_that_differs(runner: str) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[3]
    whole = layer.mlp.forward

    def depends_on_chunk_length(states: torch.Tensor) -> torch.Tensor:
        return whole(states) * (1.5 if states.shape[1] == 1 else 1.0)

    layer.mlp.forward = depends_on_chunk_length
    # One-token steps go through layers 0 and 1 only; layer 3 sees the tokens together.
    tide.attach(model, runner=runner)
    model.model.layers[1].mlp.forward = depends_on_chunk_length
    with pytest.raises(SelfCheckError, match="layer 1 of 6 gives another output"):
        tide.attach(model, runner=runner)


def test_self_check_finds_logits_that_norm_and_head_do_not_give() -> None:
    model = tiny_model("llama")
    whole = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = forward
    with pytest.raises(SelfCheckError, match=r"final norm and head.*do not give"):
        tide.attach(model)


def test_locate_names_the_way_that_found_the_parts() -> None:
    model = tiny_model("gpt_neox")
    by_accessors = locate(model)
    assert by_accessors.found_by == "accessors"

    model.get_decoder = lambda: None
    by_row = locate(model)
    assert by_row.found_by == "family row"

    model.config.model_type = "never heard of"
    by_probe = locate(model)
    assert by_probe.found_by == "probe"
    for other in (by_row, by_probe):
        assert other.decoder is by_accessors.decoder and other.layers is by_accessors.layers
        assert other.norm is by_accessors.norm and other.head is by_accessors.head


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_alone_finds_every_family(family: str) -> None:
    model = tiny_model(family)
    expected = locate(model)
    model.get_decoder = lambda: None
    model.config.model_type = "never heard of"
    found = locate(model)
    assert found.found_by == "probe"
    assert (found.decoder, found.layers, found.norm, found.head) == (
        expected.decoder,
        expected.layers,
        expected.norm,
        expected.head,
    )


def test_fingerprint_tells_models_apart_and_dtypes_not() -> None:
    model = tiny_model("llama")
    parts = locate(model)
    original = fingerprint(model, parts)
    assert original == fingerprint(model, parts)
    rounded = tiny_model("llama", dtype=torch.bfloat16)
    assert fingerprint(rounded, locate(rounded)) == original

    with torch.no_grad():
        model.model.layers[4].mlp.up_proj.weight.add_(0.01)
    assert fingerprint(model, parts).differences(original) == ["layers"]
    narrow = tiny_model("llama")  # the first input of each weight stays as it was
    with torch.no_grad():
        for layer in narrow.model.layers:
            layer.mlp.up_proj.weight[:, 1:].neg_()
    assert fingerprint(narrow, locate(narrow)).differences(original) == ["layers"]

    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    model.config.rms_norm_eps = 1e-4
    assert fingerprint(model, parts).differences(original) == ["config", "head", "layers"]


def test_fingerprint_reads_embeddings_of_positions() -> None:
    model = tiny_model("gpt2")
    original = fingerprint(model, locate(model))
    with torch.no_grad():
        model.transformer.wpe.weight.add_(0.1)
    assert fingerprint(model, locate(model)).differences(original) == ["head"]


def test_int8_weight_only_model() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama", hidden_size=64)
    original = fingerprint(model, locate(model))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    runner = tide.attach(model)
    assert runner.name == "segments"
    assert fingerprint(model, runner.parts).differences(original) == ["head", "layers"]
    check_scenarios(model, runner)


def check_scenarios(model: Any, runner: DepthRunner) -> None:
    for name, scenario in SCENARIOS.items():
        for ids, got in scenario(runner, torch.randint(3, 97, (2, 12))):
            assert error(got, full_depth(model, runner, ids)[-len(got) :]) <= 1e-5, name


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_oss"])
@every_runner
def test_layers_offloaded_to_cpu_and_disk(runner: str, family: str, tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(family)
    parts = locate(model)
    original = fingerprint(model, parts)
    names = {id(module): name for name, module in model.named_modules()}
    device_map = {
        name: "cpu" for name, module in model.named_modules() if not list(module.children())
    }
    device_map = {n: d for n, d in device_map.items() if not n.startswith(names[id(parts.layers)])}
    for i, layer in enumerate(parts.layers):
        device_map[names[id(layer)]] = "disk" if i % 2 else "cpu"
    model = accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    offloaded = list(parts.layers)[1::2]
    assert all(p.is_meta for layer in offloaded for p in layer.parameters())

    made = tide.attach(model, runner=runner)
    assert tide.attach(model).name == "segments"
    assert fingerprint(model, made.parts) == original
    check_scenarios(model, made)
    cache = made.new_cache(1)
    tokens = TokenBatch(torch.randint(3, 97, (1, 4)))
    hidden = made.run(tokens, 0, 1, cache=cache)
    made.fill_kv(tokens, 1, 6, cache=cache, hidden=hidden)
    assert cache.lengths(5) == (4,)
    assert all(p.is_meta for layer in offloaded for p in layer.parameters())
