"""Chat: answers stream while they are decoded.

    python examples/chat.py --artifact DIR
    echo "Why is the sea salty?" | python examples/chat.py

Lossless decoding commits several tokens at once, so text comes in small bursts. An empty line ends.
"""

import argparse
import sys
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", help="a folder from `tide calibrate`")
parser.add_argument("--new-tokens", type=int, default=256)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)
engine = tide.TIDE(model, args.artifact)
chat: list[dict[str, str]] = []

for line in sys.stdin:
    if not line.strip():
        break
    chat.append({"role": "user", "content": line.strip()})
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextIteratorStreamer(  # the timeout ends the wait if the thread has failed
        tokenizer, skip_prompt=True, timeout=120, skip_special_tokens=True
    )
    options = {**prompt, "max_new_tokens": args.new_tokens, "streamer": streamer}
    thread = Thread(target=engine.generate, kwargs=options)
    thread.start()
    answer = ""
    for piece in streamer:  # with `tide.decoder` and model.generate it works the same
        print(piece, end="", flush=True)
        answer += piece
    thread.join()
    chat.append({"role": "assistant", "content": answer})
    print(f"\n[{engine.last_stats.total_tokens} tokens in {engine.last_stats.steps} steps]")
