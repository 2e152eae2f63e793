"""vLLM offline: exits or lossless drafts in vLLM's `LLM`, with the plugin.

    python examples/vllm_offline.py --artifact DIR --risk 0.02    # certified exits
    python examples/vllm_offline.py --artifact DIR                # lossless drafts

Exits need a certificate for vLLM: `tide certify MODEL DIR --kv propagate --dtype D --risk R`. Exits
and drafts do not combine in vLLM. Needs vLLM 0.32 (`pip install 'tide-llm[vllm]'`).
"""

import argparse
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # to read the counters here

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", required=True, help="a folder from `tide calibrate`")
parser.add_argument("--risk", type=float, help="certified share of tokens that may differ")
parser.add_argument("--dtype", default="bfloat16", help="as in the certificate")
parser.add_argument("--new-tokens", type=int, default=64)
args = parser.parse_args()

if args.risk is not None:
    # By default, gates are evaluated only where they pay; here, in every step, to see exits.
    tide = {"artifact": args.artifact, "risk": args.risk, "gates": "always"}
    options = {}
else:
    tide = {"artifact": args.artifact, "mode": "lossless"}
    proposer = {"method": "custom_class", "model": "tide.vllm.proposer.TableProposer"}
    options = {"speculative_config": {**proposer, "num_speculative_tokens": 8}}

llm = LLM(
    args.model, dtype=args.dtype, max_model_len=1024, disable_log_stats=False,
    additional_config={"tide": tide}, **options,
)  # fmt: skip
questions = [
    "Why is the sea salty?",
    "Name five colours.",
    "Tell me about bread.",
    "What is a map?",
]
chats = [[{"role": "user", "content": question}] for question in questions]
sampling = SamplingParams(temperature=0, max_tokens=args.new_tokens)
for answer in llm.chat(chats, sampling):
    print(answer.outputs[0].text)
    print("--")

# Tokens by the layer after which they exited ("full": none), or draft tokens and accepted ones.
for metric in REGISTRY.collect():
    for sample in metric.samples:
        if sample.name in ("tide:tokens_total", "vllm:spec_decode_num_draft_tokens_total",
                           "vllm:spec_decode_num_accepted_tokens_total"):  # fmt: skip
            print(sample.name, sample.labels.get("layer", ""), int(sample.value))
