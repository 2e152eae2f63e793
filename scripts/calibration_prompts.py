"""Writes the prompts that the committed results were calibrated on: WikiText-2 and HumanEval.

None of them comes from a source that the benchmarks use (Spec-Bench, GSM8K). Users of the library
name a file or a data set of their own.

    TIDE_DATA=... python scripts/calibration_prompts.py prompts.jsonl
    TIDE_DATA=... python scripts/calibration_prompts.py code.jsonl --code    # for models of code
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
from pathlib import Path

# Tasks about an article of WikiText-2, by its title or a passage of it.
TASKS = (
    "Write a short article about {title}.",
    "What is {title}?",
    "Explain {title} to a child, step by step.",
    "List five facts about {title}.",
    "Write a story in which {title} plays a part.",
    "Write an email to a friend who wants to learn about {title}.",
    "Why does {title} matter? Give three reasons.",
    "Pretend to be an expert on {title}. What would you say first?",
    "Give me tips for a talk about {title}.",
    "What do {title} and {other} have in common, and how do they differ?",
    "Summarize: {passage}",
    "Summarize in two sentences: {passage}",
    "Answer from this text. Who or what is it about, and what happened? {passage}",
    "Extract all names and dates from this text as a list: {passage}",
    "Continue this text: {passage}",
    "Rewrite this text in simple words: {passage}",
    "Translate English to German: {sentence}",
    "Translate English to French: {sentence}",
    "When did this happen? {sentence}",
    "Is this sentence true? Explain. {sentence}",
)
CODE = ("Complete this Python function:\n{code}", "Explain what this function does:\n{code}")
MORE_CODE = (
    "Write unit tests for this function:\n{code}",
    "Translate this function to JavaScript, and implement it:\n{code}",
)


def detokenized(text: str) -> str:
    """The text without WikiText's own spacing."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    return text.replace(" 's", "'s").replace('" ', '"', 1).strip()


def articles(path: Path) -> list[tuple[str, str]]:
    """The title and the first passage of each article."""
    found: list[tuple[str, str]] = []
    title = None
    with gzip.open(path, "rt") as file:
        for line in file:
            heading = re.fullmatch(r" = ([^=]+) = \n?", line)
            if heading:
                title = detokenized(heading[1])
            elif title and len(line) > 300:
                found.append((title, detokenized(line)))
                title = None
    return found


def prompts(data: Path, *, code: bool = False, seed: int = 0) -> list[dict[str, str]]:
    """Two tasks on each article and two on each function, in random order.

    Args:
        code: no articles, and four tasks on each function.
    """
    draw = random.Random(seed)
    wiki = [] if code else articles(data / "wikitext2" / "train.raw.gz")
    out = []
    for number, (title, passage) in enumerate(wiki):
        for task in (TASKS[2 * number % len(TASKS)], TASKS[(2 * number + 1) % len(TASKS)]):
            cut = passage[: draw.randint(300, 1200)]
            whole = re.fullmatch(r"(.{100,}\.) .*", cut)  # up to the end of a sentence
            sentence = re.match(r".{40,}?\. ", cut)
            text = task.format(
                title=title, other=draw.choice(wiki)[0], passage=whole[1] if whole else cut,
                sentence=sentence[0].strip() if sentence else cut,
            )  # fmt: skip
            out.append({"prompt": text, "document": title})
    with gzip.open(data / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            tasks = (*CODE, *MORE_CODE) if code else CODE
            out += [
                {"prompt": task.format(code=row["prompt"].strip()), "document": row["task_id"]}
                for task in tasks
            ]
    draw.shuffle(out)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--code", action="store_true", help="for models of code")
    args = parser.parse_args()
    if "TIDE_DATA" not in os.environ:
        raise SystemExit("Set TIDE_DATA to a folder that has wikitext2/ and humaneval/.")
    rows = prompts(Path(os.environ["TIDE_DATA"]), code=args.code)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts written to {args.out}")
