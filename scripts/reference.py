"""The tables of the docs that come from the code and the tests, not from result files.

`scripts/tables.py` writes them into the pages.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from dataclasses import fields
from importlib import import_module
from typing import Any

from results import ROOT, read, table

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

# What a family of the tests is known as, where its name does not show it.
KNOWN_AS = {
    "llama": "Llama 2 and 3, SmolLM2, R1 distills of Llama",
    "qwen2": "Qwen2, Qwen2.5, R1 distills of Qwen2.5",
    "qwen3": "Qwen3 (dense)",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_neox": "GPT-NeoX, Pythia",
    "phi": "Phi 1, 1.5, 2",
    "phi3": "Phi 3, Phi 4",
    "falcon": "Falcon (rotary)",
    "cohere": "Command R",
    "llama4_text": "Llama 4 (text)",
    "gpt_oss": "GPT-OSS",
    "deepseek_v3": "DeepSeek V3, R1",
}
# Families whose real weights `tide assess` was run on, and the result file of each.
REAL = {"llama": "smollm2", "gemma3_text": "gemma3_270m", "qwen2": "qwen2_5_coder_0_5b"}
# What a tiny config sets -> what that makes of its attention or its layers.
TRAITS = {
    "sliding_window": "sliding windows",
    "attention_chunk_size": "chunked attention",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "latent KV",
    "final_logit_softcapping": "capped logits",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
}
# Defaults as published in tide-inference 0.2.1, and why ours differ where they do.
PUBLISHED = {
    "exit_threshold": 0.85,
    "min_layers": 8,
    "checkpoint_interval": 4,
    "calibration_samples": 2000,
    "calibration_dataset": "wikitext",
    "convergence_threshold": 0.98,
    "router_bottleneck_dim": 128,
    "exit_strategy": "identity",
    "kv_cache_strategy": "zero_pad",
    "compaction_threshold": 0.25,
}
REASONS = {
    "exit_strategy": "an affine head agrees more often at every checkpoint: "
    "[measured](appendix.md#calibration-of-smollm2-135m-instruct)",
    "kv_cache_strategy": "inexact KV degrades later tokens: [log](log.md)",
}


def models() -> str:
    """Every family of the tests: where it runs, and what is special about it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tide.vllm import ARCHITECTURES
    from tiny import FAMILIES

    rows = []
    for family, config in FAMILIES.items():
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        notes = [note for key, note in TRAITS.items() if config.get(key)]
        if family in REAL:
            name = read(f"assess_{REAL[family]}")["conditions"]["model"]
            notes.append(f"run on real weights: {name}")
        rows.append((
            f"`{family}`", KNOWN_AS.get(family, ""), "tested",
            "tested" if architecture in ARCHITECTURES else "no", "; ".join(notes),
        ))  # fmt: skip
    head = ("model_type", "known as", "transformers", "vLLM plugin", "notes")
    return table(head, rows)


def families() -> str:
    """How many families the tests run."""
    from tiny import FAMILIES

    return str(len(FAMILIES))


def refused() -> str:
    """Every model that the tests see refused, and the error that `tide.attach` raises."""
    import torch

    import tide
    from test_attach import REFUSED, gpt_neo
    from tide.errors import TideError
    from tiny import tiny_model

    def static_cache() -> Any:
        model = tiny_model("llama")
        model.generation_config.cache_implementation = "static"
        return model

    rows = []
    logging.disable(logging.WARNING)
    for make in (*REFUSED, gpt_neo, static_cache):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tide.attach(make())
            except TideError as refusal:
                # How far off a random model is depends on the version of torch.
                message = re.sub(r" \(relative error.*?\)", "", str(refusal))
                rows.append((make.__name__.replace("_", " "), type(refusal).__name__, message))
            else:
                raise SystemExit(f"{make.__name__} is not refused.")
    return table(("what", "error", "message"), rows)


def refused_options() -> str:
    """Options of `generate` that the engine refuses."""
    from tide.generation import _REFUSED

    return table(("option", "why"), [(f"`{name}`", why) for name, why in _REFUSED.items()])


def settings() -> str:
    """`TIDEConfig`, beside what was published."""
    from tide.config import TIDEConfig

    rows = []
    for field in fields(TIDEConfig):
        published = f"`{PUBLISHED[field.name]!r}`" if field.name in PUBLISHED else ""
        rows.append(
            (f"`{field.name}`", published, f"`{field.default!r}`", REASONS.get(field.name, ""))
        )
        if published and published != rows[-1][2] and field.name not in REASONS:
            raise SystemExit(f"{field.name} differs from what was published: add it to REASONS.")
    return table(("setting", "published default", "default here", "why it differs"), rows)


def sequences() -> str:
    """How many prompts a certificate needs if no token differs."""
    from tide.calibration.bounds import fewest_sequences

    deltas = (0.1, 0.05, 0.01)
    rows = [
        (f"{risk:.1%}", *(fewest_sequences(risk, delta) for delta in deltas))
        for risk in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    ]
    return table(("risk", *(f"delta {delta:.0%}" for delta in deltas)), rows)


def commands() -> str:
    """The command line: every command, its arguments and options, from its own parser."""
    from tide.cli import COMMANDS

    return "\n\n".join(_command(name, what) for name, what in COMMANDS.items())


def _command(name: str, what: str) -> str:
    parser = argparse.ArgumentParser(prog=f"tide {name}")
    import_module(f"tide.cli.{name.replace('-', '_')}").options(parser)
    actions = [action for action in parser._actions if action.dest != "help"]
    actions.sort(key=lambda action: bool(action.option_strings))  # arguments before options
    needed = [_positional(a) for a in actions if not a.option_strings]
    needed += [f"{a.option_strings[0]} {_value(a)}" for a in actions if _needed(a)]
    usage = parser.usage or " ".join((parser.prog, *needed, "[options]"))
    rows = [
        (f"`{_flags(a) if a.option_strings else _positional(a)}`", _cell(a.help), _default(a))
        for a in actions
    ]
    rows.append(("`--json`", "print one JSON line at the end", ""))
    parts = (f"## tide {name}", what[0].upper() + what[1:] + ".", f"```text\n{usage}\n```",
             table(("argument", "what", "default"), rows))  # fmt: skip
    return "\n\n".join(parts)


def _positional(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _needed(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.required


def _flags(action: argparse.Action) -> str:
    return " ".join(filter(None, (", ".join(action.option_strings), _value(action))))


def _value(action: argparse.Action) -> str:
    """The placeholder behind a flag; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"{name} ..." if action.nargs in ("+", "*") else name


def _default(action: argparse.Action) -> str:
    value = action.default
    if action.required or value is None or value is False or value == argparse.SUPPRESS:
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("%%", "%")
