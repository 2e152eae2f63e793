"""Certification end to end at a known risk: how often is the certified bound broken?

`tide.certify` runs as it is: the engine decodes, exits, audits, and the thresholds are tested. Only
the gates are scripted, and the exit head is always wrong, so that the risk of each setting on the
path is known: it is the share of tokens that the script lets exit. Errors cluster in sequences, as
in `risk_simulation.py`, and one that is hard at one setting is hard at all. The first setting whose
risk is too high has hardly more than is allowed, where mistakes are most likely.

    python bench/certify_simulation.py --out bench/results/certify_simulation.json
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from measure import write
from rich.progress import track
from scipy.stats import beta, binom

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

import tide.certification  # noqa: E402
from tide.config import TIDEConfig  # noqa: E402
from tide.engine import TIDE  # noqa: E402
from tide.exits.artifact import Artifact  # noqa: E402
from tide.exits.checkpoint import Checkpoint  # noqa: E402
from tide.exits.heads import ExitHead  # noqa: E402
from tide.exits.policy import ScriptedPolicy, TokenPosition  # noqa: E402
from tide.exits.thresholds import Thresholds  # noqa: E402
from tide.models.fingerprint import fingerprint  # noqa: E402
from tide.models.locate import locate  # noqa: E402
from tiny import tiny_model, tiny_tokenizer  # noqa: E402

RISK, DELTA = 0.1, 0.1
# The path: threshold scale -> true risk, safest first.
TRUE_RISKS = {0.25: 0.02, 0.5: 0.05, 0.75: 0.08, 1.0: 0.101, 1.5: 0.13, 2.0: 0.2}
CONCENTRATION = 12.0  # of the beta distribution
PROMPT, NEW = 6, 12


class WrongHead(ExitHead):
    """Predicts the least likely token."""

    def transform(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state, negated."""
        return -hidden


class Draw:
    """The sequences of one certification, and which of their tokens exit at each setting.

    Args:
        rng: source of randomness.
        sequences: how many.
    """

    def __init__(self, rng: np.random.Generator, sequences: int) -> None:
        letters = np.array(list("abcdefghijklmnop"))
        self.texts = ["".join(some) for some in rng.choice(letters, (sequences, PROMPT))]
        self._hard = rng.random(sequences)
        self._coins = rng.random((sequences, NEW - 1))  # the prompt gives the first token

    def exits(self, scale: float) -> np.ndarray:
        """Which tokens exit at a setting, `[sequences, tokens after the first]`."""
        return self.exits_at(TRUE_RISKS[scale])

    def exits_at(self, risk: float) -> np.ndarray:
        """Which tokens exit at a true risk, `[sequences, tokens after the first]`."""
        share = risk * NEW / (NEW - 1)
        rates = beta.ppf(self._hard, CONCENTRATION * share, CONCENTRATION * (1 - share))
        return self._coins < rates[:, None]

    def engine(self, *args: Any, threshold_scale: float, **kwargs: Any) -> TIDE:
        """The engine that certification makes, with scripted gates."""
        exits = self.exits(threshold_scale)

        def script(at: TokenPosition, checkpoint: int) -> bool:
            return bool(exits[at.sequence, at.position - PROMPT])

        return TIDE(*args, threshold_scale=threshold_scale, policy=ScriptedPolicy(script), **kwargs)


def scripted_model() -> tuple[Any, Artifact]:
    """A tiny model that never ends a text, and an exit that is always wrong."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    exit_ = Checkpoint(1, WrongHead("identity", 32), thresholds=Thresholds(top_probability=0.5))
    return model, Artifact(fingerprint(model, locate(model)), 32, [exit_])


def certify(model: Any, made: Artifact, draw: Draw) -> float | None:
    """The setting that is certified."""
    made.certificates, made.record = [], {"used": []}
    with mock.patch.object(tide.certification, "TIDE", draw.engine):
        found = tide.certification.certify(
            model, tiny_tokenizer(), made, draw.texts, risk=RISK, delta=DELTA,
            config=TIDEConfig(min_layers=0, drafts=()), threshold_scales=tuple(TRUE_RISKS),
            new_tokens=NEW, batch=len(draw.texts), quiet=True,
        )  # fmt: skip
    return found[0].threshold_scale if found else None


def options(description: str) -> argparse.ArgumentParser:
    """The options of a simulation."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="certifications, and monitors")
    parser.add_argument("--sequences", type=int, default=100, help="of a certification")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    return parser


def conditions(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What a simulation was run with."""
    return {
        "risk": RISK, "delta": DELTA, "certifications": args.runs, "sequences": args.sequences,
        **more, "new_tokens": NEW, "concentration": CONCENTRATION, "seed": args.seed,
        "torch": torch.__version__, "tide": tide.__version__,
    }  # fmt: skip


def certifications(
    certify: Callable[[Draw], float | None], rng: np.random.Generator, args: argparse.Namespace
) -> dict[str, Any]:
    """How often each setting was certified, and the bound thereby broken."""
    certified = Counter[float]()
    for _ in track(range(args.runs), description="certifications"):
        scale = certify(Draw(rng, args.sequences))
        certified[TRUE_RISKS[scale] if scale is not None else 0.0] += 1
    return {
        "certified_by_true_risk": {f"{risk:g}": certified[risk] for risk in sorted(certified)},
        "broken": sum(count for risk, count in certified.items() if risk > RISK),
    }


def main() -> None:
    args = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rng, (model, made) = np.random.default_rng(args.seed), scripted_model()
    found = certifications(lambda draw: certify(model, made, draw), rng, args)
    document = {
        "what": "certifications in the engine, at a known risk",
        "conditions": conditions(args),
        **found,
        # The chance of as many or more if each were broken with probability delta.
        "chance_of_as_many": float(binom.sf(found["broken"] - 1, args.runs, DELTA)),
    }
    write(document, args.out)


if __name__ == "__main__":
    main()
