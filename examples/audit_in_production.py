"""Audit in production: serve with a risk, log the audit, go to full depth on drift.

    python examples/audit_in_production.py --artifact DIR --risk 0.05 --prompts prompts.txt

The artifact needs a certificate for the risk (`tide certify`, or examples/certify_your_task.py).
Later passes check every exited token, with one more pass at the end of an answer. A sequential test
detects when more tokens differ than the certified bound; then exits are off, and the output is the
full model's.
"""

import argparse
import logging
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", required=True, help="a certified folder")
parser.add_argument("--risk", type=float, required=True, help="share of tokens that may differ")
parser.add_argument("--prompts", type=Path, required=True, help="the requests, one per line")
parser.add_argument("--new-tokens", type=int, default=64)
args = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("serving")

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)


def on_drift(monitor) -> None:
    """Alert somebody. For full depth alone, pass on_drift="full_depth" instead of a function."""
    log.warning(
        f"drift: {monitor.estimate:.2%} of tokens differed over {monitor.sequences} requests; the "
        f"bound is {monitor.risk:.2%}. Exits are off. Certify again on requests like these: "
        f"tide certify {args.model} {args.artifact} --risk {args.risk} --data requests.jsonl"
    )
    engine.circuit_breaker.tripped = True  # until engine.circuit_breaker.reset()


# Exits, even where mode "auto" would find drafts alone faster.
exits = tide.TIDEConfig(exit_threshold=None)
engine = tide.TIDE(model, args.artifact, exits, risk=args.risk, on_drift=on_drift)
for line in args.prompts.read_text().splitlines():
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": line}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    engine.generate(**prompt, max_new_tokens=args.new_tokens, do_sample=False)
    stats, monitor = engine.last_stats, engine.circuit_breaker.monitor
    log.info(
        f"{stats.total_tokens} tokens, {stats.exited_tokens} exited, {stats.differed} differed; "
        f"all {monitor.sequences} requests: {monitor.estimate:.2%}, wealth {monitor.wealth:.2f}"
    )
