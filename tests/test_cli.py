"""Tests of the command line: what every command prints and writes, and its errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tide.calibration.data import load_prompts
from tide.cli import COMMANDS, main, parser_of
from tide.cli.loading import load_model
from tide.cli.show import _inputs
from tide.errors import DataError
from tide.exits.artifact import Artifact
from tide.exits.card import model_card
from tide.exits.files import is_artifact
from tiny import tiny_model, tiny_tokenizer


def calibrate(folder: Path) -> int:
    model, texts, out = (str(folder / name) for name in ("model", "texts.txt", "router"))
    arguments = ["calibrate", model, "-o", out, "--data", texts, "--new-tokens", "6", "--json"]
    arguments += ["--interval", "2", "--min-layers", "2", "--vocabulary", "64", "--bottleneck", "8"]
    return main(arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, and an artifact."""
    folder = tmp_path_factory.mktemp("cli")
    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    texts = "\n".join(f"{'abcdefgh'[i % 8]}{i:03}abc" for i in range(40))
    (folder / "texts.txt").write_text(texts)
    assert calibrate(folder) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to work in."""
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def last_line(capsys: Any) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_assess(folder: Path, capsys: Any) -> None:
    data = ["--data", str(folder / "texts.txt"), "--samples", "4"]
    assert main(["assess", str(folder / "model"), *data, "--new-tokens", "6", "--json"]) == 0
    found = last_line(capsys)
    assert found["documents"] == 4 and found["agreement"][-1] == 1.0 and "verdict" in found


@pytest.mark.usefixtures("traced")
def test_bench(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ["bench", str(folder / "model"), str(folder / "router")]
    bench += ["--data", str(folder / "texts.txt"), "--new-tokens", "6", "--json"]
    assert main([*bench, "--samples", "2", "--out", str(folder / "bench.json")]) == 0
    found = last_line(capsys)
    assert json.loads((folder / "bench.json").read_text()) == found
    methods = {result["method"]: result for result in found["results"]}
    assert list(methods) == [
        "HF generate", "HF generate, compiled", "prompt lookup", "off", "lossless",
        "exit without drafts", "exit, threshold scale 1", "auto",
    ]  # fmt: skip
    assert main([*bench, "--samples", "1", "--compile-only"]) == 0
    ours = [r["method"] for r in last_line(capsys)["results"] if "plan" in r]
    assert len(ours) == 5 and all(name.endswith(", compiled") for name in ours)
    assert methods["off"]["ideal_speedup"] == 1.0 and methods["lossless"]["disagreement"] == 0
    html = folder / "report.html"
    report = ["report", str(folder / "bench.json"), "--html", str(html), "--png", str(folder)]
    assert main([*report, "--json"]) == 0
    assert str(html) in last_line(capsys)["written"] and (folder / "peers.png").stat().st_size
    monkeypatch.setattr(
        "tide.bench.baselines.compiled_generate",
        lambda model, options: lambda batch: model.generate(**batch, **options),
    )
    assert main([*bench, "--samples", "40", "--batch", "4"]) == 0
    found = last_line(capsys)
    # Of 40 texts, 6 were not used in calibration, which is one whole batch.
    assert (found["conditions"]["batch"], found["conditions"]["prompts"]) == (4, 4)
    assert "prompt lookup" not in {result["method"] for result in found["results"]}
    assert all(0 < result["tokens"] <= 24 for result in found["results"])
    assert main([*bench, "--samples", "3", "--batch", "4"]) == 1
    assert "--batch must be at most the number of prompts, 3; got 4" in capsys.readouterr().err
    assert main([*bench, "--samples", "4", "--attack", "--generations", "1"]) == 0
    assert [result["goal"] for result in last_line(capsys)["results"]] == ["wrong", "deep"]


def test_show(folder: Path, capsys: Any) -> None:
    model, router = str(folder / "model"), str(folder / "router")
    for inputs, mode in (
        ([router, "abcabc", "--mode", "exit"], "exit"),
        ([router, "abcabc", "--mode", "lossless"], "lossless"),
        (["abcabc"], "lossless"),
    ):
        html = folder / f"{mode}.html"
        options = ["--new-tokens", "6", "--html", str(html), "--json"]
        assert main(["show", model, *inputs, *options]) == 0
        found = last_line(capsys)
        assert found["conditions"]["mode"] == mode and len(found["tokens"]) == 6
        plans = {"exit": "exit with drafts: as requested", "lossless": "lossless: as requested"}
        alone = "lossless: without an artifact no token exits"
        assert found["plan"] == (plans[mode] if router in inputs else alone)
        assert set(found["tokens_per_second"]) == {mode, "HF generate"}
        assert re.match(r"Gained: |Nothing (gained \(|was saved: )", found["gain"])
        assert set(found["tokens"][0]) == {
            "text", "depth", "score", "draft_source", "target_token",
        }  # fmt: skip
        assert html.read_text().count("data-details=") == 6
    for inputs, message in (
        ([router, "no", "quotes"], "Put the prompt in quotes"),
        ([router, "abc", "--compare", "--no-compare"], "give one of them"),
        (["abc", "--mode", "exit"], "needs an artifact"),
        ([router, "abc", "--mode", "lossless", "--risk", "0.02"], "takes no --risk"),
        ([router, "abc", "--risk", "0.02"], "No certificate covers"),
        (["out/rooter"], "There is no folder 'out/rooter' with an artifact. Make one"),
        ([router, "abc", "--risk", "0.02", "--threshold", "0.5"], "not both"),
    ):
        assert main(["show", model, *inputs]) == 1
        assert message in capsys.readouterr().err


def test_show_has_an_example_and_compares(folder: Path, capsys: Any) -> None:
    model, router = str(folder / "model"), str(folder / "router")
    options = ["--new-tokens", "6", "--dtype", "float32", "--json"]
    for inputs in ([], [router, "--mode", "lossless"]):
        assert main(["show", model, *inputs, *options, "--compare"]) == 0
        out = capsys.readouterr().out
        assert "this is an example: Rewrite this" in out and "Others to try: " in out
        assert "gives the same text" in out
        assert json.loads(out.strip().splitlines()[-1])["first_difference"] is None


def test_show_tells_that_a_single_word_is_the_prompt(folder: Path, capsys: Any) -> None:
    def printed(*inputs: str) -> str:
        assert _inputs(parser_of(["show"]).parse_args(["show", "m", *inputs]))[1] == inputs[-1]
        return str(capsys.readouterr().out)

    assert printed("rooter") == "There is no artifact at 'rooter', so it is the prompt.\n"
    assert (
        printed("天空为什么是蓝色的?")
        == printed("two words")
        == printed(str(folder / "router"), "rooter")
        == ""
    )


def test_env(capsys: Any) -> None:
    assert main(["env", "--json"]) == 0
    found = last_line(capsys)
    assert found["torch"] == torch.__version__ and "runner" not in found


def test_env_names_the_runner_of_a_model(folder: Path, capsys: Any) -> None:
    assert main(["env", "--model", str(folder / "model"), "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.strip().splitlines()[-1])
    assert found["architecture"] == "LlamaForCausalLM" and found["layers"] == 6
    assert found["runner"] in ("segments", "shims") and f"runner: {found['runner']}\n" in out
    # The versions are printed even if the model cannot be run.
    assert main(["env", "--model", str(folder / "nowhere")]) == 1
    printed = capsys.readouterr()
    assert "torch: " in printed.out and "There is no folder" in printed.err


def test_completion_knows_every_command_and_option(capsys: Any) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS) and "--max-model" not in script
    assert all(option in script for option in ("--threshold-scale", "--html", "--uncertified"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("moment", ["collect", "write"])
@pytest.mark.parametrize("command", ["calibrate", "certify", "bench"])
def test_an_interrupted_command_writes_nothing_incomplete(
    folder: Path, command: str, moment: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the work, and in the middle of writing its result."""
    router, out = folder / "router", folder / "bench.json"
    options = ["--data", str(folder / "texts.txt"), "--new-tokens", "6", "--samples", "4"]
    options += {"certify": ["--risk", "0.9", "--force"], "bench": ["--out", str(out)]}.get(
        command, []
    )
    if command == "calibrate":
        shutil.rmtree(router)
    before = contents(folder)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    if moment == "collect":
        monkeypatch.setattr("tide.models.runner.DepthRunner.run", stop)
    elif command == "bench":
        monkeypatch.setattr(Path, "write_text", stop)
        monkeypatch.setattr(torch, "compile", partial(torch.compile, disable=True))
    else:
        monkeypatch.setattr("tide.exits.files.save_file", stop)
    capsys.readouterr()
    if command == "calibrate":
        assert calibrate(folder) == 130
    else:
        assert main([command, str(folder / "model"), str(router), *options]) == 130
    assert "interrupted" in capsys.readouterr().err
    after = contents(folder)
    if command == "calibrate":  # collected states are kept, to resume from
        after = {path: text for path, text in after.items() if "router.work" not in str(path)}
    assert after == before and not out.exists()


