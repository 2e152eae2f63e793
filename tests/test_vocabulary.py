"""One vocabulary: words that the field does not use are not in code, help, tables or examples.

Each has a word in its place, which docs/glossary.md defines or the field knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from tide.cli import COMMANDS, parser_of

# Word -> what to use instead.
WORDS = {
    r"leav(e|es|ing)|left|who stays": "exit, exited, continue",
    r"guess\w*": "draft",
    r"kinds?": "draft_type, or name the type",
    r"said|says|words?": "predicted token, target token",
    r"ask(s|ed|ing)?": "evaluate the gate; wanted, given, required",
    r"settle[sd]?": "committed",
    r"early": "pending_audit, exited tokens",
    r"ledges?": "pending states",
    r"f(a|e)ll(s|en|ing)? back": "roll back",
    r"rows?": "sequence, batch",
    r"blend\w*|opinions?|judg\w*|hints?": "confidence model, features, scorers, n-gram prediction",
    r"veto\w*": "prefilter",
    r"bold\w*": "threshold_scale; aggressive",
    r"chooser|trials?|odds": "Sampler, online comparison, running rate",
    r"watch\w*|guard\w*|breakers?|promis\w*": "DriftMonitor, CircuitBreaker, certified bound",
    r"rounds?(?!\()": "cycle, steps, repeats",
    r"sides?|bare|stock": "method; baseline; the engine's name",
    r"doors?": "integration, entry point",
    r"lift\w*|widen\w*|columns?|plain": "transform, scatter_to_vocab, pack; greedy, undrafted",
    r"k and v": "KV",
    r"mend(s|ed|ing)?|throw ?away|a little kind|outputs part": "fix, ad-hoc, optimistic, diverge",
}

# Where such a word is another one: what stands around it, or whose file it is in.
ALLOWED = {
    r"pad\w*( \w+){0,3}\W+left|left pad": "prompts are padded on the left",
    r"left(=left|=|: bool|: pad| else )": "the argument for it",
    r"padding side": "transformers' name",
    r"early exit": "the field's name for what TIDE does",
    r"circuit breaker": "ours",
    r"range over rounds": "the spread between repeated measurements",
    r"bad words|tie word embeddings": "transformers' names",
    r"tensor guards unsafe|guard filter fn": "torch's names",
    r"kind=|bisect left": "names of numpy and of Python",
    r"(bar|text|complete|remaining) column": "rich's classes",
    r"arrow left": "a key",
    r"row (in|to) \W*(tide/)?models/families": "a model family is a row of data",
}
ROWS = {
    "src/tide/models/families.py": "a model family is a row of data",
    "src/tide/models/locate.py": "a model family is a row of data",
    "src/tide/report/page.py": "rows of a table in HTML",
}


def hits(text: str, name: str) -> Iterator[str]:
    """Where a text has such a word, as `name:line: word (use instead): what stands around it`."""
    # Identifiers are read as words, fall_back and FallBack too, and lines as one.
    lines = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ").lower()
    whole = re.sub(r"[\n#-]", " ", lines)
    allowed = {
        place
        for known in ALLOWED
        for found in re.finditer(known.replace(" ", r"\s+"), whole)
        for place in range(*found.span())
    }
    for pattern, instead in WORDS.items():
        pattern = rf"(?<![a-z])({pattern})(?![a-z])".replace(" ", r"\s+")
        for found in re.finditer(pattern, whole):
            a_row = found[0].startswith("row") and name in ROWS
            if found.start() not in allowed and not a_row:
                line = lines.count("\n", 0, found.start()) + 1
                around = " ".join(whole[max(0, found.start() - 40) : found.end() + 40].split())
                yield f"{name}:{line}: {found[0]} (use {instead}): {around}"
    for found in re.finditer(r'"""Gives |\.right\b|\bPlace\b|\b_?Gate\(|\bclass _?Gate\b', text):
        line = text.count("\n", 0, found.start()) + 1
        yield f"{name}:{line}: {found[0]}"


def read(path: Path) -> str:
    """The name of a file and its text; of a page in docs, only its tables."""
    lines = path.read_text().splitlines()
    if path.is_relative_to(ROOT / "docs"):
        lines = [line if line.startswith("|") else "" for line in lines]
    return f"{path.stem} " + "\n".join(lines)


@pytest.mark.parametrize(
    "patterns",
    [
        ("src/**/*.py", "src/**/*.css", "src/**/*.js"),
        ("README.md", "docs/**/*.md"),
        ("examples/*.py", "examples/*.md", "examples/*.json"),
    ],
    ids=["source", "pages", "examples"],
)
def test_files(patterns: tuple[str, ...]) -> None:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert len(paths) > 5
    found = [hit for path in paths for hit in hits(read(path), str(path.relative_to(ROOT)))]
    assert not found, "\n".join(found)


def test_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    parser = parser_of(COMMANDS)
    commands = next(action for action in parser._actions if action.dest == "command").choices
    assert isinstance(commands, dict) and commands.keys() == COMMANDS.keys()
    found = list(hits(parser.format_help(), "tide --help"))
    for name, command in commands.items():
        found += hits(command.format_help(), f"tide {name} --help")
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_should() -> None:
    for bad in (
        "tokens that left", "WhoLeaves", "guessed_by", "row.early", "fall_back(2)", "fall\nback",
        "K and\nV", "asked in vain", "self.guard", "the breaker", "a round", "rows", "plain",
        "left-padded prompts of tokens that left", "circuit_breaker = breaker",
        '"""Gives a thing."""', "class Gate:", "score.right",
    ):  # fmt: skip
        assert list(hits(bad, "a file")), bad
    for good in (
        "left-padded", "padding_side='left'", "round(x)", "circuit_breaker", "CircuitBreaker",
        "early-exit", "fallback", "flask", "arrows", "beside", "password", "outside", "the gates",
    ):  # fmt: skip
        assert not list(hits(good, "a file")), good
