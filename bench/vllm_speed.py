"""vLLM with exits or drafts against vLLM alone, interleaved in one run.

    TIDE_DATA=... python bench/vllm_speed.py $(python scripts/weights.py) DIR --what exits \\
        --out bench/results/vllm_exits.json

Every method has its own engine; they take turns. `half depth` is vLLM with half of the layers: an
upper bound of what exits at half depth can save, since it stores no KV above them.

The batch is kept full: when a request ends, the next one comes in. A round is measured until the
last request has come in. No prompt is used twice, so nothing is drafted from an answer to it.
Drafts are measured on answers that end where the model ends them; exits on answers of one length,
since half a model does not know where to end.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import chat, parser, report, rows_of, shuffled
from transformers import AutoConfig, AutoTokenizer

SHARE = 0.6
EXIT_SHARES = {f"{SHARE:.0%} exit at half depth": SHARE, "all exit at half depth": 1.0}


def methods_of(args: Any) -> dict[str, dict[str, Any]]:
    """Engine options of each method; the first is the baseline."""
    eager: dict[str, Any] = {"enforce_eager": True}

    def tide(**given: Any) -> dict[str, Any]:
        return {**eager, "additional_config": {"tide": given}}

    def drafts(**config: Any) -> dict[str, Any]:
        return {**eager, "speculative_config": config}

    artifact = str(args.artifact)
    if args.what == "exits":
        layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
        return {
            "vLLM": eager,
            # Dummy weights: vLLM cannot load a part of a checkpoint, and they do not change timing.
            "half depth": {
                **eager, "hf_overrides": {"num_hidden_layers": layers // 2}, "load_format": "dummy",
            },
            "exits off": tide(artifact=artifact, uncertified=True, threshold_scale=-1.0),
            "gates on, no exits": tide(script=0.0, audit_rate=0.0),
            **{name: tide(script=share, audit_rate=0.0) for name, share in EXIT_SHARES.items()},
            "calibrated exits": tide(
                artifact=artifact, uncertified=True, min_layers=args.min_layers,
                threshold_scale=args.threshold_scale,
            ),
        }  # fmt: skip
    ours: dict[str, Any] = {"artifact": artifact, "mode": "lossless"}
    table = drafts(
        method="custom_class", model="tide.vllm.proposer.TableProposer",
        num_speculative_tokens=args.drafts,
    )  # fmt: skip
    shared = {**ours, "cross_request_drafts": True}
    found = {
        "vLLM": eager,
        "context and table": {**table, "additional_config": {"tide": ours}},
        "+ cross-request drafts": {**table, "additional_config": {"tide": shared}},
    }
    if args.processes:
        # A `custom_class` proposer knows the tokens only after a step, so vLLM cannot prepare the
        # next one meanwhile, as it does without drafts when it has a process for that.
        found["vLLM, synchronous"] = {**eager, "async_scheduling": False}
    if args.draft_model:
        found["exported draft"] = drafts(
            method="draft_model", model=str(args.draft_model), num_speculative_tokens=2
        )
    # Last: it loads numba, after which this vLLM starts no other engine in the process.
    found["ngram"] = drafts(
        method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=2
    )
    return found


def options() -> Any:
    """The arguments of the script."""
    out = parser(__doc__ or "")
    out.add_argument("artifact", type=Path)
    out.add_argument("--what", choices=("exits", "drafts"), required=True)
    out.add_argument("--dtype", default="bfloat16")
    out.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    out.add_argument("--rounds", type=int, nargs="+", default=[8, 5, 3], help="for each batch")
    out.add_argument("--new", type=int, default=96, help="most new tokens of a request")
    out.add_argument("--prompt", type=int, default=512, help="most tokens of a prompt")
    out.add_argument("--drafts", type=int, default=8, help="longest draft, in tokens")
    out.add_argument("--draft-model", type=Path, help="from `tide export-draft`")
    out.add_argument("--min-layers", type=int, default=24, help="of the calibrated exits")
    out.add_argument("--threshold-scale", type=float, default=1.0, help="of the calibrated exits")
    out.add_argument(
        "--processes", action="store_true",
        help="run each engine in its own process, as a server does: vLLM then prepares steps "
        "ahead, but its busy waiting takes most of a core",
    )  # fmt: skip
    args = out.parse_args()
    if len(args.rounds) != len(args.batch):
        out.error(f"--rounds has {len(args.rounds)} numbers; --batch has {len(args.batch)}.")
    return args


def main() -> None:
    args = options()
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
        for name, of in methods_of(args).items()
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = shuffled([row["turns"][0] for row in rows_of("spec_bench/question.jsonl")])
    prompts = (
        {"prompt_token_ids": chat(tokenizer, [text])["input_ids"][0, -args.prompt :].tolist()}
        for text in texts
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=args.what == "exits")
    drafted = {name: Drafted() for name in engines}
    for name, engine in engines.items():
        engine.llm_engine.logger_manager.stat_loggers.append(drafted[name])
    results = []
    for batch, rounds in zip(args.batch, args.rounds, strict=True):
        measured = {name: Measured(drafted[name]) for name in engines}
        for turn in range(rounds + 1):  # the first is a warm-up
            count = max(3 * batch, 4) if turn else batch
            some = take(prompts, count)
            if turn == 1:
                for counts in drafted.values():
                    counts.clear()
            order = list(engines)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                served = serve(engines[name].llm_engine, some, sampling, batch)
                if turn:
                    measured[name].rounds.append(served)
        results.append({"batch": batch, "rounds": rounds, "methods": summarise(measured)})
        for row in results[-1]["methods"]:
            print(f"batch {batch}, {row['method']}: {row['speedup']:.3f}x vLLM", flush=True)
    report(
        f"vLLM with {args.what} against vLLM",
        args,
        results,
        dtype=args.dtype,
        most_new_tokens=args.new,
        ends_where_the_model_does=args.what == "drafts",
        prompts="Spec-Bench, none twice, the batch kept full",
        most_prompt_tokens=args.prompt,
        eager_for_all_methods=True,
        engines_in_processes_of_their_own=args.processes,
        vllm=_version(),
        most_drafts=args.drafts if args.what == "drafts" else None,
    )


class Drafted(Counter[str]):
    """Counts the draft tokens of an engine, as a logger of vLLM's statistics.

    vLLM's metrics registry has the last engine of a process only.
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
    """One round of one engine.

    Attributes:
        rate: tokens per second while requests came in.
        decoding: the same over steps that read no prompt.
        answers: of all requests.
        steps: that returned tokens, added up over requests.
    """

    rate: float
    decoding: float
    answers: list[list[int]]
    steps: int


