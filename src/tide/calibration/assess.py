"""The assessment `assess`: how much depth a model could save, before any training.

Everything is read with the model's own norm and head along its own greedy answers. Trained heads
agree after fewer layers, so calibration improves on these figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tide.calibration.answers import answer
from tide.calibration.costs import Costs, measure_costs
from tide.calibration.data import encode_prompts, load_texts
from tide.errors import ConfigError, DataError, MissingPackageError
from tide.exits.files import write_whole
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.models.attach import attach
from tide.models.cache import WaterlineCache
from tide.models.runner import DepthRunner
from tide.models.tokens import TokenBatch
from tide.progress import bars

_BATCH = 16  # prompts answered at once


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The result of `assess`. Depths count layers, from 1 to `n_layers`; layers count from 0.

    Attributes:
        n_layers: layers of the model.
        documents, tokens: number of answers, and of tokens in them.
        agreement: at each depth, share of tokens for which the model's own head already predicts
            the token of full depth.
        oracle: share of tokens for which each depth is the first that agrees.
        without: with each single layer removed, share of tokens that agree with full depth.
        costs: seconds of one layer and of the head on this device.
        checkpoints: layers after which exits would save most, with a gate that is never wrong.
        ceiling: speed-up with exits there and a gate that is never wrong, heads included.
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
        """As JSON."""
        return {**asdict(self), "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """Whether calibration is worth it, in a sentence."""
        half = next(k + 1 for k, share in enumerate(self.agreement) if share >= 0.5)
        found = (
            f"Half of the tokens agree with full depth after {half} of {self.n_layers} layers, and "
            f"a gate that is never wrong would make this model {self.ceiling:.2f}x faster without "
            "any training"
        )
        if self.ceiling >= 1.1:
            return f"{found}: calibrate, and let `tide bench` compare exits with drafts alone."
        return f"{found}: expect little from exits. Lossless drafts need no calibration."

    def summary(self) -> str:
        """A table by depth, followed by the verdict."""
        lines = ["layers   agree   first agree   agree without the layer"]
        for k in range(self.n_layers):
            mark = "  <- checkpoint" if k in self.checkpoints else ""
            lines.append(
                f"{k + 1:6}  {self.agreement[k]:6.1%}  {self.oracle[k]:12.1%}"
                f"  {self.without[k]:24.1%}{mark}"
            )
        lines.append(
            f"{self.tokens} tokens of {self.documents} answers; a layer takes "
            f"{1e3 * self.costs['layer']:.2f} ms, the head {1e3 * self.costs['head']:.2f} ms."
        )
        return "\n".join([*lines, self.verdict])

    def plot(self, path: str | Path) -> None:
        """Draw the table into an image file."""
        form = image_form(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 7), layout="constrained")
        agree, first = figure.subplots(2, 1, sharex=True)
        depths = range(1, self.n_layers + 1)
        agree.plot(depths, self.agreement, marker="o", label="exit after this many layers")
        agree.plot(depths, self.without, marker="x", label="only this layer removed")
        agree.set(ylabel="same token as full depth", ylim=(0, 1))
        agree.legend()
        first.bar(depths, self.oracle)
        first.set(xlabel="layers", ylabel="first depth that agrees, share of tokens")
        for checkpoint in self.checkpoints:
            first.axvline(checkpoint + 1.5, linestyle="--", color="0.4")
        figure.suptitle(f"A gate that is never wrong: {self.ceiling:.2f}x, no training")
        write_whole(Path(path), partial(figure.savefig, format=form, dpi=150))


def image_form(path: str | Path) -> str:
    """The format of an image, by its name.

    Raises:
        ConfigError: if there is no such format.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingPackageError("Plots need matplotlib: pip install 'tide-llm[plot]'.") from error
    form = Path(path).suffix.lstrip(".").lower() or "png"
    if form not in (forms := FigureCanvasBase.get_supported_filetypes()):
        raise ConfigError(f"{path} is no image; it must end in one of {', '.join(forms)}.")
    return form


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
    """Measure at which depth a model's tokens agree with full depth, along its greedy answers.

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
    # Removing each layer in turn costs about `n / 2` passes, so only a part of the texts is used.
    removal_documents = max(1, len(texts) // 4)
    agrees: list[Tensor] = []  # whether each depth agrees, [tokens, n]
    without = torch.zeros(n)
    documents = removal_tokens = 0
    with bars(quiet) as bar:
        tick = bar("Answers")
        for start in range(0, len(texts), _BATCH):
            tick(start, len(texts))
            prompts = encode_prompts(tokenizer, texts[start : start + _BATCH], max_prompt)
            answers = answer(model, tokenizer, prompts, new_tokens, do_sample=False)
            for prompt, ids in zip(prompts, answers, strict=True):
                if not ids:
                    continue
                trace = _trace(runner, prompt, ids)
                tokens = [trace.tokens(runner, state) for state in trace.states[1:]]
                agrees.append(torch.stack([t == tokens[-1] for t in tokens], dim=1))
                if documents < removal_documents:
                    without += _without_each(runner, trace, tokens[-1])
                    removal_tokens += len(ids)
                documents += 1
                tick(start + documents % _BATCH, len(texts))
        tick(len(texts), len(texts))
        if not documents:
            raise DataError("The model's answer to every prompt is empty. Try other prompts.")
        hidden = runner.config.hidden_size
        readout = Readout(runner.parts.norm, runner.parts.head, runner.config)
        costs = measure_costs(
            runner, readout, ExitHead("identity", hidden), TokenRouter(hidden, 128)
        )
    agree = torch.cat(agrees)
    first = agree.int().argmax(1)  # of several maxima, argmax takes the first
    checkpoints, ceiling = _best_checkpoints(agree, costs, exits)
    return Assessment(
        n_layers=n,
        documents=documents,
        tokens=len(agree),
        agreement=tuple(agree.float().mean(0).tolist()),
        oracle=tuple((torch.bincount(first, minlength=n) / len(first)).tolist()),
        without=tuple((without / removal_tokens).tolist()),
        costs={"layer": costs.layer, "head": costs.head},
        checkpoints=checkpoints,
        ceiling=ceiling,
    )


@dataclass(frozen=True)
class _Trace:
    """A prompt and its answer, run layer by layer.

    Attributes:
        ids: the tokens, `[1, tokens]`.
        states: the input of layer 0 and the output of every layer, `[1, tokens, hidden]` each.
        cache: holds all tokens in every layer.
        first: the position from which the answer's first token is predicted.
    """

    ids: Tensor
    states: list[Tensor]
    cache: WaterlineCache
    first: int

    def tokens(self, runner: DepthRunner, state: Tensor) -> Tensor:
        """The tokens that the model's own head predicts from a state, `[positions]`."""
        return runner.logits(state[0, self.first : -1]).argmax(-1).cpu()


