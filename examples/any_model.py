"""Any model: can TIDE run it, and is it worth calibrating?

    python examples/any_model.py --model Qwen/Qwen3-0.6B
    python examples/any_model.py --model path/to/a/folder

Attaching checks on the model itself that running it by depth ranges equals its own forward pass; a
model that cannot be run this way raises an error with the reason. Assessing then measures at which
depth tokens already agree with full depth, before any training.
"""

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import tide
from tide.errors import TideError

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--new-tokens", type=int, default=32)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
try:
    runner = tide.attach(model)
except TideError as error:
    sys.exit(f"Not this model: {error}")
print(f"{type(model).__name__}: {runner.n_layers} layers, runner: {runner.name}.")

# Prompts like yours are better: `tide assess MODEL --data prompts.jsonl`.
prompts = [
    f"{request} {thing}."
    for request in ("Explain", "Tell me a story about")
    for thing in ("the sea", "bread", "a bicycle", "the moon")
]
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(tide.assess(model, tokenizer, prompts, new_tokens=args.new_tokens).summary())
