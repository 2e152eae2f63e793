"""Measures vLLM with exits or drafts against stock vLLM, interleaved in one run.

    TIDE_DATA=... python bench/vllm_speed.py $(python scripts/weights.py) DIR --what exits \\
        --out bench/results/vllm_exits.json

Every side is an engine of its own; they take turns. `half depth` is stock vLLM with half of the
layers: what leaving at half depth could save at most, K and V not stored.

As many requests as the batch are under way at any time: when one ends, the next comes in. A round
is measured until the last has come in. No prompt is asked twice, so nothing is drafted from an
answer to it; drafts are measured on answers that end where the model ends them, exits on answers of
one length, since half a model does not know where to end.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import chat, parser, report, rows_of, shuffled
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
    ours: dict[str, Any] = {"artifact": artifact, "mode": "lossless"}
    table = drafts(
        method="custom_class", model="tide.vllm.proposer.TableProposer",
        num_speculative_tokens=args.drafts,
    )  # fmt: skip
    found = {
        "stock": eager,
        "context and table": {**table, "additional_config": {"tide": ours}},
        "and what was served": {**table, "additional_config": {"tide": {**ours, "learn": True}}},
    }
    if args.processes:
        # Speculation of this kind knows the tokens only after a step, so vLLM cannot prepare the
        # next one meanwhile, as stock does where it has a process for it.
        found["stock, synchronous"] = {**eager, "async_scheduling": False}
    if args.draft_model:
        found["exported draft"] = drafts(
            method="draft_model", model=str(args.draft_model), num_speculative_tokens=2
        )
    # Last, since after numba, which it loads, this vLLM starts no other engine in a process.
    found["ngram"] = drafts(
        method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=2
    )
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--what", choices=("exits", "drafts"), required=True)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--rounds", type=int, nargs="+", default=[8, 5, 3], help="of each batch")
    options.add_argument("--new", type=int, default=96)
    options.add_argument("--prompt", type=int, default=512, help="most tokens of a prompt")
    options.add_argument("--drafts", type=int, default=8, help="most tokens guessed")
    options.add_argument("--draft-model", type=Path)
    options.add_argument("--min-layers", type=int, default=24)
    options.add_argument("--boldness", type=float, default=1.0)
    options.add_argument(
        "--processes", action="store_true",
        help="engines in processes of their own, as a server has them: vLLM then prepares steps "
        "ahead, and its waiting takes most of a core",
    )  # fmt: skip
    args = options.parse_args()
    if len(args.rounds) != len(args.batch):
        options.error(f"--rounds has {len(args.rounds)} numbers; --batch has {len(args.batch)}.")
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1", KMP_BLOCKTIME="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(args.processes)),
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    engines = {
        name: LLM(
            args.model, dtype=args.dtype, max_model_len=1024, max_num_seqs=32,
            enable_prefix_caching=False, disable_log_stats=False, **of,
        )
        for name, of in sides_of(args).items()
    }  # fmt: skip
    drafted = {name: Drafted() for name in engines}
    for name, engine in engines.items():
        engine.llm_engine.logger_manager.stat_loggers.append(drafted[name])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = shuffled([row["turns"][0] for row in rows_of("spec_bench/question.jsonl")])
    prompts = (
        {"prompt_token_ids": chat(tokenizer, [text])["input_ids"][0, -args.prompt :].tolist()}
        for text in texts
    )
    wanted = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=args.what == "exits")
    results = []
    for batch, rounds in zip(args.batch, args.rounds, strict=True):
        # A warm-up round, then every side answers the same prompts, in turn.
        speed: dict[str, list[float]] = {name: [] for name in engines}
        decoding: dict[str, list[float]] = {name: [] for name in engines}
        said: dict[str, list[Any]] = {name: [] for name in engines}
        steps = Counter[str]()  # of each request, added up
        for turn in range(rounds + 1):
            asked = max(3 * batch, 4) if turn else batch
            some = list(itertools.islice(prompts, asked))
            if len(some) < asked:
                raise SystemExit("Spec-Bench has 480 prompts: ask for fewer --rounds.")
            if turn == 1:
                for counts in drafted.values():
                    counts.clear()
            order = list(engines)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                found = serve(engines[name].llm_engine, some, wanted, batch)
                if turn:
                    speed[name].append(found.rate)
                    decoding[name].append(found.decoding)
                    said[name] += found.answers
                    steps[name] += found.steps
        first = next(iter(engines))
        middle = {name: statistics.median(speed[name]) for name in engines}
        rows = []
        for name in engines:
            ratios = [a / b for a, b in zip(speed[name], speed[first], strict=True)]
            row: dict[str, Any] = {
                "side": name,
                "tokens_per_second": round(middle[name], 1),
                "speedup": round(middle[name] / middle[first], 3),
                "speedup_of_decoding": round(
                    statistics.median(decoding[name]) / statistics.median(decoding[first]), 3
                ),
                "speedup_of_a_round": {
                    "least": round(min(ratios), 3), "median": round(statistics.median(ratios), 3),
                    "most": round(max(ratios), 3),
                },
                "identical_outputs": sum(map(list.__eq__, said[name], said[first])),
                "outputs": len(said[name]),
                **drafted[name],
                "tokens_per_step": round(sum(map(len, said[name])) / steps[name], 3),
            }  # fmt: skip
            rows.append(row)
            print(f"batch {batch}, {name}: {row['speedup']:.3f}x {first}", flush=True)
        if args.what == "exits":
            whole, half = 1 / middle["stock"], 1 / middle["half depth"]
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
        most_new_tokens=args.new,
        ends_where_the_model_does=args.what == "drafts",
        prompts="Spec-Bench, none twice, the batch kept full",
        most_prompt_tokens=args.prompt,
        eager_on_all_sides=True,
        engines_in_processes_of_their_own=args.processes,
        vllm=_version(),
        most_drafts=args.drafts if args.what == "drafts" else None,
    )


class Drafted(Counter[str]):
    """Counts what an engine drafted: a logger of its statistics, as vLLM lets one have.

    The registry of metrics has the last engine of a process only.
    """

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM after every step."""
        if scheduler_stats is not None and (found := scheduler_stats.spec_decoding_stats):
            self["drafts"] += found.num_drafts
            self["drafted_tokens"] += found.num_draft_tokens
            self["accepted_tokens"] += found.num_accepted_tokens

    def log(self) -> None:
        """Called by vLLM now and then."""


