"""What a model could draft for itself: from its lower layers, or without some middle ones.

    python bench/self_drafts.py MODEL --data prompts.jsonl --out bench/results/self_drafts.json

Two ways to draft a token before the whole depth has run: the head read after layer `e` (with
`--artifact`, through the exit heads of its checkpoints), and a path without the layers of a gap.
The deep pass verifies the drafts together and takes over the states below `e`, or below the gap.
Drafts that are kept are the model's own tokens, so which drafts are right is known from one forward
over its greedy answers; of the path with a gap this is a lower limit, since the forward leaves the
gap out of the context too. Which draft length is best, and what it gives, follows from what passes
cost here. "Limit" is a drafter that knows when to stop, and reads its head for nothing.

Gaps and draft lengths are chosen on the first answers and judged on the rest. Beside it, TIDE in
mode lossless on the same prompts, measured in turn with HF generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import chat, parser, report
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide.bench.compare import BASELINE, WARM_UP, compare
from tide.calibration.data import load_texts
from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.heads import Readout, TargetHead
from tide.models.attach import attach
from tide.models.costs import measure_passes
from tide.models.locate import Parts
from tide.models.runner import DepthRunner

LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens of a deep pass


@dataclass(frozen=True)
class Costs:
    """Seconds here, by tokens of a pass: of one layer, and of the head."""

    layer: dict[int, float]
    head: dict[int, float]
    layers: int

    def step(self, below: int, drafting: int, tokens: int, head: float) -> float:
        """Seconds of drafting, one by one, and of the deep pass that verifies.

        Args:
            below: layers whose states the deep pass takes over.
            drafting: layers that each draft runs beside them.
            tokens: of the deep pass; one fewer are drafted.
            head: seconds that a draft reads a head for.
        """
        one = self.layer[1]
        draft = (tokens - 1) * (drafting * one + head)
        deep = (self.layers - below) * self.layer[tokens] + self.head[tokens]
        return tokens * below * one + draft + deep


@dataclass(frozen=True)
class Way:
    """A way to draft.

    Attributes:
        name: for people.
        below: layers whose states the deep pass takes over.
        drafting: layers that each draft runs beside them.
    """

    name: str
    below: int
    drafting: int


def speedup(way: Way, right: Sequence[Sequence[bool]], costs: Costs, tokens: int) -> float:
    """Expected, with drafts of a fixed length, over one token a pass."""
    steps = made = 0
    for answer in right:
        at = 0
        while at < len(answer):
            kept = 1
            while kept < tokens and at + kept - 1 < len(answer) and answer[at + kept - 1]:
                kept += 1
            at, steps, made = at + kept, steps + 1, made + kept
    plain = costs.step(0, 0, 1, 0.0)
    return made * plain / (steps * costs.step(way.below, way.drafting, tokens, costs.head[1]))


def limit(way: Way, right: Sequence[Sequence[bool]], costs: Costs) -> float:
    """At most: every draft is right and is as long as pays, and its head costs nothing."""
    plain = costs.step(0, 0, 1, 0.0)
    spent, made = 0.0, 0
    for answer in right:
        at = 0
        while at < len(answer):
            run = 1
            while at + run - 1 < len(answer) and answer[at + run - 1]:
                run += 1
            price, tokens = min(
                (costs.step(way.below, way.drafting, tokens, 0.0) / tokens, tokens)
                for tokens in LENGTHS if tokens <= run
            )  # fmt: skip
            price = min(price, plain)
            at, spent, made = at + tokens, spent + tokens * price, made + tokens
    return made * plain / spent


class Paths:
    """Runs a model over answers, whole or without some layers."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    @torch.no_grad()
    def states(self, ids: Tensor, gap: Sequence[int] = ()) -> list[Tensor]:
        """The states before each layer and after the last, where the layers of a gap do nothing."""
        found: list[Tensor] = []
        hooks = [
            part.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
            for part in (*self.parts.layers, self.parts.norm)
        ]
        hooks += [
            self.parts.layers[k].register_forward_hook(
                lambda _, given, out: (given[0], *out[1:]) if isinstance(out, tuple) else given[0]
            )
            for k in gap
        ]
        try:
            self.parts.decoder(ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--data", required=True, help="prompts, as tide calibrate takes them")
    options.add_argument("--artifact", type=Path, help="its exit heads are read")
    options.add_argument("--prompts", type=int, default=24)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--gaps", type=int, nargs="+", default=[2, 4, 8, 12])
    options.add_argument("--choose", type=int, default=3, help="answers that gaps are chosen on")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    made = Artifact.load(args.artifact) if args.artifact else None
    texts = load_texts(args.data, args.prompts)
    prompts = [chat(tokenizer, [text]) for text in texts]
    greedy = {"max_new_tokens": args.new, "do_sample": False}
    engine = TIDE(model, made, TIDEConfig(mode="lossless"))
    texts_of: dict[str, list[Tensor]] = {}

    def keep(out: dict[str, Tensor]) -> None:
        for name, ids in out.items():
            texts_of.setdefault(name, []).append(ids)

    measured = compare(
        {
            BASELINE: lambda batch: model.generate(**batch, **greedy),
            "lossless": lambda batch: engine.generate(**batch, **greedy),
        },
        prompts, keep, warm_up=chat(tokenizer, [WARM_UP]),
    )  # fmt: skip
    answers = [
        (ids, prompt["input_ids"].shape[1])
        for ids, prompt in zip(texts_of[BASELINE], prompts, strict=True)
    ]
    same = sum(map(torch.equal, texts_of[BASELINE], texts_of["lossless"]))
    runner = attach(model)
    readout = Readout(runner.parts.norm, runner.parts.head, runner.config)
    costs = measure(runner, readout)
    counting = Counting(Paths(runner.parts), readout, made)
    right = counting.exits(answers)
    right.update(counting.gaps(size, answers, args.choose, costs) for size in args.gaps)
    results = {
        "measured": measured, "same": same, "layers": runner.n_layers,
        "layer_ms": {str(k): round(1e3 * s, 3) for k, s in costs.layer.items()},
        "head_ms": {str(k): round(1e3 * s, 3) for k, s in costs.head.items()},
        "ways": [judge(way, found, args.choose, costs) for way, found in right.items()],
    }  # fmt: skip
    report(
        "drafts of a model for itself", args, results, dtype=args.dtype, prompts=len(prompts),
        new_tokens=args.new, exit_heads="of an artifact" if made else "the model's own head",
    )  # fmt: skip


def measure(runner: DepthRunner, readout: Readout) -> Costs:
    """What passes cost here."""
    n = runner.n_layers
    stages = [((0, n - 1), None), ((n - 1, n), TargetHead(readout))]
    found = measure_passes(runner, stages, lengths=LENGTHS, seconds=30.0)
    layer = {k: below / (n - 1) for k, (below, _) in found.items()}
    return Costs(layer, {k: max(0.0, found[k][1] - layer[k]) for k in LENGTHS}, n)


class Counting:
    """Which tokens of answers each way would have drafted.

    Args:
        paths: of the model.
        readout: the model's own head.
        made: an artifact whose exit heads are read.
    """

    def __init__(self, paths: Paths, readout: Readout, made: Artifact | None) -> None:
        self.paths, self.readout = paths, readout
        self.heads = {at.layer + 1: at.head for at in made.checkpoints} if made else {}

    @torch.no_grad()
    def _right(self, states: Tensor, ids: Tensor, start: int) -> list[bool]:
        drafted = self.readout(states[start - 1 : -1]).argmax(-1)
        found: list[bool] = (drafted == ids[0, start:]).tolist()
        return found

    def exits(self, answers: Sequence[tuple[Tensor, int]]) -> dict[Way, list[list[bool]]]:
        """With the head read after some layers, two apart or those of the artifact."""
        n = len(self.paths.parts.layers)
        found: dict[Way, list[list[bool]]] = {}
        for ids, start in track(answers, description="Exits"):
            states = self.paths.states(ids)
            for depth in self.heads or range(2, n, 2):
                way = Way(f"exit after {depth} layers", depth, 0)
                state = states[depth]
                if depth in self.heads:
                    state = self.heads[depth].transform(state)
                found.setdefault(way, []).append(self._right(state, ids, start))
        return found

    def gap(self, first: int, size: int, answers: Sequence[tuple[Tensor, int]]) -> list[list[bool]]:
        """Without some layers."""
        return [
            self._right(self.paths.states(ids, range(first, first + size))[-1], ids, start)
            for ids, start in answers
        ]

    def gaps(
        self, size: int, answers: Sequence[tuple[Tensor, int]], chosen_on: int, costs: Costs
    ) -> tuple[Way, list[list[bool]]]:
        """Without the layers that the first answers miss least."""
        n, found = costs.layers, {}
        for first in track(range(1, n - size, max(1, size // 2)), description=f"Gaps of {size}"):
            way = Way(f"without layers {first} to {first + size - 1}", first, n - size - first)
            found[way] = self.gap(first, size, answers[:chosen_on])
        best = max(found, key=lambda way: best_length(way, found[way], costs)[0])
        return best, found[best] + self.gap(best.below, size, answers[chosen_on:])


def best_length(way: Way, right: Sequence[Sequence[bool]], costs: Costs) -> tuple[float, int]:
    """The highest speed-up, and the tokens of a deep pass that give it."""
    return max((speedup(way, right, costs, tokens), tokens) for tokens in LENGTHS[1:])


def judge(
    way: Way, right: Sequence[Sequence[bool]], chosen_on: int, costs: Costs
) -> dict[str, Any]:
    """What a way gives, its draft length chosen on the first answers and judged on the rest."""
    _, tokens = best_length(way, right[:chosen_on], costs)
    rest = right[chosen_on:]
    return {
        "way": way.name, "layers_kept": way.below, "layers_drafting": way.below + way.drafting,
        "right": round(sum(map(sum, rest)) / sum(map(len, rest)), 4),
        "tokens_of_a_pass": tokens, "speedup": round(speedup(way, rest, costs, tokens), 3),
        "limit": round(limit(way, rest, costs), 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
