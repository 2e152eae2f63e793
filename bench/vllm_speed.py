"""vLLM with exits or drafts against vLLM as `vllm serve` starts it, interleaved in one run.

    TIDE_DATA=... python bench/vllm_speed.py $(python scripts/weights.py) --what exits \\
        --out bench/results/vllm_exits.json

Every method is an engine in a process of its own; they take turns, and the others wait. vLLM is
compiled and caches prefixes, as by default; "plugin not loaded" means `VLLM_PLUGINS=`. The speed-up
is over the fastest method without us. `half depth` is vLLM with half of the layers: an upper bound
of what exits at half depth can save, since it stores no KV above them.

The batch is kept full: when a request ends, the next one comes in. A round is measured until the
last request has come in. No engine sees a prompt twice, so nothing is drafted from an answer to it.
Drafts are measured on answers that end where the model ends them; exits on answers of one length,
since half a model does not know where to end.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import chat, parser, report, rows_of, shuffled
from transformers import AutoConfig, AutoTokenizer

from tide.calibration.data import load_by_category

SHARE = 0.6
EXIT_SHARES = {f"{SHARE:.0%} exit at half depth": SHARE, "all exit at half depth": 1.0}
STOCK = "vLLM"
UPPER_BOUND = "half depth"


@dataclass
class Method:
    """One way to serve: engine options, whether our plugin is loaded, whether it is ours."""

    options: dict[str, Any] = field(default_factory=dict)
    plugin: bool = True
    ours: bool = True


def methods_of(args: Any) -> dict[str, Method]:
    """Every method; the first is vLLM as people start it."""
    eager: dict[str, Any] = {"enforce_eager": True}

    def tide(**given: Any) -> dict[str, Any]:
        return {"additional_config": {"tide": given}}

    def drafts(**config: Any) -> dict[str, Any]:
        return {"speculative_config": config}

    found = {STOCK: Method(plugin=False, ours=False)}
    if args.what == "exits":
        layers = AutoConfig.from_pretrained(args.model).num_hidden_layers
        found |= {
            # Dummy weights: vLLM cannot load a part of a checkpoint, and they do not change timing.
            UPPER_BOUND: Method(
                {"hf_overrides": {"num_hidden_layers": layers // 2}, "load_format": "dummy"},
                plugin=False, ours=False,
            ),
            "gates on, no exits": Method(tide(script=0.0, audit_rate=0.0)),
            **{
                name: Method(tide(script=share, audit_rate=0.0))
                for name, share in EXIT_SHARES.items()
            },
        }  # fmt: skip
        if args.artifact is not None:
            # By cost they are evaluated on CPUs only.
            gates = "always" if torch.cuda.is_available() else "by_cost"
            calibrated = {"artifact": str(args.artifact), "uncertified": True, "gates": gates,
                          "min_layers": args.min_layers}  # fmt: skip
            found["calibrated exits"] = Method(
                tide(**calibrated, threshold_scale=args.threshold_scale)
            )
        return found
    proposer = drafts(
        method="custom_class", model="tide.vllm.proposer.TableProposer",
        num_speculative_tokens=args.drafts,
    )  # fmt: skip
    lossless = {**proposer, **tide(mode="lossless")}
    found |= {
        "vLLM, plugin loaded": Method(ours=False),
        "vLLM, eager": Method(eager, plugin=False, ours=False),
        "ngram": Method(
            drafts(
                method="ngram", num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=2
            ),
            plugin=False, ours=False,
        ),
        "drafts": Method(lossless),
        # As suffix decoding does by default: from answers to other requests too.
        "drafts, cross-request": Method(
            {**proposer, **tide(mode="lossless", cross_request_drafts=True)}
        ),
        "drafts, eager": Method({**eager, **lossless}),
    }  # fmt: skip
    if importlib.util.find_spec("arctic_inference") is not None:
        found["suffix"] = Method(
            drafts(method="suffix", num_speculative_tokens=32), plugin=False, ours=False
        )
    if args.artifact is not None:
        found["drafts, table"] = Method(
            {**proposer, **tide(mode="lossless", artifact=str(args.artifact))}
        )
    if args.draft_model:
        found["exported draft"] = Method(
            drafts(method="draft_model", model=str(args.draft_model), num_speculative_tokens=2)
        )
    return found


def options() -> Any:
    """The arguments of the script."""
    out = parser(__doc__ or "")
    out.add_argument("--artifact", type=Path, help="also measure what calibration made")
    out.add_argument("--what", choices=("exits", "drafts"), required=True)
    out.add_argument("--only", nargs="+", help="these methods, beside vLLM")
    out.add_argument("--data", help="prompts as `tide bench` takes them, instead of Spec-Bench")
    out.add_argument("--memory", type=float, help="share of a GPU's memory for each engine")
    out.add_argument("--dtype", default="bfloat16")
    out.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    out.add_argument("--rounds", type=int, nargs="+", default=[8, 5, 3], help="for each batch")
    out.add_argument("--restart", action="store_true", help="start the engines anew for each batch")
    out.add_argument("--new", type=int, default=96, help="most new tokens of a request")
    out.add_argument("--prompt", type=int, default=512, help="most tokens of a prompt")
    out.add_argument(
        "--join", action="store_true", help="join prompts until each has --prompt tokens"
    )
    out.add_argument("--drafts", type=int, default=8, help="longest draft, in tokens")
    out.add_argument("--draft-model", type=Path, help="from `tide export-draft`")
    out.add_argument("--min-layers", type=int, default=24, help="of the calibrated exits")
    out.add_argument("--threshold-scale", type=float, default=1.0, help="of the calibrated exits")
    args = out.parse_args()
    if len(args.rounds) != len(args.batch):
        out.error(f"--rounds has {len(args.rounds)} numbers; --batch has {len(args.batch)}.")
    return args


class Engine:
    """A method in a process of its own, which waits without using a core."""

    def __init__(self, args: Any, method: Method) -> None:
        here, there = multiprocessing.get_context("spawn").Pipe()
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1",
            KMP_BLOCKTIME="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )  # fmt: skip
        os.environ["VLLM_PLUGINS"] = "tide" if method.plugin else ""
        given = {"dtype": args.dtype, "max_model_len": args.prompt + args.new + 512,
                 "max_num_seqs": 32, **method.options}  # fmt: skip
        if args.memory is not None:
            given["gpu_memory_utilization"] = args.memory
        began = time.perf_counter()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve_rounds, args=(there, args.model, given), daemon=True
        )
        self._process.start()
        self._pipe = here
        self.compiles = self._pipe.recv()  # it is ready
        self.seconds_to_start = time.perf_counter() - began

    def round(self, prompts: list[Any], new: int, ends: bool, batch: int) -> Served:
        """Serve prompts, the batch kept full."""
        self._pipe.send((prompts, new, ends, batch))
        served: Served = self._pipe.recv()
        return served

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _serve_rounds(pipe: Any, model: str, given: dict[str, Any]) -> None:
    """The process of an engine: serve what comes through the pipe, for ever."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, disable_log_stats=False, **given)
    drafted = Drafted()
    llm.llm_engine.logger_manager.stat_loggers.append(drafted)
    pipe.send(_compiles())
    while True:
        prompts, new, ends, batch = pipe.recv()
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=not ends)
        drafted.clear()
        served = serve(llm.llm_engine, prompts, sampling, batch)
        served.drafted, served.compiles = dict(drafted), _compiles()
        pipe.send(served)


