"""Sampling: the full model's distribution, the draws of `generate`, and little noise held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList

from test_drafter import Cycle
from test_generate import engine as by_script
from test_generate import prompts
from tide.config import TIDEConfig
from tide.decode.loop import DecodeLoop
from tide.decode.noise import _HELD, PlacedNoise
from tide.decode.sampler import Sampler
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.heads import ExitHead
from tide.exits.policy import ScriptedPolicy
from tide.models.fingerprint import Fingerprint
from tiny import VOCABULARY, tiny_model

DRAWS = 20_000
BATCH = 500
SMALL = 11


def model() -> Any:
    return tiny_model("llama", vocab_size=SMALL, num_hidden_layers=3)


def engine(of: Any, drafts: tuple[str, ...] = ("exit",)) -> TIDE:
    """An identity exit after layer 0 of an untrained model: it differs strongly from full depth."""
    exits = Artifact(Fingerprint("", "", ""), 32, [Checkpoint(0, ExitHead("identity", 32))])
    made = TIDE(
        of,
        exits,
        TIDEConfig(mode="lossless", min_layers=0, drafts=drafts, max_pending=3),
        policy=ScriptedPolicy(lambda at, checkpoint: at.position != 4),
        allow_mismatch=True,
        check=False,
    )
    made.drafter.fixed = True
    return made


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
    for _ in range(DRAWS // BATCH):
        out = tide.generate(
            prompt.expand(BATCH, -1),
            attention_mask=torch.ones(BATCH, 3, dtype=torch.long),
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


def test_the_test_fails_when_any_draft_is_accepted(monkeypatch: Any) -> None:
    pick = Sampler.pick

    def accept_any_draft(self: Sampler, at: Any, scores: torch.Tensor) -> torch.Tensor:
        picked = pick(self, at, scores)
        for k, (sequence, i) in enumerate(at):
            if i + 1 < len(sequence.tokens):
                picked[k] = sequence.tokens[i + 1]
        return picked

    monkeypatch.setattr(Sampler, "pick", accept_any_draft)
    of = model()
    assert p_value(of, engine(of)) < 1e-6


@pytest.mark.parametrize("mode", ["off", "lossless"])
@pytest.mark.parametrize("sequences", [1, 4])
def test_with_a_seed_it_draws_what_generate_draws(mode: str, sequences: int) -> None:
    """Whatever exit heads and other sources draft, and run after run."""
    of = tiny_model("llama")
    options = {"max_new_tokens": 30, "do_sample": True, "top_k": 12, "eos_token_id": [5, 40]}
    options |= {"pad_token_id": 0, "temperature": 1.3, **prompts(sequences)}
    torch.manual_seed(3)
    expected = of.generate(**options)
    for fixed in (True, False, False):
        tide = by_script(of, mode, "random", fixed_drafts=fixed)
        torch.manual_seed(3)
        assert torch.equal(tide.generate(**options), expected)


@pytest.mark.parametrize("drafts", [(), ("context",)])
def test_mode_exit_draws_the_same_tokens_run_after_run(drafts: tuple[str, ...]) -> None:
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


def test_noise_that_is_drawn_again_is_the_same() -> None:
    like = torch.zeros(1, 50)
    torch.manual_seed(0)
    expected = torch.stack([torch.empty(3, 50).exponential_() for _ in range(60)])  # [place, ...]
    after = torch.rand(4)
    torch.manual_seed(0)
    noise = PlacedNoise(3)
    # The second sequence is 59 places ahead of the others before they move.
    first = noise.at([(0, 10), (1, 69), (2, 10)], like)
    assert torch.equal(first, torch.stack([expected[0, 0], expected[59, 1], expected[0, 2]]))
    for place in [*range(11, 70), 40, 10, 69]:
        both = [(0, place), (2, place)]
        assert torch.equal(noise.at(both, like), expected[place - 10, [0, 2]])
        assert len(noise._held) <= _HELD
    assert torch.equal(torch.rand(4), after)  # drawing again does not move the generator
    noise.forget_before(65)
    assert min(noise._states) == 65 and min(noise._held) >= 65


def test_few_tensors_of_noise_are_held_while_a_sequence_is_far_ahead(monkeypatch: Any) -> None:
    held, ahead = [0], [0]
    hold, end_step = PlacedNoise._hold, DecodeLoop.end_step

    def spy(self: PlacedNoise, place: int, noise: torch.Tensor) -> None:
        hold(self, place, noise)
        held.append(len(self._held))

    def measure(self: DecodeLoop) -> None:
        lengths = [s.committed for s in self.batch.sequences if not s.finished]
        ahead.append(max(lengths, default=0) - min(lengths, default=0))
        end_step(self)

    monkeypatch.setattr(PlacedNoise, "_hold", spy)
    monkeypatch.setattr(DecodeLoop, "end_step", measure)
    ids = torch.randint(8, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = 7
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": True}
    kwargs |= {"max_new_tokens": 110, "eos_token_id": None, "temperature": 2.0, "pad_token_id": 0}
    kwargs["logits_processor"] = LogitsProcessorList([Cycle()])
    of = tiny_model("llama")
    torch.manual_seed(3)
    wanted = of.generate(**kwargs)
    tide = by_script(of, "lossless", drafts=("context",), fixed_drafts=True)
    torch.manual_seed(3)
    assert torch.equal(tide.generate(**kwargs), wanted)
    assert max(ahead) > _HELD
    assert max(held) <= _HELD
