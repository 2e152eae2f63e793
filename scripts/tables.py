"""Writes the tables and figures of the docs, from result files and from the code.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a figure within a sentence between
`<!-- figure: NAME -->` and `<!-- end -->`; nothing between them is typed by hand. `--check` only
reports whether they are up to date. Tables of results are made in `speed_tables.py`,
`tree_tables.py`, `scale_tables.py`, `calibration_tables.py`, `risk_tables.py`, `kernel_tables.py`,
`trust_tables.py` and `headline_tables.py`, those of the code in `reference.py` and
`error_tables.py`, figures in `figures.py`.

    python scripts/tables.py [--check]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import calibration_tables as calibration
import error_tables
import headline_tables as headline
import kernel_tables as kernels
import model_tables as models
import reference
import risk_tables as risk
import scale_tables as scale
import speed_tables as speed
import tree_tables as trees
import trust_tables as trust
from figures import figure
from results import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTION = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (\w+) -->).*?(<!-- end -->)")

TABLES: dict[str, Callable[[], str]] = {
    "headline": headline.headline,
    "runner_overhead": speed.runner_overhead,
    "decode_limit": lambda: speed.decode_limit("decode_limit_smollm2"),
    "decode_limit_random": lambda: speed.decode_limit("decode_limit_random"),
    "decode_limit_random_bf16": lambda: speed.decode_limit("decode_limit_random_bf16"),
    "compiled": speed.compiled,
    "compiled_qwen": lambda: speed.compiled("compiled_qwen2_5_coder_0_5b"),
    "compiled_exits": speed.compiled_exits,
    "trees": lambda: trees.tokens_per_pass("trees"),
    "trees_qwen": lambda: trees.tokens_per_pass("trees_qwen2_5_coder_0_5b"),
    "trees_speed": lambda: speed.compiled("trees_speed"),
    "compiled_no_amx": lambda: speed.compiled("compiled_no_amx"),
    "trees_computed": trees.computed,
    "scale_exits": scale.exits,
    "step_costs": speed.step_costs,
    "commits": speed.commits,
    "lossless": speed.lossless,
    "assisted": speed.assisted,
    "lossless_by_category": speed.lossless_by_category,
    "bench": speed.bench,
    "vllm_exits": lambda: speed.vllm("vllm_exits"),
    "vllm_drafts": lambda: speed.vllm("vllm_drafts"),
    "vllm_drafts_no_amx": lambda: speed.vllm("vllm_drafts_no_amx"),
    "vllm_drafts_no_amx_32": lambda: speed.vllm("vllm_drafts_no_amx_32"),
    "vllm_exits_no_amx": lambda: speed.vllm("vllm_exits_no_amx"),
    "vllm_long_prompts": lambda: speed.vllm("vllm_long_prompts"),
    "vllm_load": speed.vllm_load,
    "assess": calibration.assess,
    "calibration_heads": calibration.heads,
    "calibration_gates": calibration.gates,
    "calibration_exits": calibration.exits,
    "calibration_stages": calibration.stages,
    "calibration_others": calibration.other_models,
    "models_depth": models.depth,
    "models_speed": models.speed,
    "models_depth_bf16": lambda: models.depth("depth_{}_bf16"),
    "gate_costs": models.gate_costs,
    "gate_costs_bf16": lambda: models.gate_costs("gate_costs_{}_bf16"),
    "few_tokens": models.few_tokens,
    "self_drafts": calibration.self_drafts,
    "prefill": calibration.prefill,
    "replay": calibration.replay,
    "risk_simulation": risk.simulation,
    "certify_simulation": risk.certify_simulation,
    "vllm_simulation": risk.vllm_simulation,
    "certificates": lambda: risk.certificates("spec_bench", "gsm8k"),
    "certificates_fp32": lambda: risk.certificates("smollm2"),
    "certificates_coder": lambda: risk.certificates(
        "qwen2_5_coder_0_5b", "qwen2_5_coder_0_5b_strict"
    ),
    "certificates_coder_bf16": lambda: risk.certificates("qwen2_5_coder_0_5b_bf16"),
    "certificates_bf16": lambda: risk.certificates(
        "qwen2_5_coder_1_5b_bf16", "qwen2_5_coder_1_5b_bf16_strict"
    ),
    "noise_floor": risk.noise_floor,
    "attack": risk.attack,
    "lm_eval": risk.lm_eval,
    "hostile": trust.hostile,
    "faults": trust.faults,
    "long_context": trust.long_context,
    "long_context_smollm2": lambda: trust.long_context("long_context_smollm2"),
    "soak_threads": trust.soak_threads,
    "soak_serve": trust.soak_serve,
    "soak_memory": trust.soak_memory,
    "soak_engines": lambda: trust.soak_serve("soak_engines"),
    "faults_server": lambda: trust.server_faults("faults_server"),
    "faults_worker": lambda: trust.server_faults("faults_worker"),
    "models": reference.models,
    "refused": reference.refused,
    "refused_options": reference.refused_options,
    "settings": reference.settings,
    "errors": error_tables.errors,
    "sequences": reference.sequences,
    "commands": reference.commands,
    "kernels_float32": lambda: kernels.compiled("float32"),
    "kernels_float16": lambda: kernels.compiled("float16"),
    "kernels_bfloat16": lambda: kernels.compiled("bfloat16"),
    "kernels_moved": kernels.moved,
}


def made(name: str) -> str:
    try:
        return TABLES[name]()
    except FileNotFoundError as error:
        return f"*Not measured yet: there is no {Path(error.filename).name}.*"


def filled(page: str) -> str:
    """A page with its tables and figures as they should be."""
    if re.search(r"^ *<!-- figure:", page, re.MULTILINE):
        raise SystemExit("A figure begins a line, which Markdown takes for a block of HTML.")
    page = SECTION.sub(lambda m: f"{m[1]}{made(m[2])}\n{m[3]}", page)
    return FIGURE.sub(lambda m: f"{m[1]}{figure(m[2])}{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    for page in PAGES:
        before = page.read_text()
        after = filled(before)
        if before != after and args.check:
            raise SystemExit(f"{page.relative_to(ROOT)} is not what scripts/tables.py writes.")
        page.write_text(after)


if __name__ == "__main__":
    main()
