"""Prompts that calibration has not used."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tide.calibration.data import Prompt, load_prompts
from tide.errors import DataError
from tide.exits.artifact import Artifact


def sample(source: Any, made: Artifact, samples: int | None) -> list[str]:
    """Prompts for a certificate: not used before, one of each document, in random order.

    The test bets on one sequence after the other, so their order must tell nothing of their losses;
    a file may be sorted by difficulty. And the prompts of a document are wrong together.
    """
    streamed = None if samples is None else samples + len(made.record.get("used", ()))
    found = unseen(load_prompts(source, streamed=streamed), made)
    random.Random(0).shuffle(found)
    by_document = {prompt.document or prompt.text: prompt.text for prompt in found}
    return list(by_document.values())[:samples]


def unseen(prompts: Sequence[Prompt], made: Artifact) -> list[Prompt]:
    """The prompts that calibration has not used, nor others of their documents.

    On prompts that it has used, a certificate would be void, and other figures too good.
    """
    used = set(made.record.get("used", ()))
    found = [prompt for prompt in prompts if used.isdisjoint(prompt.keys)]
    if not found:
        raise DataError(
            f"All {len(prompts)} prompts were used in calibration. Give other prompts; calibration "
            "always reserves a part of its own data for certification."
        )
    return found
