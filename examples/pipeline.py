"""Hugging Face pipeline: TIDE decodes inside `pipeline("text-generation")`.

    python examples/pipeline.py --artifact DIR
    python examples/pipeline.py --artifact DIR --exits    # calibrated exits; may differ

The pipeline passes unknown options on to `model.generate`, which takes a decoder. Without an
artifact the decoder drafts from the text itself, and the output is the model's own.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import tide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--artifact", help="a folder from `tide calibrate`")
parser.add_argument("--exits", action="store_true", help="let tokens exit")
parser.add_argument("--new-tokens", type=int, default=64)
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)
config = tide.TIDEConfig(exit_threshold=None) if args.exits else None
decoder = tide.decoder(args.artifact, config)  # made once, used for every call

pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, custom_generate=decoder)
chats = [
    [{"role": "user", "content": "Why is the sea salty?"}],
    [{"role": "user", "content": "Name three colours."}],
]
for (answer,) in pipe(chats, max_new_tokens=args.new_tokens, do_sample=False):
    print(answer["generated_text"][-1]["content"])
    print("--")
print(decoder.last_stats.summary())  # of the last chat: a pipeline decodes one by one
