"""Gives `assess`: how much depth a model could save, before any training.

Everything is read with the model's own norm and head along its own greedy answers. Trained heads
agree earlier, so this is where calibration starts from, not where it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tide.calibration.collect import answer
from tide.calibration.costs import Costs, measure_costs
from tide.calibration.data import encode_prompts, load_texts
from tide.calibration.progress import bars
from tide.errors import DataError, MissingPackageError
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.models.attach import attach
from tide.models.depth import DepthRunner

_BATCH = 16  # prompts answered at once


@dataclass(frozen=True)
class Assessment:
    """What `assess` found. Depths count layers, from 1 to `n_layers`; layers count from 0.

    Attributes:
        n_layers: layers of the model.
        documents, tokens: how many answers, and tokens in them, were looked at.
        agreement: after each depth, share of tokens for which the model's own head already says
            what it says at full depth.
        oracle: share of tokens for which each depth is the first that agrees.
        without: with each single layer left out, share of tokens that stay the same.
        costs: seconds of one layer and of the head on this device.
        checkpoints: layers after which exits would save most, were the gate never wrong.
        ceiling: speed-up with exits there and a gate that is never wrong, heads counted.
    """

    n_layers: int
    documents: int
    tokens: int
    agreement: tuple[float, ...]
    oracle: tuple[float, ...]
    without: tuple[float, ...]
    costs: dict[str, float]
    checkpoints: tuple[int, ...]
    ceiling: float

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """Whether calibration is worth it, in a sentence."""
        half = next(k + 1 for k, share in enumerate(self.agreement) if share >= 0.5)
        found = (
            f"Half of the tokens are settled after {half} of {self.n_layers} layers, and a gate "
            f"that is never wrong would make this model {self.ceiling:.2f}x faster without any "
            "training"
        )
        if self.ceiling >= 1.1:
            return f"{found}: calibration is worth it."
        return (
            f"{found}: expect little from exits. Calibrate for the draft table, which makes "
            "lossless decoding faster, and certify before you use exits."
        )

    def summary(self) -> str:
        """A table by depth, and the verdict."""
        lines = ["layers   agree   first agree   same without the layer"]
        for k in range(self.n_layers):
            mark = "  <- checkpoint" if k in self.checkpoints else ""
            lines.append(
                f"{k + 1:6}  {self.agreement[k]:6.1%}  {self.oracle[k]:12.1%}"
                f"  {self.without[k]:23.1%}{mark}"
            )
        lines.append(
            f"{self.tokens} tokens of {self.documents} answers; a layer takes "
            f"{1e3 * self.costs['layer']:.2f} ms, the head {1e3 * self.costs['head']:.2f} ms."
        )
        return "\n".join([*lines, self.verdict])

    def plot(self, path: str | Path) -> None:
        """Draw the table into an image file."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError("Plots need matplotlib: pip install 'tide-llm[plot]'.") from (
                error
            )
        figure = Figure(figsize=(8, 7), layout="constrained")
        agree, first = figure.subplots(2, 1, sharex=True)
        depths = range(1, self.n_layers + 1)
        agree.plot(depths, self.agreement, marker="o", label="leaving after this many layers")
        agree.plot(depths, self.without, marker="x", label="leaving out only this layer")
        agree.set(ylabel="same token as full depth", ylim=(0, 1))
        agree.legend()
        first.bar(depths, self.oracle)
        first.set(xlabel="layers", ylabel="first depth that agrees, share of tokens")
        for checkpoint in self.checkpoints:
            first.axvline(checkpoint + 1.5, linestyle="--", color="0.4")
        figure.suptitle(f"A gate that is never wrong: {self.ceiling:.2f}x, no training")
        figure.savefig(path, dpi=150)


