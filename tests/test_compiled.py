"""Compiled segments: equal to the reference, one graph for every shape, and few waits of the host.

Tiny models; compiling takes some seconds for each family.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scenarios import SCENARIOS, cuts, error, full_depth
from test_generate import GREEDY, POLICIES, artifact, engine, prompts
from tide.config import TIDEConfig
from tide.decode.loop import DecodeLoop
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.confidence import ConfidenceModel
from tide.exits.gate import ExitGate
from tide.exits.heads import SuccessorHead
from tide.exits.policy import ScriptedPolicy
from tide.exits.routers import TokenRouter
from tide.exits.thresholds import Thresholds
from tide.models import model_state
from tide.models.attach import attach
from tide.models.compiled import CompiledRunner, CompiledStage, CompileWarning, make_pass
from tide.models.fixed import FixedCache, bucket
from tide.models.model_state import state_of
from tide.models.segments import SegmentRunner
from tide.models.tokens import TokenBatch
from tiny import FAMILIES, VOCABULARY, tiny_model

# Inductor takes seconds for each graph, so CI has it for one family, and for the others the same
# graphs as they are traced. TIDE_TEST_INDUCTOR=1 has it for all.
INDUCTOR = list(FAMILIES) if os.environ.get("TIDE_TEST_INDUCTOR") else ["llama"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def random_ids(sequences: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (sequences, tokens), generator=generator)


def no_more(states: Tensor, notes: Tensor) -> Tensor:
    return notes[..., 0]


def prepared(model: Any, *, one: bool, tokens: tuple[bool, ...]) -> CompiledRunner:
    """A runner that is compiled for one sequence or several, and for one new token or several."""
    runner = CompiledRunner(model)
    stages = [(layers, no_more) for layers in cuts(runner)]
    for token in tokens:
        runner._stages[one, token] = list(runner._compile(stages, one, token))
    return runner


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_segments_equal_the_full_forward(
    family: str, monkeypatch: Any, request: Any
) -> None:
    fused = family in INDUCTOR
    if not fused:
        request.getfixturevalue("traced")
    model = tiny_model(family)
    runner = prepared(model, one=False, tokens=(True, False) if fused else (False,))
    uncompiled: list[int] = []
    forward = SegmentRunner._forward

    def counted(self: Any, hidden: Any, chunk: Any, cache: Any) -> Tensor:
        uncompiled.append(chunk.places.packed.shape[1])
        return forward(self, hidden, chunk, cache)

    monkeypatch.setattr(SegmentRunner, "_forward", counted)
    for name, scenario in SCENARIOS.items():
        uncompiled.clear()
        for ids, got in scenario(runner, random_ids(2, 12)):
            assert error(got, full_depth(model, runner, ids)[-len(got) :]) <= 1e-5, name
        some = [tokens for tokens in uncompiled if fused or tokens > 1]
        assert len(some) == len(cuts(runner)), name  # the prompts only


@pytest.mark.usefixtures("traced")
def test_every_mode_gives_the_same_tokens_and_nothing_is_compiled_in_200_steps() -> None:
    """Mixed chunk lengths, exits, rollbacks, sequences that end, buffers that grow."""
    model = tiny_model("llama", max_position_embeddings=1024)
    kwargs = {**prompts(4), **GREEDY, "max_new_tokens": 120, "eos_token_id": [5, 40]}
    kwargs |= {"repetition_penalty": 1.05}
    for mode in ("off", "exit"):
        compiled = engine(model, mode, fixed_drafts=True, compile=True)
        assert compiled.runner.name == "compiled segments"
        first = {**kwargs, "max_new_tokens": 8}
        compiled.generate(**first)  # compiles
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert before > 0
        uncompiled = engine(model, mode, fixed_drafts=True)
        steps = 0
        for seed in range(3):
            ids = prompts(4)["input_ids"].roll(seed, dims=1)
            own = {**kwargs, "input_ids": ids}
            if seed == 1:
                own["eos_token_id"] = None
            assert torch.equal(compiled.generate(**own), uncompiled.generate(**own)), mode
            steps += compiled.last_stats.steps
        assert steps >= 200 or mode != "off"
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, mode
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.mark.usefixtures("traced")
def test_compiled_passes_take_draft_trees(monkeypatch: Any) -> None:
    """Of any size: windows of 5 tokens and full attention, one sequence and several."""
    model = tiny_model("gemma3_text")
    config = TIDEConfig(mode="lossless", max_tree=40)
    tide = TIDE(model, None, config, check=False, compile=True)
    tide.drafter.fixed = True
    uncompiled: list[bool] = []
    forward = SegmentRunner._forward

    def counted(self: Any, hidden: Any, chunk: Any, cache: Any) -> Tensor:
        uncompiled.append(chunk.tree)
        return forward(self, hidden, chunk, cache)

    for sequences in (4, 1):
        kwargs = {**prompts(sequences), **GREEDY, "max_new_tokens": 40, "eos_token_id": [5, 40]}
        expected = model.generate(**kwargs)
        assert torch.equal(tide.generate(**kwargs), expected)  # compiles
        with monkeypatch.context() as patch:
            patch.setattr(SegmentRunner, "_forward", counted)
            assert torch.equal(tide.generate(**kwargs), expected)
        assert tide.last_stats.accepted["tree"] > 5
    assert tide.runner.name == "compiled segments"
    assert uncompiled == [False, False]  # the prompts only


def gated() -> Artifact:
    """Exits with all that a gate may have: router, models, some of the vocabulary."""
    torch.manual_seed(0)
    made = artifact()
    made.vocabulary = torch.arange(0, VOCABULARY, 2)
    made.candidates = torch.arange(0, 12, 2)
    for checkpoint in made.checkpoints:
        checkpoint.router, checkpoint.confidence_model = TokenRouter(32, 8), ConfidenceModel()
        checkpoint.prefilter = ConfidenceModel(("candidates",))
        checkpoint.thresholds = Thresholds(router=0.45, confidence=0.45, prefilter=0.4)
    return made


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("mode", "sequences"), [("off", 1), ("lossless", 4), ("exit", 1), ("exit", 4)]
)
def test_graphs_decide_as_the_model_does(mode: str, sequences: int) -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(sequences), **GREEDY, "max_new_tokens": 60, "eos_token_id": [5, 40]}
    made = [
        TIDE(
            model, gated(), TIDEConfig(mode=mode, min_layers=0, exit_threshold=None),
            allow_mismatch=True, check=False, compile=compile,
        )
        for compile in (True, False)
    ]  # fmt: skip
    for tide in made:
        tide.drafter.fixed = True
    compiled, uncompiled = (tide.generate(**kwargs) for tide in made)
    assert made[0].runner.name == "compiled segments"
    assert torch.equal(compiled, uncompiled)
    stats = [tide.last_stats for tide in made]
    assert stats[0].exits_per_layer == stats[1].exits_per_layer
    assert (stats[0].exited_tokens > 0) == (mode == "exit")
    if mode != "exit":
        assert torch.equal(compiled, model.generate(**kwargs))


@pytest.mark.usefixtures("traced")
def test_a_gate_that_decides_otherwise_when_compiled_is_not_used(monkeypatch: Any) -> None:
    def wrong(self: ExitGate, states: Tensor, notes: Tensor) -> Tensor:
        packed = forward(self, states, notes)
        return 1 - packed if torch.compiler.is_compiling() else packed

    forward = ExitGate.forward
    monkeypatch.setattr(ExitGate, "forward", wrong)
    config = TIDEConfig(min_layers=0, exit_threshold=None)
    tide = TIDE(tiny_model("llama"), gated(), config, allow_mismatch=True, compile=True)
    with pytest.warns(CompileWarning, match="tokens differ"):
        tide.generate(**prompts(1), **GREEDY)
    assert tide.runner.name == "segments"


@pytest.mark.usefixtures("traced")
def test_a_head_that_decides_otherwise_when_compiled_is_not_used(monkeypatch: Any) -> None:
    def wrong(self: SuccessorHead, states: Tensor, notes: Tensor) -> Tensor:
        tokens = forward(self, states, notes)
        return tokens + 1 if torch.compiler.is_compiling() else tokens

    forward = SuccessorHead.forward
    monkeypatch.setattr(SuccessorHead, "forward", wrong)
    model = tiny_model("llama")
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    tide = TIDE(model, compile=True)
    with pytest.warns(CompileWarning, match="tokens differ"):
        assert torch.equal(tide.generate(**kwargs), model.generate(**kwargs))
    assert tide.runner.name == "segments"


@pytest.mark.usefixtures("traced")
def test_what_follows_a_segment_is_what_it_was_compiled_with() -> None:
    """Other gates or another head, as mode "auto" may take at start, are compiled anew."""
    runner = CompiledRunner(tiny_model("llama"))
    layers = [(0, runner.n_layers)]
    one = [(lo_hi, no_more) for lo_hi in layers]
    other = [(lo_hi, lambda states, notes: notes[..., 0]) for lo_hi in layers]
    assert list(runner.prepare(one, 1)) and not list(runner.prepare(one, 1))
    assert list(runner.prepare(other, 1))
    assert {stage.then for some in runner._stages.values() for stage in some} == {other[0][1]}


@pytest.mark.usefixtures("traced")
def test_hooks_are_those_of_the_call(monkeypatch: Any) -> None:
    """Added after compiling, to a layer and to the head, they count in the next call."""
    model = tiny_model("llama")
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    tide = TIDE(model, compile=True)
    before = tide.generate(**kwargs)
    handles = [
        model.model.layers[2].register_forward_hook(lambda _, args, out: out * 1.5),
        model.lm_head.register_forward_hook(lambda _, args, out: out.roll(1, -1)),
    ]
    expected = model.generate(**kwargs)
    assert torch.equal(tide.generate(**kwargs), expected) and not torch.equal(before, expected)
    for handle in handles:
        handle.remove()
    assert torch.equal(tide.generate(**kwargs), before)


def change_weight(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight.data.mul_(1.5)


def convert(model: Any) -> None:
    model.to(torch.bfloat16)


def patch_forward(model: Any) -> None:
    layer = model.model.layers[2].mlp
    forward = layer.forward
    layer.forward = lambda *args: 1.5 * forward(*args)


def change_setting(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 500.0


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.roll(1, 0), requires_grad=False)


def convert_buffer(model: Any) -> None:
    model.model.rotary_emb.bfloat16()


def change_config(model: Any) -> None:
    model.config.sliding_window = 2


@torch.no_grad()
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("change", [change_weight, patch_forward, change_setting, untie])
def test_the_model_is_that_of_the_call(change: Any) -> None:
    """No graph checks its modules before each run, so a call looks whether they have changed."""
    model = tiny_model("llama", tie_word_embeddings=True)
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    tide = TIDE(model, compile=True)
    before = tide.generate(**kwargs)
    change(model)
    expected = model.generate(**kwargs)
    assert torch.equal(tide.generate(**kwargs), expected) and not torch.equal(before, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "change", [convert, patch_forward, change_setting, untie, convert_buffer, change_config]
)
def test_a_changed_model_has_another_state(change: Any) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = state_of(model)
    assert state_of(model) == before
    change(model)
    assert state_of(model) != before


@torch.no_grad()
@pytest.mark.usefixtures("traced")
def test_other_calls_of_the_model_compile_nothing_anew() -> None:
    """`generate` notes the length of a static cache on the model; other engines run in turn."""
    model = tiny_model("llama")
    tide, other = TIDE(model, compile=True), TIDE(model)
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    compiled: list[Any] = []
    for new in (4, 6, 8):
        tide.generate(**kwargs | {"max_new_tokens": new})
        compiled.append([*tide.runner._stages.values()])
        other.generate(**kwargs)
        model.generate(**kwargs | {"max_new_tokens": new}, cache_implementation="static")
    assert compiled[0] and all(stages == compiled[0] for stages in compiled)


@pytest.mark.usefixtures("traced")
def test_every_stage_has_no_guards_on_modules(monkeypatch: Any) -> None:
    """`torch.compile` takes the filter out of the options that it is given."""
    seen: list[set[str]] = []
    keep = model_state._checks_to_keep

    def noted(found: Any) -> list[bool]:
        kept = keep(found)
        seen.append({g.name.split("[")[0] for g, wanted in zip(found, kept, strict=True) if wanted})
        return kept

    monkeypatch.setattr(model_state, "_checks_to_keep", noted)
    runner = CompiledRunner(tiny_model("llama"))
    assert list(runner.prepare([((0, 2), no_more), ((2, 6), no_more)], 1))
    assert len(seen) == 4  # for one token and for several
    assert all(kept <= {"", "packed", "hidden", "keys", "values"} for kept in seen)


@torch.no_grad()
@pytest.mark.usefixtures("traced")
def test_a_model_that_changes_from_call_to_call_runs_uncompiled() -> None:
    model = tiny_model("llama")
    runner = CompiledRunner(model)
    stages = [((0, 6), no_more)]
    for turn in range(4):
        assert list(runner.prepare(stages, 1))
        model.config.changed = turn
    with pytest.warns(CompileWarning, match="changes from call to call"):
        assert not list(runner.prepare(stages, 1))


@pytest.mark.usefixtures("traced")
def test_inference_mode_compiles_nothing_and_autocast_is_noticed() -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    tide = TIDE(model, compile=True)
    expected = tide.generate(**kwargs)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        assert torch.equal(tide.generate(**kwargs), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(CompileWarning, match="autocast"):
        tide.generate(**kwargs)
    assert tide.runner.name == "segments"
    assert torch.equal(tide.generate(**kwargs), expected)


@pytest.mark.usefixtures("traced")
def test_every_layer_has_the_room_that_a_pass_needs() -> None:
    """Exits in the prompt let the first layers grow before the others."""
    model = tiny_model("llama", max_position_embeddings=1024)
    script = ScriptedPolicy(lambda at, checkpoint: at.position < 120)
    made = [
        TIDE(
            model, artifact(),
            TIDEConfig(mode="exit", min_layers=0, kv_cache_strategy="propagate", prefill_exit=True),
            policy=script, allow_mismatch=True, check=False, compile=compile,
        )
        for compile in (True, False)
    ]  # fmt: skip
    kwargs = {**GREEDY, "max_new_tokens": 8, "eos_token_id": None}
    outputs = [tide.generate(random_ids(1, 130), **kwargs) for tide in made]
    assert torch.equal(*outputs)


class Waits(TorchDispatchMode):
    """Counts where the host would wait for a device, and what is sent to it."""

    waiting = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.waiting:
            self.counts[str(func)] += 1
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            self.counts["boolean mask"] += len(masks)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("mode", "sequences", "compiled"),
    [(mode, n, False) for mode in ("exit", "lossless") for n in (1, 8)]
    + [("exit", 8, True), ("lossless", 1, True)],
)
def test_the_host_waits_once_for_each_segment_run(
    mode: str, sequences: int, compiled: bool, monkeypatch: Any
) -> None:
    """With three checkpoints: one small copy for each segment run, and one upload."""
    model = tiny_model("llama")
    made = artifact()
    made.checkpoints.append(type(made.checkpoints[0])(4, made.checkpoints[0].head))
    if mode == "lossless":
        made = None
    tide = TIDE(
        model, made, TIDEConfig(mode=mode, min_layers=0, drafts=("context",)),
        policy=None if made is None else ScriptedPolicy(POLICIES["random"][0]),
        allow_mismatch=True, compile=compiled,
    )  # fmt: skip
    tide.drafter.fixed = True
    ids = torch.arange(10, 14).repeat(sequences, 3)  # repeats, so drafts are accepted
    kwargs = {**GREEDY, "max_new_tokens": 40, "eos_token_id": None}
    tide.generate(ids, **kwargs)
    waits, counts = Waits(), Counter[str]()
    step, to_list, run_then = DecodeLoop.step, Tensor.tolist, type(tide.runner).run_then
    from tide.models import chunk as chunks

    upload = chunks.upload

    def counted(self: DecodeLoop) -> None:
        before = sum(waits.counts.values()) + counts["lists"], counts["runs"], counts["uploads"]
        with waits:
            counts["counting"] = 1
            step(self)
            counts["counting"] = 0
        after = sum(waits.counts.values()) + counts["lists"], counts["runs"], counts["uploads"]
        found, runs, uploads = (b - a for a, b in zip(before, after, strict=True))
        assert found <= runs + 1, waits.counts
        assert uploads == runs
        counts["steps"] += 1

    def listed(tensor: Tensor) -> Any:
        counts["lists"] += counts["counting"]
        return to_list(tensor)

    def ran(self: Any, *args: Any, **options: Any) -> Any:
        counts["runs"] += 1
        return run_then(self, *args, **options)

    def uploaded(*args: Any) -> Tensor:
        counts["uploads"] += 1
        return upload(*args)

    run_stage = CompiledStage.run

    def unwatched(self: CompiledStage, *args: Any) -> Any:
        with _disable_current_modes():  # a graph cannot run under a mode; what is in it, see below
            return run_stage(self, *args)

    monkeypatch.setattr(CompiledStage, "run", unwatched)
    monkeypatch.setattr(DecodeLoop, "step", counted)
    monkeypatch.setattr(Tensor, "tolist", listed)
    monkeypatch.setattr(type(tide.runner), "run_then", ran)
    monkeypatch.setattr(chunks, "upload", uploaded)
    tide.generate(ids, **kwargs)
    assert counts["steps"] > 5
    assert not waits.counts["boolean mask"]


def test_nothing_in_a_graph_forbids_cuda_graphs() -> None:
    model = tiny_model("llama")
    tide = TIDE(model, artifact(), TIDEConfig(min_layers=0), allow_mismatch=True)
    runner = CompiledRunner(model)
    cache = runner.new_cache(3)
    runner.run(TokenBatch(random_ids(3, 6)), 0, runner.n_layers, cache=cache)
    hidden: Tensor | None = None
    for (lo, hi), then in tide._machinery.exits.stages(runner.n_layers):
        chunk = cache.open(TokenBatch(random_ids(3, 2)), (lo, hi))
        run = make_pass(runner._segment(lo, hi, False), lo, runner.config, model.dtype, then)
        found = torch._dynamo.explain(run)(chunk.places.packed, hidden, *cache.buffers(lo, hi))
        assert found.graph_break_count == 0, found.break_reasons
        assert found.graph_count == 1
        nodes = found.graphs[0].graph.nodes
        called = {getattr(node.target, "__name__", str(node.target)) for node in nodes}
        assert len(called) > 10
        assert not called & {"item", "nonzero", "tolist", "cpu", "masked_select"}
        cache.close(done=True)
        hidden = torch.zeros(3, 2, 32)


def test_a_failing_compiler_costs_speed_only(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(2), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)

    def no_compiler(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    tide = TIDE(model, compile=True)
    with pytest.warns(CompileWarning, match="no compiler found"):
        assert torch.equal(tide.generate(**kwargs), expected)


def test_a_graph_that_is_not_equal_is_not_used(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    kwargs = {**prompts(1), **GREEDY, "eos_token_id": None}
    expected = model.generate(**kwargs)
    compile_ = torch.compile

    def wrong(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            states, result = compile_(function, backend="eager")(*args)
            return states + 1.0, result

        return run

    monkeypatch.setattr(torch, "compile", wrong)
    tide = TIDE(model, compile=True)
    with pytest.warns(CompileWarning, match="differ from the uncompiled ones"):
        assert torch.equal(tide.generate(**kwargs), expected)


@pytest.mark.usefixtures("traced")
def test_a_changed_model_is_not_run_by_an_old_graph() -> None:
    model = tiny_model("llama")
    runner = prepared(model, one=True, tokens=(True,))
    chunk = runner.new_cache(1).open(TokenBatch(random_ids(1, 1)), (0, 2))
    cache = runner.new_cache(1)
    runner.run(TokenBatch(random_ids(1, 4)), 0, 6, cache=cache)
    assert runner._find(chunk, cache)
    other = tiny_model("llama", seed=3)
    model.model.layers[0] = other.model.layers[0]
    assert not runner._find(chunk, cache)


@pytest.mark.usefixtures("traced")
def test_nothing_need_follow_a_segment() -> None:
    runner = CompiledRunner(tiny_model("llama"))
    assert list(runner.prepare([((0, 2), lambda *_: None), ((2, 6), no_more)], 1))
    assert runner.name == "compiled segments"


def test_buffers_come_in_few_sizes() -> None:
    sizes = {bucket(slots) for slots in range(1, 5000)}
    assert sorted(sizes)[:5] == [128, 192, 256, 384, 512]
    assert len(sizes) == 12
    assert all(bucket(slots) >= slots for slots in range(1, 5000))


def test_a_runner_that_cannot_be_compiled_says_so() -> None:
    model = tiny_model("llama")
    model.model.forward = model.model.forward  # as accelerate's hooks do
    with pytest.warns(CompileWarning, match="cannot be cut into segments"):
        assert attach(model, compile=True).name == "shims"
    del model.model.forward
    cache = attach(model, compile=True).new_cache(2)
    assert isinstance(cache, FixedCache)
