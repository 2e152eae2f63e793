"""Certify your task: from your own prompts to early exit with a certified bound.

    python examples/certify_your_task.py --prompts prompts.txt --out router --risk 0.05

Half of the prompts calibrate; the others, unseen in calibration, certify. The certificate states:
with 95 % confidence, for prompts like these, on average at most `risk` of an answer's tokens differ
from full depth. A risk of 5 % needs at least 61 prompts, better three times as many; 2 % needs at
least 155.
"""

import argparse
import random
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--prompts", type=Path, required=True, help="one prompt per line")
parser.add_argument("--out", type=Path, default=Path("router"), help="folder for the artifact")
parser.add_argument("--risk", type=float, default=0.05)
parser.add_argument("--new-tokens", type=int, default=96)
parser.add_argument("--epochs", type=int, default=4, help="more, if you have few prompts")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)  # in the dtype that you will serve
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
prompts = args.prompts.read_text().splitlines()
random.Random(0).shuffle(prompts)  # a certificate holds for prompts drawn like the tested ones
half = len(prompts) // 2

tide.calibrate(
    model, tokenizer, args.out, data=prompts[:half], new_tokens=args.new_tokens, epochs=args.epochs
)
certificates = tide.certify(
    model, tokenizer, args.out, prompts[half:], risk=args.risk, new_tokens=args.new_tokens, batch=32
)
if not certificates:
    sys.exit(f"No setting was certified for {args.risk:.1%}. Use more prompts, or a higher risk.")
(found,) = certificates
print(
    f"{found.estimate:.2%} of tokens differed over {found.sequences} prompts; p {found.p_value:.3g}"
)

# Raises unless a matching certificate exists; while serving, the audit monitors the bound.
engine = tide.TIDE(model, args.out, risk=args.risk, on_drift="full_depth")
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompts[-1]}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)  # fmt: skip
output = engine.generate(**prompt, max_new_tokens=args.new_tokens, do_sample=False)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
print(engine.last_stats.summary())
