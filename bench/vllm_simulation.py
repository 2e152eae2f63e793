"""The certified bound in vLLM, at a known risk: is it kept, and does the drift monitor see it?

vLLM's engine serves a tiny model with scripted gates and an exit head that is always wrong, so that
the risk is the share of tokens that the script lets exit. The losses are what the plugin's audit
finds. They are certified as `tide.certify` does in the transformers engine, where such runs are in
`certify_simulation.py`. Then the drift monitor: how often it fires at the bound, and after how many
requests beyond it; beside it the monitor alone, given losses drawn without an engine.

    python bench/vllm_simulation.py --out bench/results/vllm_simulation.json
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from statistics import median
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
)  # fmt: skip

import numpy as np
import torch
from certify_simulation import (
    DELTA,
    NEW,
    PROMPT,
    RISK,
    TRUE_RISKS,
    Draw,
    WrongHead,
    certifications,
    conditions,
    options,
)
from long_context import HIDDEN, long_model
from measure import write
from rich.progress import track

from tide.calibration.bounds import learn_then_test
from tide.drift import DriftMonitor
from tide.exits.policy import ScriptedPolicy, TokenPosition

NEVER = 1e-300  # delta at which a drift monitor does not fire
BEYOND = (1.0, 1.5, 2.0, 4.0)  # true risks, in multiples of the bound


class Served:
    """A tiny model in vLLM, whose gates follow a script.

    Args:
        wave: requests that are served together.
    """

    def __init__(self, wave: int) -> None:
        from vllm import LLM

        self.wave = wave
        with tempfile.TemporaryDirectory() as folder:
            long_model(PROMPT + NEW).save_pretrained(folder)
            self._llm = LLM(
                folder, dtype="float32", enforce_eager=True, max_model_len=PROMPT + NEW,
                max_num_seqs=wave, max_num_batched_tokens=wave * PROMPT,
                enable_prefix_caching=False, skip_tokenizer_init=True,
                additional_config={"tide": {"script": 0.0}},
            )  # fmt: skip
        self._model = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        self._model.tide.gates.checkpoints[0].head = WrongHead("identity", HIDDEN)

    def serve(
        self, exits: np.ndarray, audit_rate: float, *, delta: float = DELTA, seed: int = 0
    ) -> tuple[Any, list[float]]:
        """Serve requests of which some tokens exit, wave by wave until the monitor has fired.

        Args:
            exits: which, `[requests, tokens after the first]`; whole waves.
            audit_rate: share of requests that are audited.
            delta: of the drift monitor.
            seed: of the choice of audited requests.

        Returns:
            The plugin's drift monitor, and the losses that it was given.
        """
        from vllm import SamplingParams

        from tide.vllm.audit import Audit

        depth, losses = self._model.tide, list[float]()
        settings = replace(depth.settings, risk=RISK, delta=delta, audit_rate=audit_rate)
        audit = depth.audit = Audit(settings, depth.metrics, self._model.compute_logits)
        audit._draw.seed(seed)
        monitor, add = audit.monitor, audit.monitor.add
        monitor.add = lambda loss: losses.append(loss) or add(loss)

        def generate(requests: int, new: int) -> None:
            prompts = [{"prompt_token_ids": [5 + k % 20] * PROMPT} for k in range(requests)]
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            self._llm.generate(prompts, sampling, use_tqdm=False)

        for rows in exits.reshape(-1, self.wave, NEW - 1):

            def script(at: TokenPosition, _: int, rows: np.ndarray = rows) -> bool:
                return bool(rows[at.sequence, at.position - PROMPT - 1])

            depth.gates.script = ScriptedPolicy(script)
            generate(self.wave, NEW)
            generate(1, 1)  # shows the plugin that the others have ended
            if monitor.fired:
                break
        return monitor, losses

    def certify(self, draw: Draw) -> float | None:
        """The setting that is certified by the losses that the audit finds."""
        settings = (
            np.array(self.serve(draw.exits(scale), 1.0, delta=NEVER)[1]) for scale in TRUE_RISKS
        )
        last = learn_then_test(settings, RISK, DELTA)
        return None if last is None else list(TRUE_RISKS)[last]


def alone(exits: np.ndarray, audit_rate: float, rng: np.random.Generator) -> DriftMonitor:
    """The drift monitor after losses drawn without an engine."""
    monitor, losses = DriftMonitor(RISK, DELTA), exits.sum(1) / NEW
    for loss in losses[rng.random(len(losses)) < audit_rate]:
        if not monitor.fired:
            monitor.add(float(loss))
    return monitor


def summary(monitors: list[DriftMonitor]) -> dict[str, Any]:
    """How often monitors fired, and after how many requests."""
    fired = [m.sequences for m in monitors if m.fired]
    return {
        "share_that_fired": len(fired) / len(monitors),
        "median_requests_until_fired": median(fired) if fired else None,
    }


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--requests", type=int, default=400, help="that are served to each monitor")
    parser.add_argument("--audit-rate", type=float, default=0.5, help="for the monitors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, served, rows = np.random.default_rng(args.seed), Served(args.sequences), []
    found = certifications(served.certify, rng, args)
    for times in BEYOND:
        here, there = [], []
        for seed in track(range(args.runs), description=f"monitors at {times:g} times the bound"):
            exits = Draw(rng, args.requests).exits_at(times * RISK)
            here.append(served.serve(exits, args.audit_rate, seed=seed)[0])
            there.append(alone(exits, args.audit_rate, rng))
        rows.append({"times_the_bound": times, "vllm": summary(here), "alone": summary(there)})
    given = conditions(
        args, monitors=args.runs, requests=args.requests, audit_rate=args.audit_rate
    )  # fmt: skip
    document = {
        "what": "the certified bound in vLLM, at a known risk",
        "conditions": given,
        **found,
        "monitor": rows,
    }
    write(document, args.out)


if __name__ == "__main__":
    main()
