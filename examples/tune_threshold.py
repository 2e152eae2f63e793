"""Tune the threshold: exit rate, layer calls saved and disagreement, cautious to aggressive.

    python examples/tune_threshold.py --artifact DIR

`exit_threshold` is one number for every exit, as published. `threshold_scale` moves the calibrated
thresholds, which differ by exit: 1 keeps them, higher values exit more often. Neither is certified;
see `tide certify`. "Layer calls saved" counts calls, not time, and is measured without drafts.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", required=True, help="a folder from `tide calibrate`")
parser.add_argument("--thresholds", type=float, nargs="*", default=[0.95, 0.85, 0.7, 0.5])
parser.add_argument("--threshold-scale", type=float, nargs="*", default=[0.25, 1, 4])
parser.add_argument("--new-tokens", type=int, default=64)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
questions = [
    "Why is the sea salty?",
    "Name five colours.",
    "Tell me about bread.",
    "What is a map?",
]
batch = tokenizer.apply_chat_template(
    [[{"role": "user", "content": question}] for question in questions],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
)

# `audit_tail` checks the last tokens too, so that every exited token is counted.
settings = tide.TIDEConfig(exit_threshold=None, drafts=(), audit_tail=True)
runs = [("exit_threshold", t, settings.with_(exit_threshold=t), None) for t in args.thresholds]
runs += [("threshold_scale", scale, settings, scale) for scale in args.threshold_scale]

print(f"{'setting':>22}  {'exit rate':>10}  {'layer calls saved':>17}  disagreement")
for name, value, config, scale in runs:
    engine = tide.TIDE(model, args.artifact, config, threshold_scale=scale, check=False)
    engine.generate(**batch, max_new_tokens=args.new_tokens, do_sample=False)
    stats = engine.last_stats
    saved = 1 - stats.layers_run / stats.layers_full
    differ = f"{stats.differed} of {stats.total_tokens} tokens"
    print(f"{name:>15} {value:6g}  {stats.exit_rate:10.1%}  {saved:17.1%}  {differ}")