def test_calibrate(folder: Path) -> None:
    made = Artifact.from_pretrained(folder / "router")
    assert made.record["documents"]["fit"] == 26
    assert made.config.checkpoint_interval == 2
    card = (folder / "router" / "README.md").read_text()
    assert "# TIDE artifact for model" in card and str(folder) not in card
    assert "a third of the 8 documents for thresholds, so these rates are noisy" in card


def test_calibrate_names_a_command_that_shows_exits(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(record={})
    monkeypatch.setattr("tide.calibration.pipeline.calibrate", lambda *_, **__: made)
    for dtype, option in (("float32", " --dtype float32"), ("auto", "")):
        command = ["calibrate", str(folder / "model"), "-o", "my router", "--dtype", dtype]
        assert main(command) == 0
        told = f"model 'my router' 'Why is the sky blue?'{option} --mode exit\n"
        assert told in capsys.readouterr().out


def test_errors_name_the_next_step(folder: Path, capsys: Any) -> None:
    assert main(["assess", str(folder / "model"), "--data", str(folder / "nowhere.txt")]) == 1
    assert "ame a local .txt or .jsonl file" in capsys.readouterr().err
    for name in (str(folder / "nowhere"), "./nowhere", "~/nowhere"):
        assert main(["assess", name]) == 1
        assert f"There is no folder {name}: MODEL is" in capsys.readouterr().err
    assert main(["assess", str(folder / "modle")]) == 1
    assert f"Did you mean {folder / 'model'}?" in capsys.readouterr().err
    for arguments, message in (
        (["calibrat"], "Did you mean calibrate?"),
        (["show", "--newtokens", "4", "model", "prompt"], "Did you mean --new-tokens?"),
        (["show", "model", "DIR", "--risk", "0.1", "prompt"], "unexpected argument 'prompt'"),
        ([], "COMMAND"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_an_unknown_model_is_searched_for_once(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search takes half a minute where the hub cannot be reached."""
    searches = []

    def search(name: str, **_: Any) -> None:
        searches.append(name)
        raise OSError("offline")

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", search)
    assert main(["assess", "someone/nowhere"]) == 1
    assert "cannot be loaded as a causal language model" in capsys.readouterr().err
    assert searches == ["someone/nowhere"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option_with_its_default(command: str) -> None:
    commands = next(a for a in parser_of([command])._actions if a.dest == "command")
    parser = commands.choices[command]  # type: ignore[index]
    for action in parser._actions:  # type: ignore[union-attr]
        assert action.help
        if action.option_strings and action.nargs != 0 and not action.required:
            text = parser.formatter_class("")._expand_help(action)  # type: ignore[union-attr]
            assert "(default: " in text or action.default == [], action.option_strings


# Words that the vocabulary replaces; see docs/glossary.md.
_OLD_WORDS = re.compile(
    r"\b(leav\w*|left|guess\w*|said|says|ask\w*|settle\w*|bold\w*|blend\w*|veto\w*|watch\w*|guard\w*"
    r"|promis\w*|rounds?|sides?|bare|stock|rows?|columns?|early|plain|K and V)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_uses_the_vocabulary(command: str) -> None:
    commands = next(a for a in parser_of([command])._actions if a.dest == "command")
    text = commands.choices[command].format_help()  # type: ignore[index]
    assert not _OLD_WORDS.findall(text)


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from tide.cli import main\n"
        "try: main(['calibrate', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers', 'rich'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip().endswith("set()")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "x", "--batch", "2"], "--draft counts with --batch 1 only"),
        (["--attack", "--compile"], "omit --compile"),
        (["--attack", "--draft", "x"], "omit --draft"),
        (["--attack", "--batch", "2"], "got --batch 2: omit it"),
        (["--out", "texts.txt/run.json"], "texts.txt/run.json could not be written"),
    ],
)
def test_bench_refuses_before_it_works(
    folder: Path, options: list[str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["bench", "nowhere", "router", "--data", "texts.txt", *options]) == 1
    assert message in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_any_work(folder: Path, capsys: Any) -> None:
    inside = str(folder / "texts.txt" / "router")
    data = ["--data", str(folder / "texts.txt")]
    assert main(["calibrate", str(folder / "model"), "-o", inside, *data]) == 1
    assert "could not be written" in capsys.readouterr().err
    out = ["-o", str(folder / "texts.txt")]
    assert main(["export-draft", "nowhere", str(folder / "router"), *out]) == 1
    assert "texts.txt could not be written" in capsys.readouterr().err


def test_an_image_must_be_one(folder: Path, capsys: Any) -> None:
    data = ["--data", str(folder / "texts.txt"), "--samples", "4", "--new-tokens", "4"]
    for name, code in (("plot.foo", 1), ("new/plot.png", 0)):
        plot = ["--plot", str(folder / name)]
        assert main(["assess", str(folder / "model"), *data, *plot]) == code
    assert "plot.foo is no image; it must end in one of" in capsys.readouterr().err
    assert (folder / "new" / "plot.png").stat().st_size > 1000


def test_numbers_are_checked_before_a_model_is_loaded(capsys: Any) -> None:
    for command in (["assess", "m", "--threads", "0"], ["show", "m", "--new-tokens", "-1"],
                    ["calibrate", "m", "-o", "d", "--batch", "0"]):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            main(command)
        assert "is not a whole number from 1 on" in capsys.readouterr().err
    for command in ("certify m d", "show m", "bench m d", "serve m d", "calibrate m -o d"):
        for risk in ("20", "2%", "nan"):
            with pytest.raises(SystemExit, match="2"):
                main([*command.split(), "--risk", risk])
            assert f"{risk!r} is not between 0 and 1: 2 % is 0.02" in capsys.readouterr().err


def test_certify_needs_an_artifact_before_a_model(tmp_path: Path, capsys: Any) -> None:
    assert main(["certify", "nowhere", str(tmp_path / "new" / "router")]) == 1
    assert "There is no artifact at" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_long_prompt_is_no_file_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("why? " * 2000, "a" * 300, "\0"):
        assert not is_artifact(text)
    Artifact.load(folder / "router").save(folder / "router.safetensors")
    assert is_artifact(str(folder / "router")) and is_artifact(str(folder / "router.safetensors"))
    assert not is_artifact(str(folder / "texts.txt"))


def test_one_device_needs_no_accelerate(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_accelerate_available", lambda *_: False)
    assert not hasattr(load_model(str(folder / "model"), device="cpu"), "hf_device_map")
    assert main(["assess", str(folder / "model"), "--device", "nowhere"]) == 1
    assert "cannot be loaded as a causal language model" in capsys.readouterr().err


def test_a_risk_that_is_not_shown_fails_the_command(folder: Path, capsys: Any) -> None:
    command = ["certify", str(folder / "model"), str(folder / "router"), "--json"]
    data = folder / "fresh.txt"
    data.write_text("\n".join(f"{k:04}" for k in range(20)))
    command += ["--data", str(data), "--new-tokens", "6", "--dtype", "float32"]
    assert main([*command, "--risk", "0.02"]) == 1
    told = capsys.readouterr().err
    assert "Only 20 prompts remain that were not used before" in told
    assert "Give more prompts, or accept a higher risk." in told
    assert main([*command, "--risk", "0.02", "--samples", "5"]) == 1
    told = capsys.readouterr().err
    assert "Only 5 prompts were drawn" in told and "Raise `samples` (`--samples`), or" in told
    code, found = main([*command, "--risk", "0.2"]), last_line(capsys)
    assert code == found["exit_code"] == (0 if found["certificates"] else 1)


@pytest.mark.parametrize(
    ("delta", "kv", "how"),
    [
        (0.05, "deferred", 'tide.TIDE(model, "{router}", risk=0.2), the model in float32'),
        (
            0.1,
            "deferred",
            'tide.TIDE(model, "{router}", risk=0.2, delta=0.1), the model in float32',
        ),
        (0.05, "propagate", "tide serve {model} {router} --risk 0.2 --dtype float32"),
        (0.1, "propagate", "tide serve {model} {router} --risk 0.2 --delta 0.1 --dtype float32"),
        (0.05, "zero_pad", None),
    ],
)
def test_certify_tells_what_is_certified_and_how_to_serve_it(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, delta: float, kv: str, how: Any
) -> None:
    made = SimpleNamespace(
        risk=0.2, delta=delta, estimate=0.0167, sequences=24, kv_cache_strategy=kv,
        dtype="float32", to_dict=dict,
    )  # fmt: skip
    monkeypatch.setattr("tide.certification.certify", lambda *_, **__: [made])
    model, router = str(folder / "model"), str(folder / "router")
    assert main(["certify", model, router, "--risk", "0.2", "--new-tokens", "10"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == (
        f"At most 20 % of tokens differ from full depth, certified at {100 - 100 * delta:g} % "
        "confidence (1.67 % measured on 24 sequences of up to 10 new tokens)."
    )
    how = how and f" Serve it: {how.format(model=model, router=router)}"
    assert last == f"Saved in {router}.{how or ''}"


def test_show_needs_its_artifact_before_a_model(tmp_path: Path, capsys: Any) -> None:
    assert main(["show", "nowhere", str(tmp_path / "router"), "a prompt"]) == 1
    assert "There is no artifact at" in capsys.readouterr().err


def test_the_card_tells_where_thresholds_did_not_hold() -> None:
    measured = {"layers": [7], "exit_rate": 0.1, "depth_saved": 0.05, "best": True}
    rates = {"0.01": 0.01, "0.02": 0.031}
    exits = {risk: [{**measured, "error_rate": rate}] for risk, rate in rates.items()}
    card = model_card({"exits": exits})
    assert "| 10.0% | 1.0% |" in card and "| 10.0% | 3.1% (over) |" in card
    assert "Over: on documents that did not choose the thresholds" in card
    assert "Over:" not in model_card({"exits": {"0.05": exits["0.02"]}})


def test_the_card_loads_a_local_model_from_a_folder() -> None:
    folder = 'from_pretrained("SmolLM2")  # or the path of its folder\n'
    assert folder in model_card({"model": "SmolLM2"})
    assert 'from_pretrained("someone/SmolLM2")\n' in model_card({"model": "someone/SmolLM2"})


def test_the_card_serves_all_exits(folder: Path) -> None:
    assert (
        "TIDEConfig(exit_threshold=None, min_layers=2))"
        in (folder / "router/README.md").read_text()
    )


def test_a_card_of_others_stays(folder: Path) -> None:
    made, card = Artifact.load(folder / "router"), folder / "model" / "README.md"
    card.write_text("# The model's own card, which mentions tide")
    with pytest.warns(UserWarning, match=r"README\.md was not written by TIDE, so it stays"):
        made.save_pretrained(folder / "model")
    assert card.read_text().startswith("# The model's own")
    made.save_pretrained(folder / "other")
    made.save_pretrained(folder / "other")  # its own is written again


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("Grüße".encode("latin-1"), "cannot be read as text"),
        (b'{"text": null}', "text of .*line 1 is 'None'; it must be a text"),
        (b'{"turns": []}', "must be a text, or turns of a chat"),
    ],
)
def test_data_that_is_no_text_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message):
        load_prompts(path)
    with pytest.raises(DataError, match="cannot be read as text"):
        load_prompts(tmp_path)
    path.write_text('{"turns": [{"role": "system", "content": "be brief"}, {"content": "hi"}]}')
    assert [prompt.text for prompt in load_prompts(path)] == ["hi"]


def test_kernels_that_are_off_are_told_and_fail_the_command(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"operation": "top_token", "dtype": "float32", "ran": "triton", "error": 0.5,
           "reference's": 0.0, "allowed": 1e-4}  # fmt: skip
    monkeypatch.setattr("tide.cli.kernels._check", lambda device, dtype: [row])
    assert main(["kernels", "--check", "--json"]) == 1
    out = capsys.readouterr().out
    assert "top_token in float32 is off by 0.5; at most 0.0001 is allowed" in out
    assert json.loads(out.strip().splitlines()[-1])["checks"][0] == row
