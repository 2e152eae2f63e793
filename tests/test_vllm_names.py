"""Names of vLLM that the plugin touches: this fails where a version has moved or renamed one.

Imports are read from the plugin's code. Attributes are listed here by hand, since the plugin
reaches most of them through objects that only a running engine has.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from tide.vllm import ARCHITECTURES

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")

# The worker that imports vLLM for other tests too.
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

FILES = [*sorted((ROOT / "src/tide/vllm").glob("*.py")), ROOT / "src/tide/cli/serve.py"]

# Class -> attributes that it has, or that its code sets on its instances.
ATTRIBUTES: dict[str, str] = {
    "vllm.config.VllmConfig": "additional_config model_config compilation_config parallel_config "
    "speculative_config lora_config kv_transfer_config cache_config scheduler_config",
    "vllm.config.ModelConfig": "dtype hf_config hf_text_config quantization max_model_len "
    "is_hybrid is_attention_free",
    "vllm.config.ParallelConfig": "pipeline_parallel_size",
    "vllm.config.CacheConfig": "cache_dtype",
    "vllm.config.CompilationConfig": "cudagraph_mode cudagraph_capture_sizes",
    "vllm.config.CUDAGraphMode": "NONE PIECEWISE has_full_cudagraphs has_piecewise_cudagraphs",
    "vllm.config.SchedulerConfig": "max_num_seqs max_num_batched_tokens",
    "vllm.config.SpeculativeConfig": "method num_speculative_tokens draft_model_config",
    "vllm.ModelRegistry": "register_model",
    "vllm.forward_context.ForwardContext": "attn_metadata slot_mapping batch_descriptor",
    "vllm.forward_context.BatchDescriptor": "num_tokens",
    "vllm.distributed.parallel_state.GroupCoordinator": "broadcast_object is_first_rank",
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadata": "num_actual_tokens max_query_len "
    "query_start_loc max_seq_len seq_lens block_table slot_mapping scheduler_metadata causal",
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder": "isa",
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": "sliding_window forward "
    "do_kv_cache_update",
    "vllm.v1.attention.backend.AttentionBackend": "forward_includes_kv_cache_update get_name",
    "vllm.model_executor.layers.attention.attention.Attention": "layer_name num_heads num_kv_heads "
    "head_size head_size_v kv_cache kv_cache_dtype dtype impl attn_backend",
    "vllm.model_executor.layers.layernorm.RMSNorm": "hidden_size variance_epsilon "
    "variance_size_override weight",
    "vllm.model_executor.layers.linear.QKVParallelLinear": "bias quant_method",
    "vllm.model_executor.layers.linear.UnquantizedLinearMethod": "process_weights_after_loading",
    "vllm.platforms.interface.Platform": "is_cpu",
    "vllm.v1.sample.rejection_sampler.RejectionSampler": "forward sampler synthetic_mode",
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata": "max_spec_len",
    "vllm.envs": "VLLM_CPU_ATTN_SPLIT_KV",
}  # fmt: skip
# Function -> parameters that it is given by name.
PARAMETERS: dict[str, str] = {
    "vllm._custom_ops.cpu_attn_get_scheduler_metadata": "num_reqs num_heads num_kv_heads head_dim "
    "seq_lens dtype query_start_loc causal sliding_window_size isa enable_kv_split dynamic_causal "
    "kv_cache_dtype",
    "vllm.compilation.decorators.support_torch_compile": "dynamic_arg_dims",
    "vllm.distributed.tensor_model_parallel_all_gather": "dim",
    "vllm.SamplingParams": "temperature max_tokens",
    "vllm.v1.sample.sampler.Sampler.forward": "logits sampling_metadata predict_bonus_token",
}
# Parts of an architecture's modules: of the whole, of its decoder, of a layer and its attention.
PARTS = {"": "model lm_head compute_logits load_weights forward", "Model": "layers norm "
         "embed_input_ids", "DecoderLayer": "self_attn input_layernorm",
         "Attention": "attn qkv_proj o_proj rotary_emb"}  # fmt: skip
# Options of the server that `tide serve` sets or looks at.
OPTIONS = ("--model", "--dtype", "--speculative-config", "--additional-config",
           "--compilation-config", "--per-request-spec-decode-metrics", "--no-async-scheduling",
           "--shutdown-timeout", "--enforce-eager")  # fmt: skip


def imports() -> list[tuple[str, str]]:
    """The names that the plugin imports from vLLM, with their modules."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


