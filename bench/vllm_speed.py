"""Measures vLLM with exits or drafts against stock vLLM, interleaved in one run.

    TIDE_DATA=... python bench/vllm_speed.py $(python scripts/weights.py) DIR --what exits \\
        --out bench/results/vllm_exits.json

Every side is an engine of its own; they take turns. `half depth` is stock vLLM with half of the
layers: what leaving at half depth could save at most, K and V not stored.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from measure import chat, parser, report, spec_bench
from transformers import AutoConfig, AutoTokenizer

SHARE = 0.6


def sides_of(args: Any) -> dict[str, dict[str, Any]]:
    """Options of the engine of each side; the first is the baseline."""
    eager: dict[str, Any] = {"enforce_eager": True}

    def tide(**given: Any) -> dict[str, Any]:
        return {**eager, "additional_config": {"tide": given}}

    def drafts(**config: Any) -> dict[str, Any]:
        return {**eager, "speculative_config": config}

    artifact = str(args.artifact)
    if args.what == "exits":
        layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
        return {
            "stock": eager,
            # Weights made up: vLLM loads no part of a checkpoint, and time does not depend on them.
            "half depth": {
                **eager, "hf_overrides": {"num_hidden_layers": layers // 2}, "load_format": "dummy",
            },
            "exits off": tide(artifact=artifact, uncertified=True, boldness=-1.0),
            "asked, none leaves": tide(script=0.0, audit_rate=0.0),
            f"{SHARE:.0%} leave at half depth": tide(script=SHARE, audit_rate=0.0),
            "all leave at half depth": tide(script=1.0, audit_rate=0.0),
            "calibrated exits": tide(
                artifact=artifact, uncertified=True, min_layers=args.min_layers,
                boldness=args.boldness,
            ),
        }  # fmt: skip
    found = {
        "stock": eager,
        # Speculation of this kind knows the tokens only after a step, so vLLM cannot prepare the
        # next one meanwhile, as stock does.
        "stock, synchronous": {**eager, "async_scheduling": False},
        "ngram": drafts(
            method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=2
        ),
        "context and table": {
            **drafts(
                method="custom_class", model="tide.vllm.proposer.TableProposer",
                num_speculative_tokens=args.drafts,
            ),
            **{"additional_config": {"tide": {"artifact": artifact, "mode": "lossless"}}},
        },
    }  # fmt: skip
    if args.draft_model:
        found["exported draft"] = drafts(
            method="draft_model", model=str(args.draft_model), num_speculative_tokens=2
        )
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--what", choices=("exits", "drafts"), required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--repeats", type=int, default=4)
    options.add_argument("--new", type=int, default=64)
    options.add_argument("--prompt", type=int, default=512, help="most tokens of a prompt")
    options.add_argument("--drafts", type=int, default=6, help="most tokens guessed")
    options.add_argument("--draft-model", type=Path)
    options.add_argument("--min-layers", type=int, default=24)
    options.add_argument("--boldness", type=float, default=1.0)
    options.add_argument(
        "--in-process", action="store_true",
        help="all engines in this process: quieter, but vLLM prepares no step ahead then",
    )  # fmt: skip
    args = options.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1", KMP_BLOCKTIME="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(not args.in_process)),
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    engines = {
        name: LLM(
            args.model, dtype=args.dtype, max_model_len=1024, max_num_seqs=32,
            enable_prefix_caching=False, disable_log_stats=False, **of,
        )
        for name, of in sides_of(args).items()
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    questions = spec_bench(args.repeats * 32)
    prompts = [
        {"prompt_token_ids": chat(tokenizer, [q["text"]])["input_ids"][0, -args.prompt :].tolist()}
        for q in questions
    ]
    wanted = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    results = []
    for batch in args.batch:
        # A warm-up round, then every side answers the same prompts, in turn.
        rounds = args.repeats * 32 // max(batch, 4)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        said: dict[str, list[Any]] = {name: [] for name in engines}
        counted = {name: Counter[str]() for name in engines}
        for turn in range(rounds + 1):
            some = prompts[:batch] if not turn else prompts[(turn - 1) * batch : turn * batch]
            order = list(engines)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                before, began = _counters(engines[name]), time.perf_counter()
                out = engines[name].generate(some, wanted, use_tqdm=False)
                if turn:
                    seconds[name].append(time.perf_counter() - began)
                    counted[name].update(_counters(engines[name]))
                    counted[name].subtract(before)
                    said[name] += [list(answer.outputs[0].token_ids) for answer in out]
        first = next(iter(engines))
        middle = {name: statistics.median(seconds[name]) for name in engines}
        rows = []
        for name in engines:
            ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
            row: dict[str, Any] = {
                "side": name,
                "tokens_per_second": round(
                    batch * args.new * rounds / sum(seconds[name]), 1
                ),
                "speedup": round(middle[first] / middle[name], 3),
                "speedup_of_a_round": {
                    "least": round(min(ratios), 3), "median": round(statistics.median(ratios), 3),
                    "most": round(max(ratios), 3),
                },
                "identical_outputs": sum(map(list.__eq__, said[name], said[first])),
                "outputs": len(said[name]),
                **counted[name],
            }  # fmt: skip
            rows.append(row)
            print(f"batch {batch}, {name}: {row['speedup']:.3f}x {first}", flush=True)
        if args.what == "exits":
            whole, half = middle["stock"], middle["half depth"]
            for row in rows:
                share = {f"{SHARE:.0%} leave at half depth": SHARE, "all leave at half depth": 1.0}
                if (leaving := share.get(row["side"])) is not None:
                    row["limit"] = round(whole / ((1 - leaving) * whole + leaving * half), 3)
                    row["reached"] = round(row["speedup"] / row["limit"], 3)
        results.append({"batch": batch, "rounds": rounds, "sides": rows})
    report(
        f"vLLM with {args.what} against stock vLLM",
        args,
        results,
        dtype=args.dtype,
        new_tokens=args.new,
        prompts="Spec-Bench",
        most_prompt_tokens=args.prompt,
        eager_on_all_sides=True,
        in_process=args.in_process,
        vllm=_version(),
        most_drafts=args.drafts if args.what == "drafts" else None,
    )


def _counters(engine: Any) -> dict[str, int]:
    """What was drafted so far, by all engines of this process: they share vLLM's registry."""
    wanted = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "drafted_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
    }
    found = {m.name: m for m in engine.get_metrics() if m.name in wanted}
    return {wanted[name]: int(metric.value) for name, metric in found.items()}


def _version() -> str:
    from tide.vllm import vllm_version

    return str(vllm_version())


if __name__ == "__main__":
    main()
