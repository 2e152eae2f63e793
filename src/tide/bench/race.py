"""Gives the race: the same prompts through several ways to decode, in turn, in one run."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tide.calibration.progress import bars
from tide.engine import TIDE
from tide.stats import ExitStats

# From an encoded prompt to the ids that come out, prompt included.
Side = Callable[[Mapping[str, Tensor]], Tensor]


class Entrants:
    """Engines that take part in a race, and what they have counted in it.

    Args:
        engines: by name.
        options: of `generate`, for all.

    Attributes:
        sides: the engines as the race needs them.
        stats: for each, what it counted of every prompt.
    """

    def __init__(self, engines: Mapping[str, TIDE], options: Mapping[str, Any]) -> None:
        self._engines = engines
        self.stats: dict[str, list[ExitStats]] = {name: [] for name in engines}
        self.sides: dict[str, Side] = {
            name: lambda prompt, engine=engine: engine.generate(**prompt, **options)  # type: ignore[misc]
            for name, engine in engines.items()
        }

    def add(self, _: Any = None) -> None:
        """Keep what each engine's last call counted; to be called after every prompt."""
        for name, engine in self._engines.items():
            self.stats[name].append(engine.last_stats)

    def counted(self, name: str, categories: Sequence[str] = ()) -> dict[str, Any]:
        """What an engine counted in all, and how deep it went for each category of prompt."""
        stats = self.stats[name]
        tokens = _total(stats, "total_tokens")
        run, full = _total(stats, "layers_run"), _total(stats, "layers_full")
        layers = Counter[int]()
        for of_a_prompt in stats:
            layers.update(of_a_prompt.exits_per_layer)
        by: dict[str, list[ExitStats]] = {}
        for category, of_a_prompt in zip(categories, stats, strict=bool(categories)):
            by.setdefault(category, []).append(of_a_prompt)
        return {
            "layers_run": run,
            "layers_full": full,
            # What the speed-up would be if layers were all that costs time.
            "limit": round(full / run, 3),
            "exit_rate": round(layers.total() / tokens, 4),
            "exits_per_layer": {str(layer): layers[layer] for layer in sorted(layers)},
            "audited": _total(stats, "audited"),
            # Over all tokens, as risk is counted; not over the early ones alone.
            "disagreement": round(_total(stats, "differed") / tokens, 4),
            "layer_calls_per_token": {
                category: round(_total(some, "layers_run") / _total(some, "total_tokens"), 2)
                for category, some in by.items()
            },
        }


def _total(stats: Sequence[ExitStats], what: str) -> int:
    return sum(getattr(of_a_prompt, what) for of_a_prompt in stats)


def race(
    sides: Mapping[str, Side],
    prompts: Sequence[Mapping[str, Tensor]],
    after: Callable[[dict[str, Tensor]], None] = lambda out: None,
    *,
    categories: Sequence[str] = (),
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Every prompt through every side in turn; who goes first changes.

    Args:
        sides: the first is the baseline.
        prompts: encoded, one row each.
        after: called with what each side has made of a prompt.
        categories: of the prompts, to report each by itself.
        quiet: show no progress.

    Returns:
        For each side, milliseconds per token and the speed-up over the baseline.
    """
    order, first = list(sides), next(iter(sides))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    with bars(quiet) as bar:
        tick = bar("Prompts")
        for turn in range(-1, len(prompts)):
            prompt = prompts[max(turn, 0)]
            given = prompt["input_ids"].shape[1]
            out: dict[str, Tensor] = {}
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                began = time.perf_counter()
                out[name] = sides[name](prompt)
                if turn >= 0:  # the first goes round once more than the others, to warm up
                    seconds[name].append(time.perf_counter() - began)
                    tokens[name].append(out[name].shape[1] - given)
            if turn >= 0:
                after(out)
            tick(turn + 1, len(prompts))
    # Outputs may differ in length, so speed is per token.
    rates = {
        name: [t / s for t, s in zip(tokens[name], seconds[name], strict=True)] for name in sides
    }
    per_token = {name: sum(seconds[name]) / sum(tokens[name]) for name in sides}
    rows = []
    for name in sides:
        ratios = [ours / bare for ours, bare in zip(rates[name], rates[first], strict=True)]
        row: dict[str, Any] = {
            "side": name,
            "ms_per_token": round(1e3 * per_token[name], 2),
            "speedup": round(per_token[first] / per_token[name], 3),
            "speedup_of_a_prompt": _spread(ratios),
            "tokens": sum(tokens[name]),
        }
        if categories:
            by: dict[str, list[float]] = {}
            for category, ratio in zip(categories, ratios, strict=True):
                by.setdefault(category, []).append(ratio)
            row["by_category"] = {c: round(statistics.mean(r), 3) for c, r in by.items()}
        rows.append(row)
    return rows


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    if len(ratios) < 2:
        return {"p50": round(ratios[0], 3)}
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return {f"p{p}": round(deciles[p // 10 - 1], 3) for p in (20, 50, 80)}