def resolve(path: str) -> Any:
    """A module, or what is in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        of, _, name = path.rpartition(".")
        return getattr(resolve(of), name)


@cache
def code(of: Any) -> str:
    """The code of a class and of those that it extends, as far as they are vLLM's."""
    bases = of.__mro__ if inspect.isclass(of) else [of]
    return "\n".join(inspect.getsource(one) for one in bases if one.__module__.startswith("vllm"))


def missing(of: Any, names: str) -> list[str]:
    """The names that neither are there nor are set on `self` or declared."""
    return [
        name
        for name in names.split()
        if not hasattr(of, name)
        and (inspect.ismodule(of) or not re.search(rf"(self\.|^ +){name}\b *[:=,]", code(of), re.M))
    ]


def test_the_plugin_imports_from_vllm() -> None:
    assert len(imports()) > 15  # so the code is still found


@pytest.mark.parametrize(("module", "name"), imports(), ids=map(".".join, imports()))
def test_an_imported_name_is_there(module: str, name: str) -> None:
    resolve(f"{module}.{name}")


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_attributes_are_there(path: str) -> None:
    assert missing(resolve(path), ATTRIBUTES[path]) == []


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_are_there(path: str) -> None:
    function = resolve(path)
    function = getattr(function, "__wrapped__", function)
    taken = inspect.getsource(function) if path.endswith("torch_compile") else str(
        inspect.signature(function)
    )  # fmt: skip
    assert [n for n in PARAMETERS[path].split() if not re.search(rf"\b{n}\b", taken)] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parts_of_an_architecture_are_there(architecture: str) -> None:
    module = importlib.import_module(ARCHITECTURES[architecture])
    family = architecture.removesuffix("ForCausalLM")
    for part, names in PARTS.items():
        made = getattr(module, f"{family}{part}" if part else architecture)
        assert missing(made, names) == [], made


def test_the_operator_that_stores_kv_is_there() -> None:
    import torch

    importlib.import_module("vllm.model_executor.layers.attention.attention")
    assert hasattr(torch.ops.vllm, "unified_kv_cache_update")


def test_options_of_the_server_are_there() -> None:
    package = Path(str(importlib.import_module("vllm").__file__)).parent
    text = (package / "engine/arg_utils.py").read_text()
    assert [o for o in OPTIONS if f'"{o.replace("--no-", "--")}"' not in text] == []
    assert '"custom_class"' in (package / "config/speculative.py").read_text()
    # `tide serve` starts this module.
    assert importlib.util.find_spec("vllm.entrypoints.openai.api_server") is not None


def test_a_proposer_is_called_as_ours_is() -> None:
    """vLLM hands its arguments by position; ours must have as many."""
    from tide.vllm.proposer import TableProposer

    runner = Path(str(importlib.import_module("vllm").__file__)).parent
    text = (runner / "v1/worker/gpu_model_runner.py").read_text()
    call = text[text.index('method == "custom_class"', text.index("def propose_draft_token_ids")) :]
    arguments = re.search(r"\.propose\(([^)]*)\)", call)
    assert arguments is not None
    given = [one.strip() for one in arguments[1].split(",") if one.strip()]
    names = list(inspect.signature(TableProposer.propose).parameters)[1:]
    by_name = [one.split("=")[0] for one in given if "=" in one]
    assert len(given) <= len(names) and set(by_name) <= set(names), given
