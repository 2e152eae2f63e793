"""The noise floor: how often full depth differs from itself in another dtype or pass size.

    TIDE_DATA=... python bench/noise_floor.py $(python scripts/weights.py) \\
        --out bench/results/noise_floor.json

The bf16 model generates greedily, one token per pass; then it reads the same texts again.
"""

from __future__ import annotations

from typing import Any

import torch
from measure import chat, parser, report, spec_bench
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@torch.no_grad()
def reread(model: Any, text: torch.Tensor, prompt: int, chunk: int) -> torch.Tensor:
    """Predicted token after each token from the last of the prompt on, read in chunks."""
    cache = DynamicCache(config=model.config)
    if prompt > 1:
        model(text[:, : prompt - 1], past_key_values=cache)
    predicted = []
    for start in range(prompt - 1, text.shape[1] - 1, chunk):
        piece = text[:, start : min(start + chunk, text.shape[1] - 1)]
        predicted.append(model(piece, past_key_values=cache).logits[0].argmax(-1))
    return torch.cat(predicted)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--prompts", type=int, default=52, help="of Spec-Bench")
    options.add_argument("--new", type=int, default=64, help="most new tokens of an answer")
    options.add_argument(
        "--chunks", type=int, nargs="+", default=[2, 4, 8, 16], help="tokens read at once"
    )
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
        generated = text[0, prompt:]
        total += len(generated)
        again = {f"bf16, {n} tokens at once": reread(rough, text, prompt, n) for n in args.chunks}
        again["bf16, one token at a time, run again"] = reread(rough, text, prompt, 1)
        again["fp32, one token at a time"] = one = reread(exact, text, prompt, 1)
        for name, tokens in again.items():
            differs[name] = differs.get(name, 0) + int((tokens != generated).sum())
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
