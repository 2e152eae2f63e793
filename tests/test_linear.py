"""Linear maps of few tokens: equal to torch's own, and only where they are faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear as reference

from tide.kernels import linear as ours
from tide.kernels import native
from tide.models.compiled import CompiledRunner
from tiny import tiny_model


@pytest.fixture
def anew(monkeypatch: Any) -> Iterator[None]:
    """Nothing was built yet, in this process."""
    monkeypatch.setattr(ours, "_built", [])
    monkeypatch.delenv("TIDE_KERNELS", raising=False)
    ours.operator.cache_clear()
    yield
    ours.operator.cache_clear()


@pytest.fixture
def built(anew: None, monkeypatch: Any) -> Any:
    """The operator, whether it is faster here or not."""
    monkeypatch.setattr(ours, "_is_faster", lambda own: True)
    found = ours.operator()
    assert found is not None
    return found


@pytest.fixture
def graphs(monkeypatch: Any) -> list[torch.fx.GraphModule]:
    """Those that Inductor would be given; it is given none."""
    found: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx",
        lambda graph, *_, **__: found.append(graph) or graph,
    )
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@torch.no_grad()
def test_it_equals_that_of_torch(built: Any) -> None:
    torch.manual_seed(0)
    for inputs, outputs in ((16, 4), (19, 18), (1, 1), (896, 333)):  # the last is split
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
        for tokens in (*range(15), 20, 40):
            x = torch.randn(2, tokens, inputs)
            for of in (x, x[:1], x[0], x.transpose(0, 1)):
                for added in (None, bias):
                    expected = reference(of, weight, added)
                    torch.testing.assert_close(
                        built(of, weight, added), expected, atol=1e-4, rtol=1e-4
                    )
                    assert ours.linear(of, weight, added).shape == expected.shape
    x, weight = torch.randn(5, 16, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    assert torch.equal(ours.linear(x, weight), reference(x, weight))


@torch.no_grad()
def test_what_torch_refuses_is_refused(built: Any) -> None:
    x = torch.randn(5, 16)
    assert torch.equal(built(x, torch.ones(3, 16), torch.ones(1)), built(x, torch.ones(3, 16)) + 1)
    assert torch.allclose(built(x, torch.ones(16, 3).T), reference(x, torch.ones(3, 16)))
    assert built(x[:, :0], torch.ones(3, 0)).tolist() == [[0.0] * 3] * 5
    for weight, bias in ((torch.ones(3, 15), None), (torch.ones(3, 16), torch.ones(2))):
        with pytest.raises(RuntimeError):
            built(x, weight, bias)


@torch.no_grad()
def test_few_tokens_are_multiplied_by_our_own(built: Any) -> None:
    """Those of 4 to 20 tokens have other last bits than torch's; fewer and more have the same."""
    torch.manual_seed(0)
    weight = torch.randn(640, 700)
    same = {}
    for tokens in (1, 3, 4, 20, 21):
        x = torch.randn(tokens, 700)
        same[tokens] = torch.equal(built(x, weight), reference(x, weight))
    assert same == {1: True, 3: True, 4: False, 20: False, 21: True}


@pytest.mark.usefixtures("built")
def test_graphs_of_several_tokens_have_it(graphs: list[torch.fx.GraphModule]) -> None:
    """One linear map of the graph for each of the model, and none by torch."""
    model = tiny_model("llama")
    runner = CompiledRunner(model)
    for _ in runner.prepare([((0, 6), lambda states, notes: notes[..., 0])], 1):
        pass
    one, several = ([node.target for node in graph.graph.nodes] for graph in graphs)
    assert torch.ops.tide.linear.default not in one and reference not in several
    maps = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
    assert several.count(torch.ops.tide.linear.default) == one.count(reference) == len(maps) > 0


@torch.no_grad()
def test_a_graph_with_it_gives_the_same_for_any_number_of_tokens(built: Any) -> None:
    torch.manual_seed(0)
    module = nn.Linear(24, 40)
    backend = ours.backend_of(torch.device("cpu"), torch.float32, 5)
    compiled = torch.compile(lambda x: module(x) * 2, backend=backend, dynamic=True)
    for tokens in (5, 3, 9, 21):
        x = torch.randn(2, tokens, 24)
        expected = 2 * built(x, module.weight, module.bias)
        torch.testing.assert_close(compiled(x), expected, atol=0, rtol=0)


@pytest.mark.usefixtures("built")
def test_under_autocast_graphs_have_that_of_torch(graphs: list[torch.fx.GraphModule]) -> None:
    backend = ours.backend_of(torch.device("cpu"), torch.float32, 5)
    with torch.autocast("cpu"), torch.no_grad():
        torch.compile(nn.Linear(8, 8), backend=backend)(torch.ones(5, 8))
    assert reference in [node.target for node in graphs[0].graph.nodes]


def test_it_is_timed_against_that_of_torch(monkeypatch: Any) -> None:
    def slower(*args: Any) -> Any:
        for _ in range(3):
            reference(*args)

    monkeypatch.setattr(ours, "_SIZE", 512)
    assert not ours._is_faster(slower)


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_torch_does_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(native, "load", lambda: False)
    assert ours.operator() is None
    assert ours.backend_of(torch.device("cpu"), torch.float32, 5) == "inductor"
    x, weight = torch.randn(5, 16), torch.randn(3, 16)
    assert torch.equal(ours.linear(x, weight), reference(x, weight))


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_fails_costs_speed_only(monkeypatch: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(native, "_load", native._load.__wrapped__)  # nothing is registered yet
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load_async", fails)
    assert not native.load() and ours.operator() is None
    assert not native.decides_exits(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("anew")
def test_where_it_is_slower_torch_does_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(ours, "_is_faster", lambda own: False)
    assert ours.operator() is None and not ours._built


@pytest.mark.usefixtures("anew")
def test_reference_kernels_are_those_of_torch(monkeypatch: Any) -> None:
    monkeypatch.setenv("TIDE_KERNELS", "reference")
    assert ours.operator() is None


def test_other_dtypes_and_devices_and_single_tokens_are_left_to_torch(built: Any) -> None:
    cpu = torch.device("cpu")
    assert ours.backend_of(cpu, torch.float32, 5) != "inductor"
    assert ours.backend_of(cpu, torch.float32, 1) == "inductor"
    assert ours.backend_of(cpu, torch.bfloat16, 5) == "inductor"
    assert ours.backend_of(torch.device("cuda"), torch.float32, 5) == "inductor"
    with torch.autocast("cpu"):
        assert ours.backend_of(cpu, torch.float32, 5) == "inductor"
