"""A smoke test: the install without extras imports, and attaches to a tiny model."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tide
from tide.models.tokens import TokenBatch

config = AutoConfig.for_model(
    "llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=2,
)  # fmt: skip
runner = tide.attach(AutoModelForCausalLM.from_config(config).eval())
hidden = runner.run(TokenBatch(torch.arange(6)[None]), 0, 2, cache=runner.new_cache(1))
print(f"tide {tide.__version__}: attached, layer calls {runner.counts.calls}, {list(hidden.shape)}")
assert runner.counts.calls == [1, 1, 0, 0]
