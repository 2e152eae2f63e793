"""TIDE as a model of lm-evaluation-harness, on local task files and without the hub."""

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
    "generated": """
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
    "rolling": """
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
    lines = [json.dumps({"text": text, "choices": choices}) for text, choices in QUESTIONS]
    data.write_text("\n".join(lines) + "\n")
    for name, yaml in TASKS.items():
        where = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{where}{yaml}")
    return folder


class Runs:
    """Cached runs of the harness on one model in fp32."""

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
                bootstrap_iters=0,  # else it forks a process that has threads
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
def test_off_and_lossless_equal_the_hf_model_to_the_bit(run: Runs, mode: str) -> None:
    baseline, ours = run("hf"), run("tide", mode=mode)
    assert ours["results"] == baseline["results"]
    for task in TASKS:
        assert answers(ours, task) == answers(baseline, task)
    texts = [text for ((text,),) in answers(baseline, "generated")]
    assert len({len(text) for text in texts}) > 2  # stop sequences end them at different lengths
    found = ours["config"]["tide"]
    assert found["mode"] == mode and found["exits"] is None and found["scored"] == {}
    generated = found["generated"]
    assert generated["total_tokens"] > 40 and generated["exited_tokens"] == 0
    if mode == "off":
        assert generated["layers_run"] == generated["layers_full"]


@pytest.mark.real
def test_tokens_exit_and_are_counted(run: Runs, small_artifact: Path) -> None:
    args = {"artifact": str(small_artifact), "mode": "exit", "exit_threshold": 0.5}
    with pytest.warns(UserWarning, match="covered by no certificate"):
        ours = run("tide", **args)
    found = ours["config"]["tide"]
    assert found["exit_threshold"] == 0.5 and len(found["exits"]) == 16
    generated, scored = found["generated"], found["scored"]
    assert 0 < generated["exit_rate"] < 1 and 0 < generated["differed"] <= generated["audited"]
    assert generated["audited"] == generated["exited_tokens"]
    assert 0 < scored["exit_rate"] < 1 and 0 < scored["layers_saved"] < 1
    # Padding is not counted: all tokens of prompt and choice are scored, except the last.
    encode = run.given["tokenizer"].encode
    chosen = [encode(f"{text} {choice}") for text, choices in QUESTIONS for choice in choices]
    rolled = [encode(f"{text} {choices[1]}") for text, choices in QUESTIONS]
    assert scored["total_tokens"] == sum(len(t) - 1 for t in chosen) + sum(map(len, rolled))
    # Tokens outside the reduced vocabulary have a score too, and exits change scores.
    assert all(math.isfinite(score) for score in scores(ours))
    assert scores(ours) != scores(run("hf"))
    # Right padding and the rest of the batch do not.
    alone = run("tide", batch=1, **args)
    assert scores(alone) == pytest.approx(scores(ours), abs=1e-3)
    assert alone["config"]["tide"]["scored"] == scored


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
        ({"risk": 0.02, "exit_threshold": 0.9, "artifact": "DIR"}, "Remove one of them"),
        ({"mode": "exit", "artifact": "DIR", "mixed_precision_dtype": "bfloat16"}, "Give dtype"),
    ],
)
def test_contradicting_options_raise_before_a_model_is_loaded(
    args: dict[str, Any], message: str
) -> None:
    from tide.integrations.lm_eval import TIDELM

    with pytest.raises(ConfigError, match=message):
        TIDELM("no/model", **args)


def test_the_entry_point_names_the_registered_class() -> None:
    """The harness's main branch reads it; `tide eval` is for releases up to 0.4.13."""
    from lm_eval.api.registry import get_model

    from tide.integrations.lm_eval import TIDELM

    (found,) = entry_points(group="lm_eval.models", name="tide")
    assert found.load() is get_model("tide") is TIDELM


@pytest.mark.real
def test_tide_eval_runs_the_harness_with_tide_registered(
    smollm2_path: Path, tasks: Path, tmp_path: Path, run: Runs
) -> None:
    command = f"eval --model_args pretrained={smollm2_path},dtype=float32 --tasks generated"
    command += f" --device cpu --batch_size 4 --include_path {tasks} --output_path {tmp_path}"
    assert main([*command.split(), "--log_samples"]) == 0
    (written,) = tmp_path.rglob("results_*.json")
    document = json.loads(written.read_text())
    assert document["config"]["model"] == "tide"
    assert document["config"]["tide"]["mode"] == "lossless"
    baseline = run("hf")["results"]["generated"]["exact_match,none"]
    assert document["results"]["generated"]["exact_match,none"] == baseline
    (samples,) = tmp_path.rglob("samples_generated_*.jsonl")
    ours = [json.loads(line) for line in samples.read_text().splitlines()]
    ours.sort(key=lambda sample: sample["doc_id"])
    assert [sample["resps"] for sample in ours] == answers(run("hf"), "generated")
