"""Any model: can TIDE run it, and is it worth it?

    python examples/any_model.py --model Qwen/Qwen3-0.6B
    python examples/any_model.py --model path/to/a/folder

Attaching proves on the model itself that running it by depth ranges equals its own forward pass. A
model that cannot be run so is refused by name, with the reason. Assessing then says how early its
tokens are settled, before anything is trained.
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
print(f"{type(model).__name__}: {runner.n_layers} layers, parts found by {runner.parts.found_by}.")

# Better with prompts like yours: `tide assess MODEL --data prompts.jsonl`.
prompts = [
    f"{ask} {thing}."
    for ask in ("Explain", "Tell me a story about")
    for thing in ("the sea", "bread", "a bicycle", "the moon")
]
tokenizer = AutoTokenizer.from_pretrained(args.model)
print(tide.assess(model, tokenizer, prompts, new_tokens=args.new_tokens).summary())
