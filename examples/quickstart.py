"""Quickstart: the model's own output in fewer passes, then early exit.

    python examples/quickstart.py              # lossless; needs no calibration
    python examples/quickstart.py --artifact DIR   # also with calibrated exits

An artifact comes from `tide calibrate MODEL -o DIR --data prompts.jsonl`.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", help="a folder from `tide calibrate`")
parser.add_argument("--prompt", default="One, two, three, four, one, two,")
parser.add_argument("--new-tokens", type=int, default=48)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)
prompt = tokenizer(args.prompt, return_tensors="pt").input_ids

# Lossless: one pass verifies several draft tokens; the output is that of the full model.
engine = tide.TIDE(model, args.artifact)
output = engine.generate(prompt, max_new_tokens=args.new_tokens, do_sample=False)
print(tokenizer.decode(output[0]))
print(engine.last_stats.summary())

if args.artifact:
    # Early exit with the calibrated thresholds. Later passes check exited tokens, all but the last:
    # the last line of the summary counts those that differ from full depth.
    engine = tide.TIDE(model, args.artifact, config=tide.TIDEConfig(exit_threshold=None))
    output = engine.generate(prompt, max_new_tokens=args.new_tokens, do_sample=False)
    print()
    print(tokenizer.decode(output[0]))
    print(engine.last_stats.summary())
