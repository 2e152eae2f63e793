"""`off` and `lossless` equal `model.generate` token for token, whatever the exits do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tide.config import TIDEConfig
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy, TokenPosition
from tide.models.fingerprint import Fingerprint
from tiny import FAMILIES, VOCABULARY, tiny_model, tiny_tokenizer

NEW = 24


class WrongHead(ExitHead):
    """An exit head that never predicts what the model does: it negates the state."""

    def transform(self, hidden: Tensor) -> Tensor:
        return -hidden


def artifact(head: type[ExitHead] = ExitHead, strategy: str = "identity") -> Artifact:
    """Exits after layers 1 and 3 of a tiny model."""
    checkpoints = [Checkpoint(layer, head(strategy, 32)) for layer in (1, 3)]
    return Artifact(Fingerprint("", "", ""), 32, checkpoints, record={"used": []})


def scattered(at: TokenPosition, checkpoint: int) -> bool:
    return (at.sequence * 7 + at.position * 5 + checkpoint * 3) % 4 < 2


POLICIES: dict[str, tuple[Any, type[ExitHead]]] = {
    "always": (lambda at, checkpoint: True, ExitHead),
    "never": (lambda at, checkpoint: False, ExitHead),
    "random": (scattered, ExitHead),
    "adversarial": (lambda at, checkpoint: True, WrongHead),
}


def engine(
    model: Any,
    mode: str,
    policy: str = "random",
    *,
    fixed_drafts: bool = False,
    compile: bool = False,
    **config: Any,
) -> TIDE:
    """An engine with scripted exits.

    Args:
        fixed_drafts: draft as many tokens as allowed, whether that pays or not.
        compile: compile the segments.
    """
    script, head = POLICIES[policy]
    made = TIDE(
        model,
        artifact(head),
        TIDEConfig(mode=mode, min_layers=0, **config),
        policy=ScriptedPolicy(script),
        allow_mismatch=True,
        check=False,
        compile=compile,
    )
    made.drafter.fixed = fixed_drafts
    return made


def prompts(sequences: int) -> dict[str, Tensor]:
    """A left-padded batch."""
    generator = torch.Generator().manual_seed(sequences)
    ids = torch.randint(3, VOCABULARY, (sequences, 9), generator=generator)
    mask = torch.ones_like(ids)
    for s in range(1, sequences):
        mask[s, : 2 * s] = 0
        ids[s, : 2 * s] = 0
    return {"input_ids": ids, "attention_mask": mask}


GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"eos_token_id": None},
    "processors": {"repetition_penalty": 1.3, "min_new_tokens": 6, "eos_token_id": [5, 40]},
    "stop strings": {"repetition_penalty": 1.3, "eos_token_id": None},
}


# What ends a text is the same code for every family.
CASES = [
    (family, options)
    for family in FAMILIES for options in OPTIONS
    if options != "stop strings" or family in ("llama", "gemma3_text")
]  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_off_and_lossless_equal_generate(family: str, sequences: int, options: str) -> None:
    model = tiny_model(family)
    kwargs = {**prompts(sequences), **GREEDY, **OPTIONS[options]}
    expected = model.generate(**kwargs)
    if options == "stop strings":
        tokenizer = tiny_tokenizer()
        # Two tokens from the middle of the last sequence: it ends there, the others when they may.
        stop = tokenizer.decode(expected[-1, -12:-10])
        kwargs |= {"stop_strings": [stop], "tokenizer": tokenizer, "eos_token_id": [96]}
        expected = model.generate(**kwargs)
        assert sequences > 1 or expected.shape[1] < 9 + NEW
    assert torch.equal(engine(model, "off").generate(**kwargs), expected)
    for policy, fixed in [*((policy, True) for policy in POLICIES), ("random", False)]:
        tide = engine(model, "lossless", policy, max_pending=4, fixed_drafts=fixed)
        assert torch.equal(tide.generate(**kwargs), expected), policy


@pytest.mark.parametrize("drafts", [(), ("context",), ("exit",), ("context", "exit")])
def test_lossless_with_any_draft_sources(drafts: tuple[str, ...]) -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(4), **GREEDY, "max_new_tokens": 60}
    expected = model.generate(**kwargs)
    tide = engine(model, "lossless", "always", drafts=drafts, fixed_drafts=True, max_tree=0)
    assert torch.equal(tide.generate(**kwargs), expected)
    assert {name.split()[0] for name in tide.last_stats.drafted} <= set(drafts)
    if drafts:
        assert sum(tide.last_stats.accepted.values()) > 0