def _compiles() -> int:
    """Graphs that torch has traced in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def prompts_of(args: Any) -> Iterator[dict[str, Any]]:
    """In random order, each prompt once; joined, where long ones are wanted."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.data is None:
        given = [row["turns"][0] for row in rows_of("spec_bench/question.jsonl")]
    else:
        given = [prompt.text for prompt in load_by_category(args.data, 4096)]
    texts = iter(shuffled(given))
    for text in texts:
        ids = chat(tokenizer, [text])["input_ids"][0].tolist()
        while args.join and len(ids) < args.prompt:
            if (more := next(texts, None)) is None:
                return
            text = f"{more}\n\n{text}"
            ids = chat(tokenizer, [text])["input_ids"][0].tolist()
        yield {"prompt_token_ids": ids[-args.prompt :]}


def measure(
    args: Any, methods: dict[str, Method], plan: list[tuple[int, int]], given: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Start the engines, and give the results of each batch with so many rounds."""
    prompts, engines = iter(given), {}
    for name, method in methods.items():
        engines[name] = Engine(args, method)
        print(f"{name}: ready after {engines[name].seconds_to_start:.0f} s", flush=True)
    for batch, rounds in plan:
        measured: dict[str, list[Served]] = {name: [] for name in engines}
        for turn in range(rounds + 1):  # the first is a warm-up
            some = list(itertools.islice(prompts, per_round(batch) if turn else batch))
            order = list(engines)[:: -1 if turn % 2 else 1]  # none always follows the same one
            start = turn // 2 % len(order)
            for name in order[start:] + order[:start]:
                served = engines[name].round(some, args.new, args.what == "drafts", batch)
                if turn:
                    measured[name].append(served)
        yield {
            "batch": batch, "rounds": rounds,
            "seconds_to_start": {name: round(of.seconds_to_start) for name, of in engines.items()},
            "methods": summarise(measured, methods, engines),
        }  # fmt: skip
    for engine in engines.values():
        engine.stop()


def main() -> None:
    args = options()
    methods = methods_of(args)
    if args.only:
        if unknown := set(args.only) - methods.keys():
            raise SystemExit(
                f"There is no method {unknown} here. The methods are: {list(methods)}."
            )
        methods = {name: of for name, of in methods.items() if name in (STOCK, *args.only)}
    given = list(prompts_of(args))
    plan = list(zip(args.batch, args.rounds, strict=True))
    parts = [[one] for one in plan] if args.restart else [plan]
    wanted = max(sum(b + n * per_round(b) for b, n in part) for part in parts)
    if len(given) < wanted:
        raise SystemExit(f"There are {len(given)} prompts; that many --rounds need {wanted}.")
    used = {"most_drafts": args.drafts} if args.what == "drafts" else {}
    if args.what == "exits" and args.artifact is not None:
        used = {"min_layers": args.min_layers, "threshold_scale": args.threshold_scale}
    results: list[dict[str, Any]] = []
    for found in itertools.chain.from_iterable(measure(args, methods, p, given) for p in parts):
        results.append(found)
        for row in found["methods"]:
            print(f"batch {found['batch']}, {row['method']}: {row['speedup']:.3f}x", flush=True)
        report(
            f"vLLM with {args.what} against the fastest vLLM without us",
            args,
            results,
            dtype=args.dtype,
            most_new_tokens=args.new,
            ends_where_the_model_does=args.what == "drafts",
            prompts=f"{args.data or 'Spec-Bench'}, none twice, the batch kept full"
            + ", joined" * args.join
            + ", engines started anew for each batch" * args.restart,
            most_prompt_tokens=args.prompt,
            vllm=_version(),
            preloaded=[
                Path(lib).name for lib in os.environ.get("LD_PRELOAD", "").split(":") if lib
            ],
            **used,
        )


class Drafted(Counter[str]):
    """Counts the draft tokens of an engine, as a logger of vLLM's statistics."""

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
        drafted: draft tokens, by what became of them.
        compiles: graphs traced by the process so far.
    """

    rate: float
    decoding: float
    answers: list[list[int]]
    steps: int
    drafted: dict[str, int] = field(default_factory=dict)
    compiles: int = 0


def summarise(
    measured: dict[str, list[Served]], methods: dict[str, Method], engines: dict[str, Engine]
) -> list[dict[str, Any]]:
    """The results of all methods at one batch, against the fastest that is not ours."""
    middle = {
        name: statistics.median(served.rate for served in rounds)
        for name, rounds in measured.items()
    }
    others = [name for name in measured if not methods[name].ours and name != UPPER_BOUND]
    best = max(others, key=lambda name: middle[name])
    decoding = {
        name: statistics.median(served.decoding for served in rounds)
        for name, rounds in measured.items()
    }

    def ratios(name: str, other: str, what: str = "rate") -> list[float]:
        """How much faster one method was than another, in each round."""
        pairs = zip(measured[name], measured[other], strict=True)
        return [getattr(a, what) / getattr(b, what) for a, b in pairs]

    def over(name: str, other: str, what: str = "rate") -> float:
        return round(statistics.median(ratios(name, other, what)), 3)

    found = []
    for name, rounds in measured.items():
        answers = [answer for served in rounds for answer in served.answers]
        expected = [answer for served in measured[STOCK] for answer in served.answers]
        drafted: Counter[str] = sum((Counter(served.drafted) for served in rounds), Counter())
        row: dict[str, Any] = {
            "method": name,
            "tokens_per_second": round(middle[name], 1),
            "speedup": over(name, best),
            "speedup_over_vllm": over(name, STOCK),
            "decode_only_speedup": over(name, best, "decoding"),
            "decode_only_speedup_over_vllm": over(name, STOCK, "decoding"),
            "range_over_rounds": [round(f(ratios(name, best)), 3) for f in (min, max)],
            "p20_p80_of_rounds": np.quantile(ratios(name, best), (0.2, 0.8)).round(3).tolist(),
            "fastest_without_us": name == best,
            "exact_match_outputs": sum(map(list.__eq__, answers, expected)),
            "outputs": len(answers),
            **drafted,
            "tokens_per_step": round(
                sum(map(len, answers)) / sum(served.steps for served in rounds), 3
            ),
            "compiled_while_serving": rounds[-1].compiles - engines[name].compiles,
        }  # fmt: skip
        if (share := EXIT_SHARES.get(name)) is not None:
            full, half = 1 / decoding[STOCK], 1 / decoding[UPPER_BOUND]
            ideal = full / ((1 - share) * full + share * half)
            row["ideal_speedup"] = round(ideal, 3)
            row["share_of_ideal"] = round(decoding[name] / decoding[STOCK] / ideal, 3)
        found.append(row)
    return found


def per_round(batch: int) -> int:
    """Prompts of a round."""
    return max(3 * batch, 4)


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
