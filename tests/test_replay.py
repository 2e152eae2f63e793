"""The replay of the decode loop over recorded answers, and what is decided by it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tide.calibration.choose import Choice
from tide.calibration.replays import expected, fastest
from tide.calibration.table import build_table
from tide.config import TIDEConfig
from tide.decode.player import Setting
from tide.decode.replay import Expected, replay
from tide.engine import TIDE
from tide.exits.artifact import Artifact
from tide.exits.checkpoint import Checkpoint
from tide.exits.confidence import ConfidenceModel
from tide.exits.heads import ExitHead, SuccessorHead
from tide.exits.recording import Recording
from tide.exits.routers import TokenRouter
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.models.costs import LoopCosts, measure_loop
from tide.models.fingerprint import fingerprint
from tide.models.locate import locate
from tiny import tiny_model

SIZES = (1, 2, 4, 8, 16)
# A layer costs 1 for one token and a tenth more for each further one; the head 2, a gate 0.5.
COSTS = LoopCosts(
    1,
    {n: 4 * (1 + (n - 1) / 10) + 2 for n in SIZES},
    {n: 1 + (n - 1) / 10 for n in SIZES},
    dict.fromkeys(SIZES, 0.5),
    dict.fromkeys(SIZES, 0.25),
)
PROMPT, ANSWER = [1, 2, 3], list(range(10, 50))
EXIT = TIDEConfig(exit_threshold=None, drafts=(), min_layers=0)
HALF = Thresholds(prefilter=0.5, confidence=0.5)


def recorded(documents: int = 1, answer: list[int] = ANSWER) -> Recording:
    """Answers in which every second token may exit, at one of two checkpoints; one is wrong."""
    n = documents * len(answer)
    even = (np.arange(n) % 2 == 0).astype(np.float32)
    correct = np.ones((2, n), bool)
    correct[0, 2] = False
    scores = {"router": np.ones((2, n)), "prefilter": np.ones((2, n)), "confidence": None}
    scores["confidence"] = np.stack([even, even])
    return Recording(4, (0, 1), [PROMPT + answer] * documents, [3] * documents, scores, correct)  # type: ignore[arg-type]


def run(setting: Setting, made: Recording | None = None, *costs: LoopCosts) -> Expected:
    table = ContinuationTable(build_table([[7, 7]], 100))
    return replay(made or recorded(), setting, costs or [COSTS], table)


def test_full_depth_takes_one_pass_for_each_token() -> None:
    found = run(Setting(TIDEConfig(mode="off")))
    # The prompt gives the first token.
    assert (found.tokens, found.exit_rate) == (40, 0)
    assert found.seconds == pytest.approx(39 * 6)


def test_exits_take_the_passes_that_the_loop_runs() -> None:
    found = run(Setting(EXIT, (1,), (HALF,)))
    # Positions count from the last token of the prompt, which is at full depth. Of the 39 others,
    # those at even places exit: one pass to the gate each. The odd ones take the same pass, and
    # then one through the upper half together with the one that waits.
    to_gate, upper_two, upper_one = 0.5 + 2 + 0.25, 4 * 1.1 + 2 - 2 * 1.1, 4 + 2 - 2
    assert found.exit_rate == pytest.approx(19 / 40)
    assert found.seconds == pytest.approx(39 * to_gate + upper_one + 19 * upper_two)
    assert found.error_rate == 0
    # A gate that rejects a token by its candidates reads no head.
    made = recorded()
    made.scores["prefilter"] = made.scores["confidence"]
    unread = run(Setting(EXIT, (1,), (HALF,)), made)
    assert unread.seconds == pytest.approx(found.seconds - 20 * 0.25)
    assert run(Setting(EXIT, (0,), (HALF,))).error_rate == pytest.approx(1 / 40)


def test_drafts_are_the_loops_own() -> None:
    repeated = recorded(2, [5, 6, 7, 8] * 10)
    lossless = run(
        Setting(TIDEConfig(mode="lossless", drafts=("context",)), (1,), (HALF,)), repeated
    )
    off = run(Setting(TIDEConfig(mode="off")), repeated)
    assert lossless.tokens == off.tokens == 80 and lossless.tokens_per_step > 2
    assert lossless.seconds < 0.7 * off.seconds
    both = run(Setting(replace(EXIT, drafts=("context",)), (1,), (HALF,)), repeated)
    assert both.exit_rate > 0 and both.seconds < off.seconds
    # A table predicts what it was made from.
    table = ContinuationTable(build_table([ANSWER], 100))
    drafted = replay(
        recorded(), Setting(TIDEConfig(mode="lossless", drafts=("table",))), [COSTS], table
    )
    assert drafted.tokens_per_step > 2


def test_trees_are_the_loops_own() -> None:
    """A second answer with the same tokens, each the second likeliest after the one before it."""
    made = recorded(2)
    config = TIDEConfig(mode="lossless", drafts=("recycled",))
    assert run(Setting(config), made).tokens_per_step == pytest.approx(80 / 78)  # none recorded
    after = np.array(ANSWER * 2)
    made.successors = np.stack([after + 100, after], 1).astype(np.int32)
    costs = replace(COSTS, whole={**COSTS.whole, 33: COSTS.whole[16]})
    found = run(Setting(config), made, costs)
    assert found.tokens == 80 and found.tokens_per_step > 1.5
    chains = run(Setting(config.with_(max_tree=0)), made, costs)
    assert chains.tokens_per_step == pytest.approx(80 / 78)


def test_sequences_of_a_batch_share_their_passes() -> None:
    four = replace(COSTS, sequences=4)
    made = recorded(4)
    found = run(Setting(TIDEConfig(mode="off")), made, COSTS, four)
    assert found.seconds == pytest.approx(39 * 6) and found.tokens == 160
    # Of sizes between those measured, the time is between.
    dear = replace(four, whole={n: 2 * s for n, s in COSTS.whole.items()})
    made.tokens[0] = made.tokens[0][:-10]
    made.scores = {name: values[:, 10:] for name, values in made.scores.items()}
    made.correct = made.correct[:, 10:]
    mixed = run(Setting(TIDEConfig(mode="off")), made, COSTS, dear)
    assert mixed.seconds == pytest.approx(29 * 12 + 10 * 10)


def test_only_whole_batches_are_replayed() -> None:
    four = replace(COSTS, sequences=4)
    assert run(Setting(TIDEConfig(mode="off")), recorded(6), COSTS, four).tokens == 160
    assert run(Setting(TIDEConfig(mode="off")), recorded(3), COSTS, four).tokens == 120


def choice_of(layer: int) -> Choice:
    return Choice(
        layers=(layer,), thresholds=(HALF,), exit_rate=0.5, read_rate=0.5, error_rate=0.0,
        depth_saved=0.5, speedup=1.0,
    )  # fmt: skip


SERVED = pytest.mark.parametrize(
    "config",
    [
        TIDEConfig(kv_cache_strategy="zero_pad"),
        TIDEConfig(kv_cache_strategy="propagate", mode="exit"),
        EXIT,
        TIDEConfig(mode="lossless"),
        TIDEConfig(mode="off"),
    ],
    ids=["published", "propagate", "exit", "lossless", "off"],
)


@SERVED
def test_exits_are_chosen_alike_whatever_they_will_be_served_with(config: TIDEConfig) -> None:
    table = ContinuationTable(build_table([[7, 7]], 100))
    made = recorded(2)
    made.scores["confidence"][1] = 0.0  # no token exits at the deeper one
    options = [choice_of(1), choice_of(0)]
    config = config.with_(drafts=())
    assert fastest(options, made, [COSTS], table, config) == choice_of(0)
    assert fastest(options[::-1], made, [COSTS], table, config) == choice_of(0)


@SERVED
def test_ways_are_compared_whatever_they_will_be_served_with(config: TIDEConfig) -> None:
    table = ContinuationTable(build_table([[7, 7]], 100))
    choice = choice_of(1)
    found = expected(choice, recorded(2), [COSTS], table, config)
    assert found == expected(choice, recorded(2), [COSTS], table, EXIT.with_(drafts=config.drafts))
    assert found["1"].keys() == {"lossless", "exit", "both", "perfect"}


def test_a_perfect_gate_is_never_wrong_and_misses_no_exit() -> None:
    limit = run(Setting(EXIT, (0,), (HALF,), perfect=True))
    assert limit.exit_rate == pytest.approx(38 / 40)  # all but the first token and the wrong one
    assert limit.error_rate == 0 and limit.seconds < run(Setting(EXIT, (0,), (HALF,))).seconds


def test_a_recording_comes_back_from_its_tensors() -> None:
    made = recorded(3)
    made.successors = np.arange(240, dtype=np.int32).reshape(120, 2)
    back = Recording.of({name: t.clone() for name, t in made.tensors().items()})
    assert (back.tokens, back.prompts, back.layers) == (made.tokens, made.prompts, made.layers)
    assert np.array_equal(back.correct, made.correct) and back.scores.keys() == made.scores.keys()
    assert all(np.allclose(back.scores[name], made.scores[name]) for name in made.scores)
    assert back.successors is not None and np.array_equal(back.successors, made.successors)
    short = made.cut(7)
    assert short.tokens == [[*PROMPT, *ANSWER[:7]]] * 3 and short.correct.shape == (2, 21)
    assert short.successors is not None and short.successors[7].tolist() == [80, 81]
    assert run(Setting(TIDEConfig(mode="off")), short).tokens == 21
    assert made.cut(7, shortest=41).tokens == [] and made.cut(7, shortest=40).tokens == short.tokens
    few = made.first(45).only((1,))
    assert few.successors is not None and few.successors.tolist()[-1] == [78, 79]
    assert len(few.tokens) == 1 and few.correct.shape == (1, 40) and few.layers == (1,)
    assert torch.equal(few.tensors()["layers"], torch.tensor([4, 1]))


def engine(
    recording: Recording | None,
    *,
    kv: str = "deferred",
    drafts: tuple[str, ...] = ("context", "recycled"),
    **options: Any,
) -> TIDE:
    model = tiny_model("llama", num_hidden_layers=4)
    checkpoint = Checkpoint(1, ExitHead("identity", 32), TokenRouter(32, 8), HALF,
                            ConfidenceModel(), ConfidenceModel(("candidates",)))  # fmt: skip
    made = Artifact(
        fingerprint(model, locate(model)), 32, [checkpoint], candidates=torch.arange(9),
        recording=recording,
    )  # fmt: skip
    config = TIDEConfig(
        mode="auto", min_layers=0, exit_threshold=None, drafts=drafts, kv_cache_strategy=kv,
    )  # fmt: skip
    return TIDE(model, made, config, check=False, **options)


@pytest.mark.parametrize(("share", "way"), [(0.0, "lossless"), (1.0, "exit")])
def test_auto_takes_what_is_faster_by_the_recording(
    share: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tide.decode.plan.measure_loop", lambda *args, **_: COSTS)
    made = recorded(2)
    made.scores["confidence"][:] = share
    found = engine(made)
    assert found.config.mode == found.plan.config.mode == way
    expected = found.plan.expected
    assert expected.keys() == {"lossless", "exit", "both", "perfect"}
    if way == "lossless":
        best = max(expected["exit"], expected["both"])
        assert f"lossless: exits would give {best:.2f}x here, drafts alone " in str(found.plan)
        assert best < 1
    else:
        assert str(found.plan).startswith("exit") and expected["exit"] > 1.2
        assert f"here, drafts alone {expected['lossless']:.2f}x (expected" in str(found.plan)
    assert str(found.plan).endswith("(expected from the calibration prompts)")
    ids = torch.randint(3, 97, (1, 6))
    found.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert str(engine(made).plan) == str(found.plan)
    assert isinstance(
        found._machinery.exits.target_head, SuccessorHead
    )  # made before it was chosen


@pytest.mark.parametrize(
    ("batch", "ahead", "way"),
    [
        (2, 0.99, "lossless"), (2, 1.01, "lossless"), (2, 1.03, "exit"),
        # Of one sequence, what rejected nodes of a tree teach is not replayed.
        (1, 1.03, "lossless"), (1, 1.09, "lossless"), (1, 1.11, "exit"),
    ],
)  # fmt: skip
def test_auto_stays_lossless_where_exits_are_hardly_faster(
    batch: int, ahead: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tide.decode.plan.measure_loop", lambda *args, **_: COSTS)
    found = {"lossless": 1.5, "exit": 1.2, "both": 1.5 * ahead}
    monkeypatch.setattr("tide.decode.plan.speedups", lambda _: found)
    plan = engine(recorded(2), batch=batch).plan
    assert plan.config.mode == way
    assert ("too small a lead" in str(plan)) == (way == "lossless" and ahead > 1)


def test_a_small_lead_counts_where_nothing_is_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide.decode.plan.measure_loop", lambda *args, **_: COSTS)
    found = {"lossless": 1.5, "exit": 1.2, "both": 1.5 * 1.03}
    monkeypatch.setattr("tide.decode.plan.speedups", lambda _: found)
    assert engine(recorded(2), drafts=("context",)).plan.config.mode == "exit"


def test_auto_measures_this_device() -> None:
    found = engine(recorded(2), batch=2)
    assert found.config.mode in ("lossless", "exit") and len(found.plan.expected) == 4


@pytest.mark.usefixtures("timed_as_always")
def test_costs_are_told_apart_on_a_device_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tenth of its speed for each second: what is compared must be timed close together."""
    now = [0.0]

    def run_then(then: Any, tokens: Any, layers: tuple[int, int], **_: Any) -> tuple[None, None]:
        at_first = (layers[1] - layers[0]) * 0.002 + (0.01 if then is head else 0.001)
        now[0] += at_first * tokens.ids.shape[1] * (1 + now[0] / 10)
        return None, None

    head: Any = object()
    runner: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=97), n_layers=30, run_then=run_then,
        run=lambda *_, **__: None, uncounted=contextlib.nullcontext,
        new_cache=lambda _: SimpleNamespace(rollback=lambda _: None),
    )  # fmt: skip
    monkeypatch.setattr("tide.models.costs.time.perf_counter", lambda: now[0])
    stages: Any = [((0, 8), object()), ((8, 24), object()), ((24, 30), head)]
    found = measure_loop(runner, stages, None, trees=(9,))
    for n in (1, 4):
        assert found.layer[n] / found.whole[n] == pytest.approx(0.002 / 0.07, rel=0.05)
        assert found.start[n] / found.whole[n] == pytest.approx(0.001 / 0.07, abs=0.007)
    assert set(found.whole) == {1, 2, 3, 4, 6, 8, 9, 16}


def test_auto_says_what_it_cannot_compare() -> None:
    assert str(engine(None).plan).startswith("lossless: nothing is recorded")
    plan = str(engine(recorded(2), kv="propagate").plan)
    assert plan.startswith("lossless: exits with kv_cache_strategy='propagate' are not compared")
    alone = TIDE(tiny_model("llama"), None, TIDEConfig(mode="auto"), check=False)
    assert str(alone.plan).startswith("lossless: the artifact has no exit")
    assert str(TIDE(tiny_model("llama"), check=False).plan) == "lossless: as requested"
