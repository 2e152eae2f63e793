"""The engine on fused kernels: the same tokens, few launches, and no wait of the host.

TRITON_INTERPRET=1 pytest tests/test_kernels_engine.py
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("no GPU; set TRITON_INTERPRET=1", allow_module_level=True)

from test_compiled import gated  # noqa: E402
from test_generate import GREEDY, prompts  # noqa: E402
from tide.config import TIDEConfig  # noqa: E402
from tide.engine import TIDE  # noqa: E402
from tide.exits.candidates import CandidateReadout, Prefilter  # noqa: E402
from tide.exits.confidence import ConfidenceModel  # noqa: E402
from tide.exits.gate import ExitGate  # noqa: E402
from tide.exits.heads import ExitHead, Readout  # noqa: E402
from tide.exits.norms import known_norm  # noqa: E402
from tide.exits.routers import TokenRouter  # noqa: E402
from tide.exits.thresholds import Thresholds  # noqa: E402
from tide.kernels import dispatch, operators, reference  # noqa: E402
from tide.kernels import triton as fused  # noqa: E402
from tide.kernels.arithmetic import normed  # noqa: E402
from tide.kernels.launch import recorded  # noqa: E402
from tiny import FAMILIES, tiny_model  # noqa: E402

GATE = {"score_exits", "top_parts", "confirm_exits", "append_kv"}
CHAIN, TREE = {"top_parts", "top_token"}, {"gather_path"}
WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "exit": ({"mode": "exit"}, GATE),
    "lossless": ({"mode": "lossless", "drafts": ("context",)}, CHAIN),
    "trees": ({"mode": "lossless", "drafts": ("context", "recycled"), "max_tree": 8}, TREE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_engine_generates_the_same_tokens(family: str, way: str, monkeypatch: Any) -> None:
    """Three norms: RMS, RMS with a shifted weight, layer norm; one with capped logits."""
    model = tiny_model(family).to(DEVICE)
    kwargs: dict[str, Any] = {**GREEDY, "max_new_tokens": 8, "eos_token_id": None}
    kwargs |= {name: tensor.to(DEVICE) for name, tensor in prompts(2).items()}
    outputs, counts = [], []
    options, expected = WAYS[way]
    for backend in ("reference", "triton"):
        monkeypatch.setenv("TIDE_KERNELS", backend)
        config = TIDEConfig(min_layers=0, exit_threshold=None, **options)
        tide = TIDE(model, gated(), config, allow_mismatch=True, check=False)
        tide.drafter.fixed = True
        with recorded() as launches:
            outputs.append(tide.generate(**kwargs))
        counts.append(Counter(launch.name for launch in launches))
        exits = tide.last_stats.exits_per_layer
        counts[-1].update({f"exits after {layer}": n for layer, n in exits.items()})
    assert torch.equal(*outputs)
    exited = [{k: n for k, n in c.items() if k.startswith("exits")} for c in counts]
    assert exited[0] == exited[1] and (way != "exit" or sum(exited[0].values()) > 3)
    launched = counts[1].keys() - exited[1].keys()
    assert launched >= expected
    assert not counts[0].keys() - exited[0].keys()
    if way != "exit":
        assert torch.equal(outputs[0], model.generate(**kwargs))


class Counted(TorchDispatchMode):
    """Counts what would be launched on a device, and where the host would wait for it."""

    quiet = {"empty", "new_empty", "empty_like", "detach", "alias"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        views = any(a.alias_info is not None and not a.alias_info.is_write
                    for a in func._schema.arguments)  # fmt: skip
        if name not in self.quiet and not views:
            self.launches[str(func)] += 1
        return func(*args, **(kwargs or {}))


THRESHOLDS = Thresholds(router=0.4, top_probability=0.001, confidence=0.45, prefilter=0.45)


def gate_on(device: str) -> ExitGate:
    """A gate with all that one may have."""
    hidden = 32
    model = tiny_model("llama").to(device)
    head = ExitHead("affine", hidden).to(device)
    vocabulary = None if device == "meta" else torch.arange(0, 97, 2, device=device)
    readout = Readout(model.model.norm, model.lm_head, model.config, vocabulary)
    candidates = CandidateReadout(readout, torch.tensor([2, 4, 8, 16, 32]))
    return ExitGate(
        head, readout, THRESHOLDS, TokenRouter(hidden, 8), ConfidenceModel(),
        Prefilter(ConfidenceModel(("candidates",)), candidates),
    ).to(device)  # fmt: skip


@torch.no_grad()
def test_a_gate_is_four_launches_and_the_host_does_not_wait(monkeypatch: Any) -> None:
    """On the meta device, reading a number on the host raises: there is none."""
    monkeypatch.setattr(dispatch, "choose", lambda *on: ("triton", "pretended"))
    monkeypatch.setattr(Readout, "linear_head", lambda self: (self.head.weight, None))
    gate = gate_on("meta")
    states, notes = torch.empty(3, 32, device="meta"), torch.ones(3, 5, device="meta").long()
    with pytest.raises(RuntimeError, match="meta"):
        states.sum().item()
    # Before: torch alone. What `top_token` does inside counts too.
    monkeypatch.setattr("tide.exits.heads.top_token", reference.top_token)
    with Counted() as before:
        gate.decide(states, notes).pack()
    # After: operators, and what each of them launches.
    monkeypatch.setattr("tide.exits.heads.known_norm", lambda norm: reference_norm(norm))
    gate.fuse()
    assert gate.fused is not None
    with Counted() as after:
        gate(states, notes)
    assert all(name.startswith("tide.") for name in after.launches), after.launches
    assert sum(after.launches.values()) == 3
    # The same with the operators replaced by what they launch.
    for name in ("score_exits", "exit_transform", "confirm_exits"):
        monkeypatch.setattr(f"tide.exits.fused.{name}", getattr(fused, name))
    with Counted() as inside, recorded(run=False) as launches:
        gate(states, notes)
    assert not inside.launches
    assert [launch.name for launch in launches] == [
        "affine", "score_exits", "top_parts", "confirm_exits"
    ]  # fmt: skip
    assert sum(before.launches.values()) >= 60, before.launches
    print(f"before: {sum(before.launches.values())} launches, after: {len(launches)}")


def reference_norm(norm: Any) -> Any:
    from tide.kernels.arguments import Norm

    return Norm("rms", norm.weight, None, norm.variance_epsilon)


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["affine", "identity"])
def test_a_fused_gate_decides_as_the_gate_does(strategy: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("TIDE_KERNELS", "triton")
    torch.manual_seed(0)
    gate = gate_on(DEVICE)
    gate.head = ExitHead(strategy, 32).to(DEVICE)
    for parameter in gate.head.parameters():
        parameter.normal_(0, 0.1)
    for model in (gate.confidence_model, gate.prefilter.model):
        model.mean.normal_()
        model.spread.uniform_(0.5, 2)
    states = torch.randn(40, 32, device=DEVICE)
    notes = torch.randint(-1, 97, (40, 5), device=DEVICE)
    notes[:, 0], notes[:, 2] = notes[:, 0] > 10, notes[:, 2] % 4
    wanted = notes[:, 0] != 0
    for part in ("router", "prefilter"):  # each rejects some that the other does not
        gate.thresholds = replace(gate.thresholds, **{part: None})
        alone = gate.decide(states, notes).exits.sum()
        gate.thresholds = THRESHOLDS
        assert gate.decide(states, notes).exits.sum() < alone < wanted.sum()
    expected = gate.decide(states, notes).pack()
    gate.fuse()
    assert gate.fused is not None
    got = gate(states, notes)
    torch.testing.assert_close(got[:, 0], expected[:, 0])
    passed = expected[:, 0] != 0
    assert 0 < passed.sum() < wanted.sum()
    torch.testing.assert_close(got[passed], expected[passed], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[wanted, 2], expected[wanted, 2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norm_of_every_family_is_known(family: str) -> None:
    from tide.models.locate import locate

    norm = locate(tiny_model(family)).norm
    found = known_norm(norm)
    assert found is not None
    states = torch.randn(3, 32)
    torch.testing.assert_close(normed(states, found), norm(states))
    norm.register_forward_hook(lambda *of: None)
    assert known_norm(norm) is None


def test_an_unknown_norm_is_called() -> None:
    class Other(torch.nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.1

    assert known_norm(Other(32, eps=1e-6)) is None


def test_operators_are_those_of_the_reference() -> None:
    from tide.kernels.cases import OPERATIONS

    for module in (operators, reference, fused):
        assert all(callable(getattr(module, name)) for name in OPERATIONS)
