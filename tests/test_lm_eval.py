"""TIDE as a model of lm-evaluation-harness, on task files of our own and without the hub."""

from __future__ import annotations

import json
import math
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tide.cli import main
from tide.errors import CertificateError, ConfigError

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.xdist_group("smollm2")

QUESTIONS = [
    ("Count to ten: one, two, three,", ["four", "potato"]),
    ("The capital of France is", ["Paris", "Xylophon Quetzalcoatl"]),
    ("Water is made of hydrogen and", ["oxygen", "sandpaper sandpaper"]),
    ("Say the alphabet: a, b, c, d, e,", ["f", "q q q"]),
    ("Dogs bark, and cats", ["meow", "bark bark"]),
    ("Snow is white, grass is", ["green", "a thing that nobody has ever seen in the open"]),
]
TASKS = {
    "told": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: [".", "\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "chosen": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: 0
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "read": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}} {{choices[1]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    rows = [{"text": text, "choices": choices} for text, choices in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, yaml in TASKS.items():
        where = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{where}{yaml}")
    return folder


class Runs:
    """Runs of the harness on one model in fp32, kept."""

    def __init__(self, model: Any, tokenizer: Any, tasks: Path) -> None:
        from lm_eval.tasks import TaskManager

        self.made: dict[Any, Any] = {}
        self.given = {"pretrained": model, "tokenizer": tokenizer, "logits_cache": False}
        self.tasks = TaskManager(include_path=str(tasks), include_defaults=False)

    def __call__(self, name: str, batch: int = 4, **args: Any) -> Any:
        from lm_eval import simple_evaluate

        import tide.integrations.lm_eval  # noqa: F401  registers "tide"

        key = (name, batch, *sorted(args.items()))
        if key not in self.made:
            self.made[key] = simple_evaluate(
                name,
                {**self.given, **args},
                list(TASKS),
                batch_size=batch,
                task_manager=self.tasks,
                bootstrap_iters=0,  # its processes are forked, beside threads of ours
            )
        return self.made[key]


@pytest.fixture(scope="module")
def run(model: Any, tokenizer: Any, tasks: Path) -> Runs:
    return Runs(model, tokenizer, tasks)


def answers(results: Any, task: str) -> list[Any]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def scores(results: Any) -> list[float]:
    return [float(pair[0][0]) for resps in answers(results, "chosen") for pair in resps]


@pytest.mark.real
@pytest.mark.parametrize("mode", ["off", "lossless"])
def test_off_and_lossless_are_the_stock_model_to_the_bit(run: Runs, mode: str) -> None:
    stock, ours = run("hf"), run("tide", mode=mode)
    assert ours["results"] == stock["results"]
    for task in TASKS:
        assert answers(ours, task) == answers(stock, task)
    told = [text for ((text,),) in answers(stock, "told")]
    assert len({len(text) for text in told}) > 2  # the stop sequence ends rows at different places
    found = ours["config"]["tide"]
    assert found["mode"] == mode and found["exits"] is None and found["scored"] == {}
    said = found["generated"]
    assert said["total_tokens"] > 40 and said["exited_tokens"] == 0
    if mode == "off":
        assert said["layers_run"] == said["layers_full"]


@pytest.mark.real
def test_exits_are_taken_and_counted(run: Runs, small_artifact: Path) -> None:
    args = {"artifact": str(small_artifact), "mode": "exit", "exit_threshold": 0.5}
    with pytest.warns(UserWarning, match="covered by no certificate"):
        ours = run("tide", **args)
    found = ours["config"]["tide"]
    assert found["exit_threshold"] == 0.5 and len(found["exits"]) == 16
    said, read = found["generated"], found["scored"]
    assert 0 < said["exit_rate"] < 1 and 0 < said["differed"] <= said["audited"]
    assert said["audited"] == said["exited_tokens"]
    assert 0 < read["exit_rate"] < 1 and 0 < read["layers_saved"] < 1
    # Padding is not counted: what is scored are all tokens of prompt and choice but the last.
    encode = run.given["tokenizer"].encode
    chosen = [encode(f"{text} {choice}") for text, choices in QUESTIONS for choice in choices]
    rolled = [encode(f"{text} {choices[1]}") for text, choices in QUESTIONS]
    assert read["total_tokens"] == sum(len(t) - 1 for t in chosen) + sum(map(len, rolled))
    # Words that the exit heads do not read have a score, and exits move scores.
    assert all(math.isfinite(score) for score in scores(ours))
    assert scores(ours) != scores(run("hf"))
    # Right padding, and what else is in the batch, do not.
    alone = run("tide", batch=1, **args)
    assert scores(alone) == pytest.approx(scores(ours), abs=1e-3)
    assert alone["config"]["tide"]["scored"] == read


@pytest.mark.real
def test_a_risk_needs_its_certificate(run: Runs, certified_artifact: Path) -> None:
    args = {"artifact": str(certified_artifact), "risk": 0.2}
    with pytest.raises(CertificateError, match="one that is for kv_cache_strategy propagate"):
        run("tide", **args)
    found = run("tide", kv_cache_strategy="propagate", **args)["config"]["tide"]
    assert found["mode"] == "exit" and found["certificate"]["min_layers"] == 24
    assert found["generated"]["exit_rate"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"mode": "fast"}, "one of lossless, exit, off"),
        ({"mode": "exit"}, "needs artifact=DIR"),
        ({"exit_threshold": 0.9}, "exit_threshold is for mode=exit"),
        ({"mode": "off", "risk": 0.02, "artifact": "DIR"}, "risk is for mode=exit"),
        ({"risk": 0.02, "exit_threshold": 0.9, "artifact": "DIR"}, "Leave one of them out"),
        ({"mode": "exit", "artifact": "DIR", "mixed_precision_dtype": "bfloat16"}, "Give dtype"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(
    args: dict[str, Any], message: str
) -> None:
    from tide.integrations.lm_eval import TIDELM

    with pytest.raises(ConfigError, match=message):
        TIDELM("no/model", **args)


def test_the_entry_point_names_what_is_registered() -> None:
    """Its main branch looks there; `tide eval` is for releases up to 0.4.13."""
    from lm_eval.api.registry import get_model

    from tide.integrations.lm_eval import TIDELM

    (found,) = entry_points(group="lm_eval.models", name="tide")
    assert found.load() is get_model("tide") is TIDELM


@pytest.mark.real
def test_tide_eval_is_the_harness_with_us_in_it(
    smollm2_path: Path, tasks: Path, tmp_path: Path, run: Runs
) -> None:
    words = f"eval --model_args pretrained={smollm2_path},dtype=float32 --tasks told --device cpu"
    words += f" --batch_size 4 --include_path {tasks} --output_path {tmp_path} --log_samples"
    assert main(words.split()) == 0
    (written,) = tmp_path.rglob("results_*.json")
    document = json.loads(written.read_text())
    assert document["config"]["model"] == "tide"
    assert document["config"]["tide"]["mode"] == "lossless"
    stock = run("hf")["results"]["told"]["exact_match,none"]
    assert document["results"]["told"]["exact_match,none"] == stock
    (samples,) = tmp_path.rglob("samples_told_*.jsonl")
    ours = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["resps"] for row in sorted(ours, key=lambda row: row["doc_id"])] == answers(
        run("hf"), "told"
    )