@torch.no_grad()
def assess(
    model: Any,
    tokenizer: Any,
    data: str | Path | Iterable[str] = "wikitext",
    *,
    samples: int = 48,
    new_tokens: int = 128,
    max_prompt: int = 512,
    exits: int = 3,
    quiet: bool = False,
) -> Assessment:
    """Measure how early a model settles, along its own greedy answers.

    Args:
        model: an `AutoModelForCausalLM` in evaluation mode; not changed.
        tokenizer: its tokenizer.
        data: prompts: a file, a data set, or the texts.
        samples: how many prompts.
        new_tokens: longest answer.
        max_prompt: longest prompt.
        exits: most checkpoints to suggest.
        quiet: show no progress.
    """
    runner = attach(model)
    n, texts = runner.n_layers, load_texts(data, samples)
    # Leaving out every layer in turn costs half of `n` passes, so fewer documents are taken.
    thorough = max(1, len(texts) // 4)
    first_right: list[Tensor] = []  # [tokens, n], whether each depth agrees
    without = torch.zeros(n)
    documents = skipped_tokens = 0
    with bars(quiet) as bar, runner:
        tick = bar("Answers")
        for start in range(0, len(texts), _BATCH):
            tick(start, len(texts))
            prompts = encode_prompts(tokenizer, texts[start : start + _BATCH], max_prompt)
            said = answer(model, tokenizer, prompts, new_tokens, do_sample=False)
            for prompt, ids in zip(prompts, said, strict=True):
                if not ids:
                    continue
                text = torch.tensor([prompt + ids], device=runner.input_device)
                states = _states(runner, text)
                tokens = [_tokens(runner, state, len(prompt) - 1) for state in states[1:]]
                first_right.append(torch.stack([t == tokens[-1] for t in tokens], dim=1))
                if documents < thorough:
                    without += _without_each(runner, text, states, tokens[-1], len(prompt) - 1)
                    skipped_tokens += len(ids)
                documents += 1
                tick(start + documents % _BATCH, len(texts))
        tick(len(texts), len(texts))
        if not documents:
            raise DataError("The model said nothing to any of the prompts. Try others.")
        hidden = runner.config.hidden_size
        readout = Readout(runner.parts.norm, runner.parts.head, runner.config)
        costs = measure_costs(
            runner, readout, ExitHead("identity", hidden), TokenRouter(hidden, 128)
        )
    right = torch.cat(first_right)
    first = right.int().argmax(1)  # of several largest, argmax takes the first
    checkpoints, ceiling = _best_checkpoints(right, costs, exits)
    return Assessment(
        n,
        documents,
        len(right),
        tuple(right.float().mean(0).tolist()),
        tuple((torch.bincount(first, minlength=n) / len(first)).tolist()),
        tuple((without / skipped_tokens).tolist()),
        {"layer": costs.layer, "head": costs.head},
        checkpoints,
        ceiling,
    )


def _states(runner: DepthRunner, ids: Tensor) -> list[Tensor]:
    """What layer 0 takes, and the output of every layer, `[1, tokens, hidden]` each."""
    states: list[Tensor] = []

    def note_input(_: Any, args: tuple, kwargs: dict) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    cache = runner.new_cache(1)
    # Families do different things to embeddings before layer 0, so its input is read there.
    hook = runner.parts.layers[0].register_forward_pre_hook(note_input, with_kwargs=True)
    try:
        hidden = runner.run(ids, 0, 1, cache=cache)
    finally:
        hook.remove()
    states.append(hidden)
    for layer in range(1, runner.n_layers):
        hidden = runner.run(ids, layer, layer + 1, cache=cache, hidden=hidden)
        states.append(hidden)
    return states


def _tokens(runner: DepthRunner, state: Tensor, first: int) -> Tensor:
    """What the model's own head says from `first` on, `[positions]`."""
    return runner.logits(state[0, first:-1]).argmax(-1).cpu()


def _without_each(
    runner: DepthRunner, ids: Tensor, states: Sequence[Tensor], said: Tensor, first: int
) -> Tensor:
    """With each single layer left out for all tokens: how many stay the same, `[layers]`."""
    n = runner.n_layers
    same, positions = torch.zeros(n), torch.arange(ids.shape[1], device=ids.device)[None]
    for layer, state in enumerate(states[:-1]):
        if layer + 1 < n:
            # Nothing has passed the layers below, so this cannot count as passing those above.
            state = runner.run(
                ids, layer + 1, n, cache=runner.new_cache(1), hidden=state,
                positions=positions, provisional=True,
            )  # fmt: skip
        same[layer] = (_tokens(runner, state, first) == said).sum()
    return same


def _best_checkpoints(right: Tensor, costs: Costs, most: int) -> tuple[tuple[int, ...], float]:
    """Checkpoints that save most if a token leaves at the first that agrees, and what they save.

    Added one by one while the next saves more time. A token that leaves reads one head, as one at
    full depth does; a gate that is never wrong reads no other.
    """
    n = right.shape[1]
    full = costs.start + n * costs.layer + costs.head
    depth = torch.full((len(right),), float(n))
    chosen: list[int] = []
    for _ in range(most):
        options = [
            torch.where(right[:, k], depth.clamp_max(k + 1), depth).mean() for k in range(n - 1)
        ]
        best = int(torch.stack(options).argmin())
        if best in chosen or float(options[best]) >= float(depth.mean()):
            break
        chosen.append(best)
        depth = torch.where(right[:, best], depth.clamp_max(best + 1), depth)
    ceiling = full / (costs.start + float(depth.mean()) * costs.layer + costs.head)
    return tuple(sorted(chosen)), ceiling
