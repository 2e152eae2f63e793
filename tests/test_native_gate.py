"""The gate as one operation on a CPU: it decides as the gate of torch's operations does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
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
    dtype: torch.dtype = torch.float32,
) -> ExitGate:  # fmt: skip
    torch.manual_seed(0)
    config: Any = SimpleNamespace(vocab_size=VOCABULARY)
    if scales:
        config.final_logit_softcapping, config.logit_scale = 3.0, 0.5
    norms: dict[str, Any] = {"rms": LlamaRMSNorm, "gemma": Gemma3RMSNorm, "layer": nn.LayerNorm}
    normed = norms[norm](HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    # Halved, as heads are fitted: bfloat16 has all of it.
    rounded = torch.bfloat16 if halved else dtype
    head.to(rounded).to(dtype)
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
    for module in (normed, gate.head):
        module.to(rounded).to(dtype)
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
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"norm": "layer"}, {"norm": "gemma"}, {"strategy": "identity"}, {"reduced": False},
        {"bias": True}, {"scales": True}, {"thresholds": replace(ALL, prefilter=None)},
        {"thresholds": Thresholds(top_probability=0.028)},
    ],
    ids=str,
)  # fmt: skip
def test_a_half_precision_gate_decides_as_one_of_equal_weights(changes: dict[str, Any]) -> None:
    """Its weights and states are bfloat16; of few tokens it rounds nothing else to that."""
    exits = 0
    for count, tolerance in ((1, 1e-4), (5, 1e-4), (20, 1e-4), (40, 2e-2)):
        states, notes = tokens(count)
        states = states.bfloat16()
        expected = make_gate(halved=True, **changes).decide(states.float(), notes).pack()
        gate = make_gate(halved=True, dtype=torch.bfloat16, **changes)
        gate.fuse(compiled=True)
        assert gate.fused is not None and gate.fused.native and gate.fused.takes(states)
        got = gate(states, notes)
        assert got.dtype is torch.float32
        differ = got[:, 0] != expected[:, 0]
        passed = (got * expected)[:, 0] != 0
        differ[passed] = got[passed, 1] != expected[passed, 1]
        assert differ.sum() <= (0 if count <= 20 else 2)  # near-ties
        passed &= ~differ
        torch.testing.assert_close(
            got[passed, 2], expected[passed, 2], atol=tolerance, rtol=tolerance, equal_nan=True
        )
        exits += int(passed.sum())
    assert 0 < exits < 66


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_has_it_as_one_operation(dtype: torch.dtype) -> None:
    gate = make_gate(halved=True, dtype=dtype)
    states, notes = tokens(6)
    states = states.to(dtype)
    exact = make_gate(halved=True)
    expected = exact.decide(states.float(), notes).pack()
    gate.fuse(compiled=True)
    seen: dict[Any, torch.dtype] = {}

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and "example_value" in node.meta:
                seen[getattr(node.target, "overloadpacket", node.target)] = node.meta[
                    "example_value"
                ].dtype
        return graph

    got = torch.compile(lambda *of: gate(*of), backend=backend, fullgraph=True)(states, notes)
    assert seen[torch.ops.tide.decide_exits] is got.dtype is torch.float32
    torch.testing.assert_close(got[:, 0], expected[:, 0])
    torch._dynamo.reset()


@torch.no_grad()
def test_graphs_that_differ_in_thresholds_alone_are_the_same_code() -> None:
    codes: list[str] = []
    exits: list[int] = []
    stricter: tuple[dict[str, float], ...] = (
        {}, {"router": 0.5}, {"prefilter": 0.5}, {"confidence": 0.5}
    )  # fmt: skip

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        assert all(node.op != "get_attr" for node in graph.graph.nodes)  # no constant is in it
        codes.append(graph.code)
        return graph

    for changes in stricter:
        gate = make_gate(replace(ALL, top_probability=0.02, **changes))
        expected = gate.decide(*tokens(40)).pack()
        gate.fuse(compiled=True)
        compiled = torch.compile(lambda *of, g=gate: g(*of), backend=backend, fullgraph=True)
        got = compiled(*tokens(40))
        torch._dynamo.reset()
        assert got[:, 0].equal(expected[:, 0])
        exits.append(int(got[:, 0].sum()))
    assert len(codes) == 4 and len(set(codes)) == 1
    assert max(exits[1:]) < exits[0] and len(set(exits)) > 2


@torch.no_grad()
def test_thresholds_are_not_rounded_to_the_default_dtype() -> None:
    """Which is the model's own where vLLM loads weights."""
    fine = Thresholds(router=0.98192, prefilter=0.93506, confidence=0.99346, top_probability=0.9985)
    gate = make_gate(fine)
    torch.set_default_dtype(torch.bfloat16)
    try:
        gate.fuse(compiled=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert gate.fused is not None
    packed = gate.fused._weights[-4:]
    assert packed.tolist() == pytest.approx([0.98192, 0.93506, 0.99346, 0.9985], abs=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("column", [1, 2])  # the tokens, the scores
def test_an_operator_that_decides_otherwise_is_not_used(
    dtype: torch.dtype, column: int, monkeypatch: Any, caplog: Any
) -> None:
    gate = make_gate(dtype=dtype)
    gate.fuse(compiled=True)
    assert gate.fused is not None
    right, error = FusedGate.__call__, torch.zeros(3)
    error[column] = 1.0 if column == 1 else 0.01
    monkeypatch.setattr(FusedGate, "__call__", lambda self, *of: right(self, *of) + error)
    gate.fuse(compiled=True)
    assert gate.fused is None and "decides otherwise" in caplog.text


@torch.no_grad()
def test_the_head_is_timed_as_it_is_read(monkeypatch: Any) -> None:
    gate = make_gate(dtype=torch.bfloat16)
    gate.fuse(compiled=True)
    counted: list[int] = []
    right = FusedGate.__call__

    def count(self: FusedGate, states: Tensor, notes: Tensor) -> Tensor:
        decided = right(self, states, notes)
        assert decided[:, 0].all()  # none is rejected before the head
        counted.append(len(states))
        return decided

    monkeypatch.setattr(FusedGate, "__call__", count)
    read = gate.head_timer()
    assert read is not None
    read(3)
    assert counted == [3]
