"""Prompts that calibration has not used, nor a test that failed."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from tide.calibration.bounds import fewest_sequences
from tide.calibration.data import Prompt, each_prompt, is_streamed, text_key
from tide.errors import DataError
from tide.exits.artifact import Artifact

# What is claimed: a risk, and the conditions under which it holds.
Claim = tuple[Any, ...]


def draw(
    prompts: Any, made: Artifact, samples: int | None, claims: Sequence[Claim]
) -> list[Prompt]:
    """Prompts on which claims may be tested, as many as that takes.

    A claim that has failed is tested on other prompts: tested until it succeeds, on prompts that it
    has met before, it would be wrong more often than in a share `delta` of cases.
    """
    failed = made.record.get("failed", {})
    drawn = sample(prompts, made, samples, [k for c in claims for k in failed.get(_key(c), ())])
    for risk, delta, *_ in claims:
        if len(drawn) < (fewest := fewest_sequences(risk, delta)):
            limited = len(drawn) == samples
            found = "were drawn" if limited else "remain that were not used before"
            more = "Raise `samples` (`--samples`)" if limited else "Give more prompts"
            raise DataError(
                f"Only {len(drawn)} prompts {found}, each of its own document; risk {risk} at "
                f"delta {delta} takes at least {fewest}, even if no token differs. {more}, or "
                "accept a higher risk."
            )
    return drawn


def note_failed(made: Artifact, drawn: Sequence[Prompt], claims: Sequence[Claim]) -> None:
    """Note in the record on which prompts claims have failed."""
    failed = made.record.setdefault("failed", {}) if claims else {}
    keys = {key for prompt in drawn for key in prompt.keys}
    for claim in claims:
        failed[_key(claim)] = sorted(keys.union(failed.get(_key(claim), ())))


def sample(
    source: Any, made: Artifact, samples: int | None, tested: Collection[str] = ()
) -> list[Prompt]:
    """Prompts for a certificate: not used before, one of each document, in random order.

    The test bets on one sequence after the other, so their order must tell nothing of their losses;
    a file may be sorted by difficulty. And the prompts of a document are wrong together.

    Args:
        samples: most prompts to take; of a data set on the hub, no more are read.
        tested: keys of prompts on which the same claim has failed.
    """
    if "used" not in made.record:
        raise DataError(
            "The artifact does not tell which prompts it was calibrated with: its record has no "
            "`used`, and on such prompts a certificate would be void. Calibrate again, or set "
            "`made.record['used'] = []` if it has used none of these."
        )
    used, prompts = {*made.record["used"], *tested}, each_prompt(source)
    found = _unused(_until(prompts, used, samples) if is_streamed(source) else prompts, used)
    random.Random(0).shuffle(found)
    by_document = {prompt.document or prompt.text: prompt for prompt in found}
    return list(by_document.values())[:samples]


def unseen(prompts: Iterable[Prompt], made: Artifact) -> list[Prompt]:
    """The prompts that calibration has not used, nor others of their documents.

    On prompts that it has used, figures would be too good.
    """
    return _unused(prompts, set(made.record.get("used", ())))


def _key(claim: Claim) -> str:
    return text_key(json.dumps(claim))


def _unused(prompts: Iterable[Prompt], used: set[str]) -> list[Prompt]:
    """Prompts without a key that is used; none at all is an error."""
    given = list(prompts)
    found = [prompt for prompt in given if used.isdisjoint(prompt.keys)]
    if not given:
        raise DataError("There is no text in the data. Name a file with one text per line.")
    if not found:
        raise DataError(
            f"Of {len(given)} prompts, all were used in calibration or in a test that failed. Give "
            "other prompts; calibration always reserves a part of its own data for certification."
        )
    return found


def _until(prompts: Iterable[Prompt], used: set[str], documents: int | None) -> Iterator[Prompt]:
    """Prompts up to a number of documents that are not used."""
    names = set[str]()
    for prompt in prompts:
        yield prompt
        if used.isdisjoint(prompt.keys):
            names.add(prompt.document or prompt.text)
        if len(names) == documents:
            return
