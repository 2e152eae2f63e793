"""The assessment agrees with the model itself, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tide.calibration.assess import Assessment, _best_checkpoints, assess
from tide.calibration.costs import Costs
from tiny import FAMILIES, tiny_model, tiny_tokenizer

TEXTS = ["abcdef", "hgfedc", "aabbcc", "fgh"]


@pytest.mark.parametrize("family", FAMILIES)
def test_assesses_every_family(family: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    found = assess(model, tokenizer, TEXTS, new_tokens=8, quiet=True)
    n = model.config.get_text_config().num_hidden_layers
    assert len(found.agreement) == len(found.oracle) == len(found.without) == found.n_layers == n
    assert found.agreement[-1] == 1.0
    assert sum(found.oracle) == pytest.approx(1.0)
    assert found.tokens > 8 and found.documents == len(TEXTS)
    assert all(0 <= share <= 1 for share in (*found.without, *found.agreement))


def test_agrees_with_the_model_run_without_tide() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    found = assess(model, tokenizer, TEXTS[:1], new_tokens=8, quiet=True)
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    target = text[0, ids.shape[1] :]
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states
        for depth in range(1, found.n_layers):
            # The last of these is normed already, the others are not.
            logits = model.lm_head(model.model.norm(states[depth]))[0, ids.shape[1] - 1 : -1]
            agree = float((logits.argmax(-1) == target).float().mean())
            assert found.agreement[depth - 1] == pytest.approx(agree)
    for layer in range(found.n_layers):
        # A layer that adds nothing to the residual stream is a layer removed.
        kept = model.model.layers[layer]
        model.model.layers[layer] = _Nothing(kept)
        with torch.no_grad():
            without = model(text).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
        model.model.layers[layer] = kept
        assert found.without[layer] == pytest.approx(float((without == target).float().mean()))


class _Nothing(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", "full_attention")

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def test_checkpoints_are_where_tokens_first_agree() -> None:
    agree = torch.zeros(100, 12, dtype=torch.bool)
    agree[:, -1] = True
    agree[:40, 3:] = True  # 40 tokens agree after 4 layers, 30 more after 9
    agree[40:70, 8:] = True
    costs = Costs(layer=1.0, start=0.0, head=2.0, exit_head=2.0, router=0.0, prefilter=0.0)
    chosen, ceiling = _best_checkpoints(agree, costs, 3)
    assert chosen == (3, 8)  # a third would save nothing
    assert ceiling == pytest.approx(14 / (0.4 * 4 + 0.3 * 9 + 0.3 * 12 + 2))
    assert _best_checkpoints(agree, costs, 1)[0] == (3,)


def test_a_verdict_and_a_plot(tmp_path: Path) -> None:
    shape = {"n_layers": 3, "documents": 1, "tokens": 9, "oracle": (0.2, 0.3, 0.5)}
    shape |= {"agreement": (0.2, 0.5, 1.0), "without": (0.0, 0.5, 0.5), "checkpoints": (1,)}
    shape["costs"] = {"layer": 0.001, "head": 0.002}
    good = Assessment(**shape, ceiling=1.4)
    assert "agree with full depth after 2 of 3 layers" in good.verdict
    assert "calibrate, and let" in good.verdict
    poor = Assessment(**shape, ceiling=1.02)
    assert "expect little from exits" in poor.verdict
    assert good.summary().count("<- checkpoint") == 1
    pytest.importorskip("matplotlib")
    good.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
