"""The model card: what an artifact is, what was measured when it was made, how to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tide.exits.files import HUB_ID

_ENOUGH = 100  # documents on which rates of some per cent can be told apart


def model_card(record: Mapping[str, Any]) -> str:
    """The README.md of an artifact folder, from the record that calibration keeps."""
    base = " ".join(str(record.get("model", "the model it was made for")).split())
    quoted = json.dumps(base, ensure_ascii=False)  # in YAML and in Python: it may hold anything
    folder = "" if HUB_ID.fullmatch(base) else "  # or the path of its folder"
    exits = "exit_threshold=None"
    if "min_layers" in record:
        exits += f", min_layers={int(record['min_layers'])}"
    lines = [
        "---",
        "library_name: tide",
        "tags: [custom_generate, early-exit, adaptive-depth, speculative-decoding]",
        *([f"base_model: {quoted}"] if "model" in record else []),
        "---",
        "",
        f"# TIDE artifact for {base}",
        "",
        "Exit heads, thresholds and a draft table for a frozen causal language model. It holds no "
        "weights of the model, and no code but the import that lets `generate` find it.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM",
        "from tide import TIDE, TIDEConfig",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({quoted}){folder}",
        'engine = TIDE(model, "path/to/this/folder")  # lossless',
        f'engine = TIDE(model, "path/to/this/folder", TIDEConfig({exits}))  # exits',
        "# or, without an engine of your own (runs the code in custom_generate/):",
        'model.generate(..., custom_generate="path/to/this/folder", trust_remote_code=True)',
        "```",
        "",
    ]
    if "heads" in record:
        lines += ["## Exit heads", "", *_heads(record["heads"]), ""]
    if "exits" in record:
        lines += ["## Exits chosen", "", *_exits(record), ""]
    if "documents" in record:
        documents = record["documents"]
        lines += [
            "## How it was made",
            "",
            f"On {documents['fit']} documents for fitting and {documents['tuning']} for thresholds"
            f"{', answered by the model itself' if record.get('on_policy') else ''}; "
            f"{documents['certify']} were set aside for certification. Thresholds were chosen, not "
            "certified: `tide certify` does that.",
        ]
    return "\n".join(lines) + "\n"


def _heads(heads: Mapping[str, Any]) -> list[str]:
    lines = ["| after layers | agrees with full depth | untrained |", "|---|---|---|"]
    for layer, fitted, identity in zip(
        heads["layers"], heads["agreement"], heads["identity"], strict=True
    ):
        lines.append(f"| {layer + 1} | {fitted:.1%} | {identity:.1%} |")
    return lines


def _exits(record: Mapping[str, Any]) -> list[str]:
    lines = ["| chosen for | exits after layers | exit rate | error rate | depth saved |"]
    lines.append("|---|---|---|---|---|")
    over = False
    for risk, options in record["exits"].items():
        found = next(option for option in options if option["best"])
        missed = found["error_rate"] > float(risk)
        over = over or missed
        after = ", ".join(str(layer + 1) for layer in found["layers"])
        lines.append(
            f"| {float(risk):.0%} | {after} | {found['exit_rate']:.1%} | "
            f"{found['error_rate']:.1%}{' (over)' if missed else ''} | "
            f"{found['depth_saved']:.1%} |"
        )
    if "documents" in record:
        tuning = record["documents"]["tuning"]
        measured = f"Measured on about a third of the {tuning} documents for thresholds"
        few = ", so these rates are noisy. Calibrate with some hundreds of prompts."
        lines += ["", measured + (few if tuning < _ENOUGH else ".")]
    if over:
        lines += [
            "",
            "Over: on documents that did not choose the thresholds, more tokens were wrong than "
            "they were chosen for.",
        ]
    return lines