@dataclass
class Measured:
    """All rounds of one method at one batch."""

    drafted: Drafted
    rounds: list[Served] = field(default_factory=list)

    @property
    def answers(self) -> list[list[int]]:
        """Of all rounds."""
        return [answer for served in self.rounds for answer in served.answers]


def summarise(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """The results of all methods at one batch, against the first."""
    baseline = next(iter(measured.values()))
    middle = {
        name: statistics.median(served.rate for served in one.rounds)
        for name, one in measured.items()
    }
    reference = statistics.median(served.decoding for served in baseline.rounds)
    found = []
    for name, one in measured.items():
        ratios = [a.rate / b.rate for a, b in zip(one.rounds, baseline.rounds, strict=True)]
        decoding = statistics.median(served.decoding for served in one.rounds)
        row: dict[str, Any] = {
            "method": name,
            "tokens_per_second": round(middle[name], 1),
            "speedup": round(middle[name] / middle["vLLM"], 3),
            "decode_only_speedup": round(decoding / reference, 3),
            "range_over_rounds": {
                "least": round(min(ratios), 3), "median": round(statistics.median(ratios), 3),
                "most": round(max(ratios), 3),
            },
            "exact_match_outputs": sum(map(list.__eq__, one.answers, baseline.answers)),
            "outputs": len(one.answers),
            **one.drafted,
            "tokens_per_step": round(
                sum(map(len, one.answers)) / sum(served.steps for served in one.rounds), 3
            ),
        }  # fmt: skip
        if (share := EXIT_SHARES.get(name)) is not None:
            full, half = 1 / middle["vLLM"], 1 / middle["half depth"]
            row["ideal_speedup"] = round(full / ((1 - share) * full + share * half), 3)
            row["share_of_ideal"] = round(row["speedup"] / row["ideal_speedup"], 3)
        found.append(row)
    return found


def take(prompts: Iterator[Any], count: int) -> list[Any]:
    """The next prompts."""
    some = list(itertools.islice(prompts, count))
    if len(some) < count:
        raise SystemExit("Spec-Bench has 480 prompts, too few for that many --rounds.")
    return some


def serve(engine: Any, prompts: list[Any], sampling: Any, batch: int) -> Served:
    """Keep a batch running until all prompts are answered."""
    answers: dict[str, list[int]] = {}
    running: set[str] = set()
    steps, seconds, tokens = 0, Counter[bool](), Counter[bool]()  # by whether a prompt was read
    full = True
    while len(answers) < len(prompts) or running:
        while len(answers) < len(prompts) and len(running) < batch:
            name = str(len(answers))
            engine.add_request(name, prompts[len(answers)], sampling)
            answers[name] = []
            running.add(name)
        full = full and len(running) == batch
        reads = not all(answers[name] for name in running)
        began = time.perf_counter()
        for out in engine.step():
            answer = list(out.outputs[0].token_ids)
            new = len(answer) - len(answers[out.request_id])
            steps += bool(new)
            tokens[reads] += new * full
            answers[out.request_id] = answer
            if out.finished:
                running.discard(out.request_id)
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
