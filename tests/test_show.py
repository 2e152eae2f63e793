"""Tests that colours, marks, live text, pages and charts show what was counted."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from test_certify import ALWAYS, serve
from test_generate import WrongHead, artifact
from tide.config import TIDEConfig
from tide.errors import DataError
from tide.picture import DRAFTED, colour, contrast, depth_histogram, depth_map, ink, look
from tide.report.charts import CHARTS, figures
from tide.report.difference import first_difference
from tide.report.live import DepthStreamer, print_legend
from tide.report.page import report_page, trace_page
from tide.report.runs import Runs
from tide.report.trace import Piece, Pieces, Trace
from tide.stats import ExitStats
from tiny import tiny_model, tiny_tokenizer

NEW = 12
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6]])


def test_text_is_readable_on_every_colour() -> None:
    for background in (*(colour(k / 100) for k in range(101)), DRAFTED):
        assert contrast(ink(background), background) >= 4.5  # WCAG 2, level AA
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


def test_looks_differ_by_mark_too() -> None:
    looks = [look(8, 30), look(20, 30), look(30, 30, "table"), look(30, 30)]
    assert [shown.mark for shown in looks] == ["₈", "₂₀", "ᐩ", ""]
    assert len({shown.background for shown in looks}) == 4


def engine(mode: str = "exit", head: Any = WrongHead, **options: Any) -> Any:
    config = TIDEConfig(
        mode=mode, exit_threshold=None, min_layers=0, audit_tail=True, max_pending=3, **options
    )
    return serve(tiny_model("llama"), artifact(head), config=config, policy=ALWAYS)


def generate(engine: Any, **options: Any) -> list[int]:
    out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False, **options)
    return out[0, PROMPT.shape[1] :].tolist()


def test_target_tokens_are_what_full_depth_predicts() -> None:
    exiting = engine()
    tokens = generate(exiting)
    stats = exiting.last_stats
    text = torch.cat([PROMPT, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        predicted = exiting.model(text).logits[0, PROMPT.shape[1] - 1 : -1].argmax(-1).tolist()
    assert stats.target_tokens == [predicted]
    assert sum(a != b for a, b in zip(predicted, tokens, strict=True)) == stats.differed > 0


def test_draft_sources_are_those_of_accepted_tokens() -> None:
    repeating = torch.tensor([[5, 6, 7, 8] * 6])
    lossless = serve(tiny_model("llama"), None, config=TIDEConfig(mode="lossless"))
    lossless.drafter.fixed = True
    lossless.generate(repeating, max_new_tokens=40, do_sample=False)
    stats = lossless.last_stats
    accepted = sum(source is not None for source in stats.draft_sources[0])
    assert accepted == sum(stats.accepted.values()) > 0
    assert len(stats.draft_sources[0]) == len(stats.target_tokens[0]) == 40


def test_pieces_wait_for_complete_characters() -> None:
    codes = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"!"}
    pieces = Pieces(lambda ids: b"".join(codes[i] for i in ids).decode(errors="replace"))
    assert [pieces.add(token) for token in (1, 2, 3, 4)] == ["a", "", "é", "!"]
    assert pieces.add(2, last=True) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("colours", ["truecolor", None])
def test_live_text_shows_depth_with_and_without_colour(colours: Any) -> None:
    exiting, tokenizer = engine(), tiny_tokenizer()
    console = Console(
        file=StringIO(), color_system=colours, force_terminal=colours is not None, width=400
    )
    tokens = generate(exiting, streamer=DepthStreamer(exiting, tokenizer, console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    depths = exiting.last_stats.depths[0]
    assert min(depths) < exiting.runner.n_layers == max(depths)
    if colours:
        assert len(re.findall(r"\x1b\[4;", shown)) == sum(d < max(depths) for d in depths)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    else:
        assert re.findall("[₀-₉]+", shown) == [look(d, 8).mark for d in depths if d < max(depths)]
        shown = re.sub("[₀-₉]+", "", shown)
    assert shown.strip() == tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("speeds", "counts", "compiled", "told"),
    [
        ((20.0, 8.0, 10.0), {}, True, "was accepted. The 2.00x over compiled is from the loop"),
        ((16.0, 8.0), {"exits_per_layer": {1: 2}}, False, "2.00x over HF, in one run. `--compile`"),
        ((20.0, 8.0, 10.0), {"accepted": {"tree": 3}}, True, "2.00x over compiled, the fastest wi"),
        ((10.0, 10.0, 9.0), {}, False, "no token exited and no draft was accepted. Try a prompt"),
        ((8.0, 10.0, 9.0), {"accepted": {"tree": 3}}, False, "the 25% of layer calls saved. Try -"),
        ((8.0, 10.0, 9.0), {"exits_per_layer": {1: 2}}, True, "Nothing gained (0.80x over HF): g"),
    ],
)  # fmt: skip
def test_one_line_tells_what_was_gained(
    speeds: Any, counts: Any, compiled: bool, told: str
) -> None:
    stats = ExitStats(4, remaining_tokens=3, layers_run=9, layers_full=12, **counts)
    names = ("lossless", "HF", "compiled")
    shown = Trace("", [], stats, {"compile": compiled}, dict(zip(names, speeds, strict=False)))
    assert told in shown.gain() and "\n" not in shown.gain()
    assert shown.footer()[-1] == shown.gain()


@pytest.mark.parametrize("colours", ["truecolor", None])
def test_the_legend_names_tokens_that_full_depth_predicts_otherwise(colours: Any) -> None:
    pieces = [
        Piece(" a", 30, None, None, None, False), Piece(" b", 8, 0.9, None, " c", True),
        Piece(" d", 8, 0.9, None, " d", False),
    ]  # fmt: skip
    stats = ExitStats(30, {7: 2}, 1, layers_run=46, layers_full=90, audited=2, differed=1)
    console = Console(
        file=StringIO(), color_system=colours, force_terminal=colours is not None, width=200
    )
    print_legend(Trace("", pieces, stats), console)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "Full depth predicts ' c' instead of ' b' (token 2)." in shown
    assert "all 30 layers: 1 token\n" in shown and "8 of 30 layers: 2 tokens\n" in shown
    assert ("The brighter an exited token" in shown) == (colours is not None)


def test_the_audit_is_given_as_what_a_risk_limits() -> None:
    stats = ExitStats(4, {1: 3}, 5, layers_run=9, layers_full=12, audited=3, differed=1)
    assert (
        "for 1 (12.5% of all 8 tokens, which is what a risk limits)."
        in Trace("", [], stats).footer()[-1]
    )


def test_the_first_difference_and_its_margin() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    theirs = model.generate(PROMPT, max_new_tokens=6, do_sample=False)[0, PROMPT.shape[1] :]
    theirs = theirs.tolist()
    ours = [*theirs[:3], theirs[3] + 1, *theirs[4:]]
    assert first_difference(model, PROMPT, theirs, theirs) is None
    found = first_difference(model, PROMPT, ours, theirs)
    assert found is not None
    assert (found.place, found.ours, found.theirs) == (3, ours[3], theirs[3])
    with torch.no_grad():
        text = torch.cat([PROMPT, torch.tensor([theirs[:3]])], dim=1)
        logits = model(text).logits[0, -1]
    assert found.margin == pytest.approx(float(logits.max() - logits[ours[3]]), abs=1e-5)
    assert found.margin > 0 and "at token 4" in found.line(tokenizer, "float32")
    ended = first_difference(model, PROMPT, theirs[:2], theirs)
    assert ended is not None and (ended.place, ended.ours, ended.margin) == (2, None, None)
    assert "TIDE has nothing" in ended.line(tokenizer, "float32")


def trace(engine: Any) -> Trace:
    return Trace.of(tiny_tokenizer(), "<b> & a prompt", generate(engine), engine.last_stats)


def test_the_page_has_every_token_and_fetches_nothing() -> None:
    shown = trace(engine())
    html = trace_page(shown)
    details = re.findall('data-details="(.*?)"', html)
    assert len(details) == NEW and "&lt;b&gt; &amp; a prompt" in html
    assert sum("full depth predicts &#x27;" in text for text in details) == shown.stats.differed > 0
    assert sum("gate score" in text for text in details) == shown.stats.exited_tokens
    assert not re.search(r"(src|href)\s*=|@import|url\(", html)
    assert f"{shown.stats.layers_run} of {shown.stats.layers_full} layer calls" in html


def test_stats_show_themselves_in_notebooks() -> None:
    stats = ExitStats(4, {1: 2}, 1, 8, 12, depths=[[0, 2, 2, 4]])  # 0 is padding
    html = stats._repr_html_()
    assert "Total tokens: 3" in html
    assert depth_histogram([2, 2, 4], 4) in html and depth_map([2, 2, 4], 4) in html
    assert "2 (67%)" in html and html.count("<title>token") == 3
    assert "<svg" in ExitStats(4)._repr_html_()  # nothing generated yet


def method(name: str, speedup: float, **more: Any) -> dict[str, Any]:
    return {
        "method": name, "speedup": speedup, "ms_per_token": 50 / speedup, "tokens": 100,
        "per_prompt_speedup": {"p20": speedup - 0.1, "p50": speedup, "p80": speedup + 0.1}, **more,
    }  # fmt: skip


def exits(name: str, speedup: float, differ: float, risk: float | None = None) -> dict[str, Any]:
    return method(
        name, speedup, layers_run=80, layers_full=100, ideal_speedup=1.25, exit_rate=0.4,
        exits_per_layer={"7": 10, "23": 30}, disagreement=differ, mode="exit", threshold_scale=1.0,
        audited=40, drafts=["context"], certificate=None if risk is None else {"risk": risk},
        layer_calls_per_token={"writing": 20.0, "coding": 25.0},
    )  # fmt: skip


def write(path: Path, methods: list[dict[str, Any]], **conditions: Any) -> Path:
    under = {"model": "m", "dtype": "bfloat16", "prompts": 4, **conditions}
    path.write_text(json.dumps({"what": "", "conditions": under, "results": methods}))
    return path


def test_a_report_has_every_chart_and_marks_certificates(tmp_path: Path) -> None:
    methods = [
        method("HF generate", 1.0),
        exits("exit, threshold scale 1", 1.4, 0.03),
        exits("exit, risk 0.02", 1.2, 0.01, 0.02),
    ]
    runs = Runs.read([write(tmp_path / "a.json", methods)])
    drawn = figures(runs)
    assert list(drawn) == list(CHARTS)
    axes = drawn["risk_speed"][1].axes[0]
    stars = [points for points in axes.collections if len(points.get_paths()[0].vertices) == 11]
    assert [tuple(points.get_offsets()[0]) for points in stars] == [(1.0, 1.2)]
    html = report_page(runs, {name: (title, "<svg/>") for name, (title, _) in drawn.items()})
    assert (
        html.count("<svg/>") == len(CHARTS) and "<td>1.20x</td>" in html and "<td>2%</td>" in html
    )


def test_runs_under_different_conditions_are_not_mixed(tmp_path: Path) -> None:
    methods = [method("HF generate", 1.0), exits("exit, risk 0.02", 1.2, 0.01, 0.02)]
    first = write(tmp_path / "a.json", methods)
    other = write(tmp_path / "b.json", [method("HF generate", 1.0), method("prompt lookup", 1.1)])
    assert [m["method"] for m in Runs.read([first, other]).methods] == [
        "HF generate", "exit, risk 0.02", "prompt lookup",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"dtype \(bfloat16 and float32\)"):
        Runs.read([first, write(tmp_path / "c.json", methods, dtype="float32")])
    with pytest.raises(DataError, match=r"a\.json: one is given twice"):
        Runs.read([first, first])
    again = Runs.read([first, write(tmp_path / "again.json", methods)])
    assert [m["method"] for m in again.methods] == [
        "HF generate", "exit, risk 0.02", "exit, risk 0.02 (2: again)",
    ]  # fmt: skip
    assert again.baseline == "HF generate"
    methods[0]["baseline"] = "HF generate, compiled"
    other = write(tmp_path / "e.json", methods)
    assert Runs.read([other]).baseline == "HF generate, compiled"
    with pytest.raises(DataError, match=r"baseline \(None and HF generate, compiled\)"):
        Runs.read([first, other])
    with pytest.raises(DataError, match="cannot be read"):
        Runs.read([tmp_path / "nowhere.json"])
    for text in ("[1]", "{", '{"results": [{"method": "HF generate"}], "conditions": {}}'):
        (tmp_path / "d.json").write_text(text)
        with pytest.raises(DataError, match="is not a comparison of `tide bench`"):
            Runs.read([tmp_path / "d.json"])