def _trace(runner: DepthRunner, prompt: list[int], answer_ids: list[int]) -> _Trace:
    ids = torch.tensor([prompt + answer_ids], device=runner.input_device)
    batch, cache = TokenBatch(ids), runner.new_cache(1)
    states: list[Tensor] = []

    def note_input(_: Any, args: tuple, kwargs: dict) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    # Families do different things to embeddings before layer 0, so its input is read there.
    hook = runner.parts.layers[0].register_forward_pre_hook(note_input, with_kwargs=True)
    try:
        hidden = runner.run(batch, 0, 1, cache=cache)
    finally:
        hook.remove()
    states.append(hidden)
    for layer in range(1, runner.n_layers):
        hidden = runner.run(batch, layer, layer + 1, cache=cache, hidden=hidden)
        states.append(hidden)
    return _Trace(ids, states, cache, len(prompt) - 1)


def _without_each(runner: DepthRunner, trace: _Trace, target: Tensor) -> Tensor:
    """With each single layer removed: how many tokens still agree with `target`, `[layers]`."""
    n, ids = runner.n_layers, trace.ids
    # Given by their positions, the tokens pass the layers above again and overwrite their KV there.
    again = TokenBatch(ids, positions=torch.arange(ids.shape[1], device=ids.device)[None])
    same = torch.zeros(n)
    for layer, state in enumerate(trace.states[:-1]):
        if layer + 1 < n:
            state = runner.run(again, layer + 1, n, cache=trace.cache, hidden=state)
        same[layer] = (trace.tokens(runner, state) == target).sum()
    return same


def _best_checkpoints(agree: Tensor, costs: Costs, most: int) -> tuple[tuple[int, ...], float]:
    """Checkpoints that save most if each token exits at the first that agrees, and the speed-up.

    Added one by one while the next saves more time. A token that exits reads one head, as one at
    full depth does; a gate that is never wrong reads no other.

    Args:
        agree: whether each depth agrees with full depth, `[tokens, n_layers]`.
    """
    n = agree.shape[1]
    full = costs.start + n * costs.layer + costs.head
    depth = torch.full((len(agree),), float(n))
    chosen: list[int] = []
    for _ in range(most):
        options = [
            torch.where(agree[:, k], depth.clamp_max(k + 1), depth).mean() for k in range(n - 1)
        ]
        best = int(torch.stack(options).argmin())
        if best in chosen or float(options[best]) >= float(depth.mean()):
            break
        chosen.append(best)
        depth = torch.where(agree[:, best], depth.clamp_max(best + 1), depth)
    ceiling = full / (costs.start + float(depth.mean()) * costs.layer + costs.head)
    return tuple(sorted(chosen)), ceiling