@dataclass
class Served:
    """What an engine did with some prompts.

    Attributes:
        rate: tokens per second while requests came in.
        decoding: the same in steps that read no prompt.
        answers: of all requests.
        steps: in how many they came, added up over requests.
    """

    rate: float
    decoding: float
    answers: list[list[int]]
    steps: int


def serve(engine: Any, prompts: list[Any], wanted: Any, batch: int) -> Served:
    """Keep a batch under way until all prompts are answered."""
    answers: dict[str, list[int]] = {}
    under_way: set[str] = set()
    steps, seconds, tokens = 0, Counter[bool](), Counter[bool]()  # by whether a prompt was read
    full = True
    while len(answers) < len(prompts) or under_way:
        while len(answers) < len(prompts) and len(under_way) < batch:
            name = str(len(answers))
            engine.add_request(name, prompts[len(answers)], wanted)
            answers[name] = []
            under_way.add(name)
        full = full and len(under_way) == batch
        reads = not all(answers[name] for name in under_way)
        began = time.perf_counter()
        for out in engine.step():
            said = list(out.outputs[0].token_ids)
            new = len(said) - len(answers[out.request_id])
            steps += bool(new)
            tokens[reads] += new * full
            answers[out.request_id] = said
            if out.finished:
                under_way.discard(out.request_id)
        seconds[reads] += (time.perf_counter() - began) * full
    return Served(
        tokens.total() / seconds.total(),
        tokens[False] / seconds[False],
        list(answers.values()),
        steps,
    )


def _version() -> str:
    from tide.vllm import vllm_version

    return str(vllm_version())


if __name__ == "__main__":
    main()
