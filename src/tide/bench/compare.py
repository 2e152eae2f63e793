"""The comparison of methods: the same prompts through each of them in turn, in one run."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from tide.calibration.answers import until_end
from tide.engine import TIDE
from tide.models.costs import synchronize
from tide.progress import bars
from tide.stats import ExitStats

# From an encoded prompt, and other arguments of `generate`, to the generated ids, prompt included.
Method = Callable[[Mapping[str, Any]], Tensor]

BASELINE = "HF generate"
COMPILED = "HF generate, compiled"
WARM_UP = "Write a short story about the sea."


class _Run(NamedTuple):
    """A prompt, or a batch of them, through a method.

    Attributes:
        seconds: that it took.
        decoding: of these, after the first token.
        answers: token ids, without prompts and padding.
    """

    seconds: float
    decoding: float
    answers: list[list[int]]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.answers))


class _FirstToken(StoppingCriteria):
    """Stops nothing, and notes when the first token was there: all after it is decoding."""

    tide_stateless = True  # so that drafts and exits go on beside it

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self.at is None:
            synchronize()  # else, on a GPU, the prompt may only be queued
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class EngineMethods:
    """Engines as methods of a comparison, and what they counted in it.

    Args:
        engines: by name.
        options: of `generate`, for all.

    Attributes:
        methods: the engines as `compare` takes them.
        stats: for each engine, what it counted for every prompt.
    """

    def __init__(self, engines: Mapping[str, TIDE], options: Mapping[str, Any]) -> None:
        self._engines = engines
        self.stats: dict[str, list[ExitStats]] = {name: [] for name in engines}
        self.methods: dict[str, Method] = {
            name: lambda prompt, engine=engine: engine.generate(**prompt, **options)  # type: ignore[misc]
            for name, engine in engines.items()
        }

    def add(self, _: Any = None) -> None:
        """Keep what each engine's last call counted; call it after every prompt."""
        for name, engine in self._engines.items():
            self.stats[name].append(engine.last_stats)

    def counted(self, name: str, categories: Sequence[str] = ()) -> dict[str, Any]:
        """What an engine counted in total, and its depth for each category of prompt."""
        stats = self.stats[name]
        tokens = _total(stats, "total_tokens")
        run, full = _total(stats, "layers_run"), _total(stats, "layers_full")
        layers = Counter[int]()
        losses: list[float] = []
        for of_a_prompt in stats:
            layers.update(of_a_prompt.exits_per_layer)
            losses += [loss for loss in of_a_prompt.losses if loss is not None]
        by: dict[str, list[ExitStats]] = {}
        for category, of_a_prompt in zip(categories, stats, strict=bool(categories)):
            by.setdefault(category, []).append(of_a_prompt)
        return {
            "layers_run": run,
            "layers_full": full,
            # The speed-up if only layers took time.
            "ideal_speedup": round(full / run, 3),
            "tokens_per_step": round(tokens / max(1, _total(stats, "steps")), 3),
            "exit_rate": round(layers.total() / tokens, 4),
            "exits_per_layer": {str(layer): layers[layer] for layer in sorted(layers)},
            "audited": _total(stats, "audited"),
            # A share of all tokens, not of the exited ones.
            "disagreement": round(_total(stats, "differed") / tokens, 4),
            # As a risk: the mean over sequences of that share.
            "loss": round(statistics.mean(losses), 4) if losses else None,
            "layer_calls_per_token": {
                category: round(_total(some, "layers_run") / _total(some, "total_tokens"), 2)
                for category, some in by.items()
            },
        }


def _total(stats: Sequence[ExitStats], what: str) -> int:
    return sum(getattr(of_a_prompt, what) for of_a_prompt in stats)


