"""Tokens per pass of draft trees, by size and category, and the host's time to grow them.

    TIDE_DATA=... python bench/trees.py $(python scripts/weights.py) --out bench/results/trees.json

Prompts are spread over Spec-Bench's six tasks, as its published results are. Counts passes of the
model after the prompt's, for transformers' prompt lookup, chains and trees of each size, each
always drafted as large as allowed. What pays on a device is another question, which the costs of
its passes decide; counts do not depend on it. "One branch" is a tree of one path, the likeliest by
all sources: what an engine without tree attention could draft. With `--artifact`, its table drafts
too, in methods of their own. Every engine keeps what it has learned from prompt to prompt. A text
on which all agree, transformers' prompt lookup among them, is HF generate's; else that is asked.

Ctrl-C ends a run early; what was counted so far is written. With `--work`, another run goes on from
there, with engines that have to learn anew.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from measure import Stopwatch, chat, parser, report, spec_bench
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.config import TIDEConfig
from tide.decode.drafter import Drafter
from tide.decode.growth import NodeRates, TreeSource
from tide.decode.recycled import RecycledPredictions
from tide.decode.tree import DraftTree, Origin
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.models.locate import locate

# What the host does for draft trees: growing, deciding and learning from them.
HOST = [
    (Drafter, "propose"), (DraftTree, "decide"), (NodeRates, "record"),
    (RecycledPredictions, "learn"),
]  # fmt: skip


class OneBranch(TreeSource):
    """Grows one path: after each node the likeliest only."""

    def _candidates(self, tokens: Sequence[int], tail: Sequence[int]) -> dict[int, Origin]:
        found = super()._candidates(tokens, tail)
        best = max(found, key=lambda token: self.rates.of(found[token]), default=None)
        return {} if best is None else {best: found[best]}


def one_branch(engine: TIDE, batch: Mapping[str, Tensor], **options: Any) -> Tensor:
    """`engine.generate` with trees of one path."""
    with mock.patch("tide.decode.session.TreeSource", OneBranch):
        return engine.generate(**batch, **options)


def make_engine(model: Any, artifact: Artifact | None, nodes: int) -> TIDE:
    """An engine that always drafts all it may."""
    drafts = ("context", *(["table"] if artifact else []), "recycled")
    config = TIDEConfig(mode="lossless", drafts=drafts, max_tree=nodes)
    engine = TIDE(model, artifact, config)
    engine.drafter.fixed = True
    return engine


class Count(NamedTuple):
    """What a method did for a prompt: tokens and passes after the prompt's, and seconds."""

    category: str
    tokens: int
    passes: int
    seconds: float
    of_host: float
    exact: bool


def tokens_per_pass(counts: list[Count]) -> dict[str, Any]:
    """Tokens per pass of all prompts, and of each category."""

    def ratio(some: list[Count]) -> float:
        return round(sum(c.tokens for c in some) / sum(c.passes for c in some), 3)

    categories = dict.fromkeys(c.category for c in counts)
    by = {name: ratio([c for c in counts if c.category == name]) for name in categories}
    return {"tokens_per_pass": ratio(counts), "by_category": by}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--prompts", type=int, default=80)
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--sizes", type=int, nargs="*", default=[8, 16, 32, 64])
    options.add_argument("--artifact", type=Path, help="an artifact whose table is used as well")
    options.add_argument("--only", nargs="*", help="methods to count; all by default")
    options.add_argument("--work", type=Path, help="a file that keeps what was counted")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    greedy = {"max_new_tokens": args.new, "do_sample": False}
    methods: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
        "prompt lookup": lambda batch: model.generate(
            **batch, **greedy, prompt_lookup_num_tokens=10
        ),
    }
    for made in [None, *([Artifact.load(args.artifact)] if args.artifact else [])]:
        table = " + table" if made else ""
        for nodes in [0, *args.sizes]:
            name = f"tree, {nodes} nodes" if nodes else "chain"
            engine = make_engine(model, made, nodes)
            methods[name + table] = lambda batch, e=engine: e.generate(**batch, **greedy)  # type: ignore[misc]
        engine = make_engine(model, made, 10)
        methods["one branch, 10 nodes" + table] = lambda batch, e=engine: (  # type: ignore[misc]
            one_branch(e, batch, **greedy)
        )
    methods = {name: run for name, run in methods.items() if name in (args.only or methods)}
    questions = spec_bench(args.prompts, tasks=True)
    counts: list[dict[str, Count]] = []  # for each prompt, of every method
    if args.work and args.work.exists():
        for line in args.work.read_text().splitlines():
            counts.append({name: Count(*found) for name, found in json.loads(line).items()})
    with contextlib.suppress(KeyboardInterrupt):
        rest = questions[len(counts) :]
        for found in count(methods, model, tokenizer, rest, greedy):
            counts.append(found)
            if args.work:
                with args.work.open("a") as work:
                    work.write(json.dumps(found) + "\n")
    rows = []
    for name in methods:
        of_method = [found[name] for found in counts]
        row = {"method": name, **tokens_per_pass(of_method)}
        row["exact_match_outputs"] = f"{sum(c.exact for c in of_method)} of {len(counts)}"
        if of_host := sum(c.of_host for c in of_method):
            row["host_ms_per_step"] = round(1e3 * of_host / sum(c.passes for c in of_method), 3)
            row["host_share"] = round(of_host / sum(c.seconds for c in of_method), 4)
        rows.append(row)
        print(row)
    report(
        "tokens per pass of chains and draft trees on Spec-Bench prompts at batch 1",
        args, {"methods": rows}, dtype=args.dtype, prompts=len(counts), new_tokens=args.new,
    )  # fmt: skip


def count(
    methods: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]], model: Any, tokenizer: Any,
    questions: list[dict[str, str]], greedy: Mapping[str, Any],
) -> Iterator[dict[str, Count]]:  # fmt: skip
    """What every method did for each question, one after the other."""
    passes = 0

    def one_more(*_: Any) -> None:
        nonlocal passes
        passes += 1

    watch = Stopwatch({"host": HOST})
    locate(model).layers[0].register_forward_hook(one_more)

    for question in track(questions, description="Prompts"):
        prompt, found, texts = chat(tokenizer, [question["text"]]), {}, {}
        for name, method in methods.items():
            passes, began = 0, time.perf_counter()
            watch.seconds.clear()
            texts[name] = new = method(prompt)[0, prompt["input_ids"].shape[1] :].tolist()
            # The prompt's pass gives the first token.
            found[name] = Count(
                question["category"], len(new) - 1, passes - 1, time.perf_counter() - began,
                watch.seconds["host"], True,
            )  # fmt: skip
        if "prompt lookup" not in texts or any(t != texts["prompt lookup"] for t in texts.values()):
            expected = model.generate(**prompt, **greedy)[0, prompt["input_ids"].shape[1] :]
            for name, new in texts.items():
                found[name] = found[name]._replace(exact=new == expected.tolist())
        yield found


if __name__ == "__main__":
    main()
