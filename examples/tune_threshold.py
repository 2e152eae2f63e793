"""Tune the threshold: what leaves, what is saved and what goes wrong, from cautious to bold.

    python examples/tune_threshold.py --artifact DIR

`exit_threshold` is one number for every exit, as published. `boldness` moves the thresholds that
calibration chose, each for its exit: 1 leaves them where they are. Neither promises anything;
`tide certify` does. "Layer calls saved" counts calls, not time, and is without drafts.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", required=True, help="a folder from `tide calibrate`")
parser.add_argument("--thresholds", type=float, nargs="*", default=[0.95, 0.85, 0.7, 0.5])
parser.add_argument("--boldness", type=float, nargs="*", default=[0.25, 1, 4])
parser.add_argument("--new-tokens", type=int, default=64)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
asks = ["Why is the sea salty?", "Name five colours.", "Tell me about bread.", "What is a map?"]
batch = tokenizer.apply_chat_template(
    [[{"role": "user", "content": ask}] for ask in asks],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
)

# `audit_tail` has full depth check the last tokens too, so that every early token is counted.
settings = tide.TIDEConfig(exit_threshold=None, drafts=(), audit_tail=True)
runs = [("exit_threshold", t, settings.with_(exit_threshold=t), 1.0) for t in args.thresholds]
runs += [("boldness", bold, settings, bold) for bold in args.boldness]

print(f"{'setting':>22}  {'left early':>10}  {'layer calls saved':>17}  differ from full depth")
for name, value, config, boldness in runs:
    engine = tide.TIDE(model, args.artifact, config, boldness=boldness, check=False)
    engine.generate(**batch, max_new_tokens=args.new_tokens, do_sample=False)
    stats = engine.last_stats
    saved = 1 - stats.layers_run / stats.layers_full
    wrong = f"{stats.differed} of {stats.total_tokens} tokens"
    print(f"{name:>15} {value:6g}  {stats.exit_rate:10.1%}  {saved:17.1%}  {wrong}")