def compare(
    methods: Mapping[str, Method],
    prompts: Sequence[Mapping[str, Tensor]],
    after: Callable[[dict[str, Tensor]], None] = lambda out: None,
    *,
    categories: Sequence[str] = (),
    baselines: Sequence[str] = (),
    ends: Collection[int] = (),
    warm_up: Mapping[str, Tensor] | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Time every prompt with every method in turn; which method goes first rotates.

    Args:
        methods: by name.
        prompts: encoded, of one sequence or a left-padded batch each.
        after: called with the outputs of all methods for a prompt.
        categories: of the prompts, to report each separately.
        baselines: names of the methods without us, the eager one first; the speed-up is over the
            fastest of them. None for the first method.
        ends: the tokens that end an answer; what stands behind one is not counted.
        warm_up: a prompt that every method runs before the others, untimed; None for the first of
            them, for which an engine may then draft from its own answer.
        quiet: show no progress.

    Returns:
        For each method, milliseconds per token, with prompts and of decoding alone, the baseline,
        the speed-up over it, with prompts, and how many outputs are those of the first method
        without us, to the last token. All are medians of prompts: a machine may pause.
    """
    first = prompts[0] if warm_up is None else warm_up
    order = [name for name in methods if _runs(name, methods[name], first, baselines[1:])]
    baselines = [name for name in baselines if name in order]
    runs: dict[str, list[_Run]] = {name: [] for name in order}
    with bars(quiet) as bar:
        tick = bar("Prompts")
        for turn, prompt in enumerate(prompts):
            out: dict[str, Tensor] = {}
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                out[name], run = _timed(methods[name], prompt, ends)
                runs[name].append(run)
            after(out)
            tick(turn + 1, len(prompts))
    return _results(runs, categories, list(baselines) or order[:1])


def _timed(
    method: Method, prompt: Mapping[str, Tensor], ends: Collection[int]
) -> tuple[Tensor, _Run]:
    """What a method makes of a prompt, and how long it took."""
    first = _FirstToken()
    began = time.perf_counter()
    out = method({**prompt, "stopping_criteria": StoppingCriteriaList([first])})
    synchronize()
    ended = time.perf_counter()
    new = out[:, prompt["input_ids"].shape[1] :].tolist()
    answers = [until_end(answer, ends) for answer in new]
    return out, _Run(ended - began, ended - (first.at or ended), answers)


def _runs(name: str, method: Method, prompt: Any, optional: Sequence[str]) -> bool:
    """Warm a method up; whether it runs. A baseline that does not is dropped, with a warning."""
    try:
        method(prompt)
    except Exception as error:  # whatever a compiler may raise
        if name not in optional:
            raise
        reason = str(error).strip().split("\n")[0]
        warnings.warn(
            f"{name} is not measured, since it failed with {type(error).__name__}: {reason}",
            stacklevel=2,
        )
        return False
    return True


def _results(
    runs: Mapping[str, Sequence[_Run]], categories: Sequence[str], baselines: Sequence[str]
) -> list[dict[str, Any]]:
    """Speeds of all methods, given what each took for every prompt."""
    # Outputs may differ in length, so speed is per token.
    rates = {name: [run.tokens / run.seconds for run in of] for name, of in runs.items()}
    tokens = {name: sum(run.tokens for run in of) for name, of in runs.items()}
    per_token = {name: 1 / statistics.median(of) for name, of in rates.items()}
    baseline, eager = min(baselines, key=per_token.__getitem__), baselines[0]
    answers = {name: [answer for run in of for answer in run.answers] for name, of in runs.items()}
    results = []
    for name, of in runs.items():
        ratios, over_eager = (
            [own / base for own, base in zip(rates[name], rates[other], strict=True)]
            for other in (baseline, eager)
        )
        decoding = statistics.median(
            run.decoding / max(1, run.tokens - len(run.answers)) for run in of
        )
        result: dict[str, Any] = {
            "method": name,
            "ms_per_token": round(1e3 * per_token[name], 2),
            "decoding_ms_per_token": round(1e3 * decoding, 2),
            "baseline": baseline,
            "speedup": round(statistics.median(ratios), 3),
            "speedup_over_eager": round(statistics.median(over_eager), 3),
            "per_prompt_speedup": _spread(ratios),
            "tokens": tokens[name],
            "outputs": len(answers[name]),
            "exact_match_outputs": sum(map(list.__eq__, answers[name], answers[eager])),
        }
        if categories:
            by: dict[str, list[float]] = {}
            for category, ratio in zip(categories, ratios, strict=True):
                by.setdefault(category, []).append(ratio)
            result["by_category"] = {
                c: round(statistics.geometric_mean(r), 3) for c, r in by.items()
            }
        results.append(result)
    return results


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    if len(ratios) < 2:
        return {"p50": round(ratios[0], 3)}
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return {f"p{p}": round(deciles[p // 10 - 1], 3) for p in (20, 50, 80)}
