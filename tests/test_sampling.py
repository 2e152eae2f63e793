"""Lossless sampling has the full model's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from test_generate import engine as by_script
from test_generate import prompts
from tide.config import TIDEConfig
from tide.decode.choose import Chooser
from tide.engine import TIDE
from tide.exits.artifact import Artifact, Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy
from tide.models.fingerprint import Fingerprint
from tiny import tiny_model

DRAWS = 20_000
ROWS = 500
SMALL = 11


def model() -> Any:
    return tiny_model("llama", vocab_size=SMALL, num_hidden_layers=3)


def engine(of: Any, drafts: tuple[str, ...] = ("exit",)) -> TIDE:
    """An identity exit after layer 0 of an untrained model: it differs strongly from full depth."""
    exits = Artifact(Fingerprint("", "", ""), 32, [Checkpoint(0, ExitHead("identity", 32))])
    return TIDE(
        of,
        exits,
        TIDEConfig(mode="lossless", min_layers=0, drafts=drafts, max_pending=3, fixed_drafts=True),
        policy=ScriptedPolicy(lambda place, checkpoint: place.position != 4),
        allow_mismatch=True,
        check=False,
    )


def exact(of: Any, prompt: torch.Tensor, temperature: float, **options: Any) -> torch.Tensor:
    """Distribution of the second new token, summed over the first, by transformers' own warpers."""
    config = of.generation_config.__class__(do_sample=True, temperature=temperature, **options)
    warpers = of._get_logits_processor(config, input_ids_seq_length=prompt.shape[1])

    def following(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return warpers(ids, of(ids).logits[:, -1].float()).softmax(-1)

    first = following(prompt)[0]
    after = torch.cat([prompt.expand(SMALL, -1), torch.arange(SMALL)[:, None]], 1)
    return first @ following(after)


def p_value(of: Any, tide: TIDE, **options: Any) -> float:
    """Chi-square of the second new token of many draws against its exact distribution."""
    prompt = torch.tensor([[3, 7, 4]])
    torch.manual_seed(0)
    counts = torch.zeros(SMALL)
    for _ in range(DRAWS // ROWS):
        out = tide.generate(
            prompt.expand(ROWS, -1),
            attention_mask=torch.ones(ROWS, 3, dtype=torch.long),
            max_new_tokens=3,
            do_sample=True,
            eos_token_id=None,
            pad_token_id=0,
            **{"top_k": 0, **options},
        )
        counts += torch.bincount(out[:, 4], minlength=SMALL)
    expected = exact(of, prompt, **{"temperature": 1.0, "top_k": 0, **options})
    assert counts[expected == 0].sum() == 0
    support = expected > 0
    frequencies = expected[support] / expected[support].sum() * counts.sum()
    return float(chisquare(counts[support], frequencies).pvalue)


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 1.7}])
def test_lossless_sampling_has_the_full_models_distribution(options: dict[str, Any]) -> None:
    of = model()
    tide = engine(of)
    assert p_value(of, tide, **options) > 1e-3
    drafted, accepted = tide.last_stats.drafted["exit"], tide.last_stats.accepted["exit"]
    assert drafted > 100
    assert 0.1 < accepted / drafted < 0.9  # heads that differ strongly, and are not useless


def test_the_test_fails_when_acceptance_is_greedy(monkeypatch: Any) -> None:
    pick = Chooser.pick

    def takes_any_guess(self: Chooser, at: Any, scores: torch.Tensor) -> list[int]:
        said = pick(self, at, scores)
        following = [row.tokens[i + 1 : i + 2] for row, i in at]
        return [guess[0] if guess else token for guess, token in zip(following, said, strict=True)]

    monkeypatch.setattr(Chooser, "pick", takes_any_guess)
    of = model()
    assert p_value(of, engine(of)) < 1e-6


@pytest.mark.parametrize("mode", ["off", "lossless"])
@pytest.mark.parametrize("rows", [1, 4])
def test_with_a_seed_it_draws_what_generate_draws(mode: str, rows: int) -> None:
    """Whatever was guessed, by exit heads and by drafts, and run after run."""
    of = tiny_model("llama")
    options = {"max_new_tokens": 30, "do_sample": True, "top_k": 12, "eos_token_id": [5, 40]}
    options |= {"pad_token_id": 0, "temperature": 1.3, **prompts(rows)}
    torch.manual_seed(3)
    expected = of.generate(**options)
    for fixed in (True, False, False):
        tide = by_script(of, mode, "random", fixed_drafts=fixed)
        torch.manual_seed(3)
        assert torch.equal(tide.generate(**options), expected)


@pytest.mark.parametrize("drafts", [(), ("context",)])
def test_early_exit_draws_the_same_run_after_run(drafts: tuple[str, ...]) -> None:
    of = tiny_model("llama")
    options = {"max_new_tokens": 30, "do_sample": True, "top_k": 12, "eos_token_id": None}
    options |= {"pad_token_id": 0, **prompts(4)}
    outputs = []
    for some in ((), drafts, drafts):
        tide = by_script(of, "exit", "random", drafts=some, audit_tail=True)
        torch.manual_seed(3)
        outputs.append(tide.generate(**options))
        assert tide.last_stats.audited == tide.last_stats.exited_tokens > 20
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[1], outputs[2])
