"""Measures how often full depth differs from itself: other dtype, other number of tokens at once.

    TIDE_DATA=... python bench/noise_floor.py $(python scripts/weights.py) \\
        --out bench/results/noise_floor.json

The bf16 model answers greedily, one token at a time; then the same texts are read again.
"""

from __future__ import annotations

from typing import Any

import torch
from measure import chat, parser, report, spec_bench
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@torch.no_grad()
def reread(model: Any, text: torch.Tensor, prompt: int, chunk: int) -> torch.Tensor:
    """What the model says after each token from the last of the prompt on, read in chunks."""
    cache = DynamicCache(config=model.config)
    if prompt > 1:
        model(text[:, : prompt - 1], past_key_values=cache)
    said = []
    for start in range(prompt - 1, text.shape[1] - 1, chunk):
        piece = text[:, start : min(start + chunk, text.shape[1] - 1)]
        said.append(model(piece, past_key_values=cache).logits[0].argmax(-1))
    return torch.cat(said)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--prompts", type=int, default=52)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 8, 16])
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rough, exact = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    differs: dict[str, int] = {}
    total = 0
    for question in track(spec_bench(args.prompts), description="prompts"):
        batch = chat(tokenizer, [question["text"]])
        prompt = batch["input_ids"].shape[1]
        text = rough.generate(**batch, max_new_tokens=args.new, do_sample=False)
        said = text[0, prompt:]
        total += len(said)
        again = {f"bf16, {n} tokens at once": reread(rough, text, prompt, n) for n in args.chunks}
        again["bf16, one token at a time, run again"] = reread(rough, text, prompt, 1)
        again["fp32, one token at a time"] = one = reread(exact, text, prompt, 1)
        for name, words in again.items():
            differs[name] = differs.get(name, 0) + int((words != said).sum())
        name = f"fp32 against fp32, {args.chunks[-1]} tokens at once"
        many = reread(exact, text, prompt, args.chunks[-1])
        differs[name] = differs.get(name, 0) + int((many != one).sum())
    report(
        "how often full depth differs from bf16, one token at a time, on its own greedy texts",
        args,
        [{"read": name, "differs": n, "share": n / total} for name, n in differs.items()],
        prompts=args.prompts,
        new_tokens=args.new,
        tokens=total,
    )


if __name__ == "__main__":
    main()
