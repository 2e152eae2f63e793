"""The gate as one operation on a CPU: it decides as the gate of torch's operations does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tide.exits.candidates import CandidateReadout, Prefilter
from tide.exits.confidence import ConfidenceModel
from tide.exits.fused import FusedGate
from tide.exits.gate import ExitGate
from tide.exits.heads import ExitHead, Readout
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.kernels.native import decides_exits

HIDDEN, VOCABULARY = 35, 97  # not whole vectors
ALL = Thresholds(router=0.35, prefilter=0.35, confidence=0.35)


@pytest.fixture(autouse=True)
def _built(monkeypatch: Any) -> None:
    monkeypatch.delenv("TIDE_KERNELS", raising=False)
    assert decides_exits(torch.device("cpu"), torch.float32)


def make_gate(
    thresholds: Thresholds = ALL, *, norm: str = "rms", strategy: str = "affine",
    reduced: bool = True, bias: bool = False, scales: bool = False, halved: bool = False,
) -> ExitGate:  # fmt: skip
    torch.manual_seed(0)
    config: Any = SimpleNamespace(vocab_size=VOCABULARY)
    if scales:
        config.final_logit_softcapping, config.logit_scale = 3.0, 0.5
    normed = LlamaRMSNorm(HIDDEN) if norm == "rms" else nn.LayerNorm(HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    some = torch.randperm(VOCABULARY)[:50].sort().values if reduced else None
    readout = Readout(normed, head, config, some)
    known = torch.arange(VOCABULARY) if some is None else some
    prefilter = Prefilter(ConfidenceModel(("candidates",)), CandidateReadout(readout, known[:12]))
    gate = ExitGate(
        ExitHead(strategy, HIDDEN), readout, thresholds, TokenRouter(HIDDEN, 8), ConfidenceModel(),
        prefilter,
    )  # fmt: skip
    for parameter in [*gate.parameters(), *normed.parameters()]:
        parameter.data.normal_(0, 0.3)
    gate.requires_grad_(False)
    if halved:  # as heads are fitted: bfloat16 has all of it
        for parameter in gate.head.parameters():
            parameter.copy_(parameter.bfloat16())
    for module in gate.modules():
        if isinstance(module, ConfidenceModel):
            module.mean.normal_()
            module.spread.uniform_(0.5, 2)
    return gate


def tokens(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = 3 * torch.randn(count, HIDDEN, generator=generator)
    notes = torch.randint(-1, VOCABULARY, (count, 5), generator=generator)
    notes[:, 0], notes[:, 2] = notes[:, 0] > 10, notes[:, 2] % 4
    notes[:, 4] = notes[:, 4].clamp_min(0)
    return states, notes


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"halved": True}, {"norm": "layer"}, {"strategy": "identity"}, {"reduced": False},
        {"bias": True}, {"scales": True}, {"thresholds": replace(ALL, router=None)},
        {"thresholds": replace(ALL, prefilter=None)},
        {"thresholds": Thresholds(router=0.36)}, {"thresholds": Thresholds(top_probability=0.028)},
        {"thresholds": replace(ALL, top_probability=0.028)},
    ],
    ids=str,
)  # fmt: skip
def test_it_decides_as_the_gate_does(changes: dict[str, Any]) -> None:
    gate = make_gate(**changes)
    exits = 0
    for count in (0, 1, 2, 5, 40):
        states, notes = tokens(count)
        expected = gate.decide(states, notes).pack()
        gate.fuse(compiled=True)
        assert gate.fused is not None and gate.fused.native
        got = gate(states, notes)
        assert got.shape == (count, 3)
        torch.testing.assert_close(got[:, 0], expected[:, 0])
        passed = expected[:, 0] != 0
        torch.testing.assert_close(
            got[passed], expected[passed], atol=1e-5, rtol=1e-4, equal_nan=True
        )
        exits += int(passed.sum())
        gate.fused = None
    assert 0 < exits < 48


@torch.no_grad()
def test_a_graph_has_it_as_one_operation() -> None:
    gate = make_gate()
    states, notes = tokens(6)
    expected = gate.decide(states, notes).pack()
    gate.fuse(compiled=True)
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    got = torch.compile(lambda *of: gate(*of), backend=backend, fullgraph=True)(states, notes)
    assert torch.ops.tide.decide_exits in [getattr(t, "overloadpacket", t) for t in seen]
    torch.testing.assert_close(got[:, 0], expected[:, 0])
    torch._dynamo.reset()


@torch.no_grad()
def test_torch_decides_where_it_cannot(monkeypatch: Any) -> None:
    gate = make_gate()
    gate.fuse()
    assert gate.fused is None  # nothing is compiled
    gate.fuse(compiled=True)
    states, _ = tokens(3)
    assert gate.fused is not None and gate.fused.takes(states)
    assert not gate.fused.takes(states.bfloat16())
    with torch.autocast("cpu"):
        assert not gate.fused.takes(states)
    gate.double().fuse(compiled=True)
    assert gate.fused is None
    monkeypatch.setenv("TIDE_KERNELS", "reference")
    other = make_gate()
    other.fuse(compiled=True)
    assert other.fused is None


@torch.no_grad()
def test_a_long_tail_of_unlikely_tokens_counts() -> None:
    """Of a large vocabulary, single precision loses what follows a likely token."""
    size, many = 16, 120_000
    torch.manual_seed(0)
    readout = Readout(
        nn.LayerNorm(size), nn.Linear(size, many, bias=True), SimpleNamespace(vocab_size=many)
    )
    readout.head.weight.data.normal_(0, 0.01)
    readout.head.bias.data.normal_(-16, 2.5)
    readout.head.bias.data[11] = 0.0
    gate = ExitGate(
        ExitHead("identity", size), readout, Thresholds(confidence=0.5), None, ConfidenceModel()
    )
    states, notes = torch.randn(2, size), torch.tensor([[1, -1, 0, -1, 0]] * 2)
    expected = gate.decide(states, notes).pack()
    gate.fuse(compiled=True)
    assert gate.fused is not None and gate.fused.native
    torch.testing.assert_close(gate(states, notes), expected, atol=1e-5, rtol=1e-5)


def test_an_operator_that_decides_otherwise_is_not_used(monkeypatch: Any) -> None:
    gate = make_gate()
    right = FusedGate.__call__
    monkeypatch.setattr(FusedGate, "__call__", lambda self, *of: right(self, *of) + 0.01)
    gate.fuse(compiled=True)
    assert gate.fused is None
