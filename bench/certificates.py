"""Certificates on one source of prompts, checked on fresh prompts of that source and another.

    TIDE_DATA=... python bench/certificates.py $(python scripts/weights.py) DIR \\
        --certify spec_bench --serve gsm8k --force --out bench/results/certificates_spec_bench.json

Spec-Bench is used without its mathematics, most of which comes from GSM8K. A risk of 1 % needs 312
sequences even if no token differs, and about three times as many if some do; Spec-Bench has 390.
In half precision, risks below the model's own noise floor are refused, except with `--force`.
With `--save`, the artifact is written there with its certificates. With `--unused`, prompts of the
first source that were used neither for certificates nor to check them are written to a file, for
`tide bench`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from measure import SOURCES, parser, report
from transformers import AutoModelForCausalLM, AutoTokenizer

import tide
from tide.bench.attack import match_baseline
from tide.calibration.data import encode_prompts
from tide.certification import Workload, certify, measure_losses
from tide.drift import CircuitBreaker, DriftMonitor, DriftWarning
from tide.engine import TIDE
from tide.exits.artifact import Artifact

RISKS = (0.01, 0.02, 0.05)
AFTER = 16  # prompts served after the circuit breaker has tripped


class Served:
    """Certified engines that serve fresh prompts; equal thresholds run once."""

    def __init__(
        self, model: Any, tokenizer: Any, made: Artifact, config: tide.TIDEConfig, args: Any
    ) -> None:
        self.model, self.tokenizer, self.made, self.args = model, tokenizer, made, args
        self.config = config
        self.losses: dict[tuple[str, float], Any] = {}

    def under(self, risk: float, source: str, texts: list[str]) -> dict[str, Any]:
        """The measured risk on fresh prompts, and whether the drift monitor fires."""
        config = self.config.with_(exit_threshold=None)
        engine = TIDE(self.model, self.made, config, risk=risk, check=False)
        assert engine.certificate is not None
        key = source, engine.certificate.threshold_scale
        encoded = encode_prompts(self.tokenizer, texts, self.args.max_prompt)
        if key not in self.losses:
            engine.circuit_breaker = None  # fed below, with the same losses for every risk
            workload = Workload(
                texts=texts, encoded=encoded, new_tokens=self.args.new, batch=self.args.batch
            )
            self.losses[key] = measure_losses(engine, self.tokenizer, workload)
        losses = self.losses[key]
        monitor = DriftMonitor(risk, engine.certificate.delta)
        fired = next((n for n, loss in enumerate(losses, 1) if monitor.add(loss)), None)
        found = {
            "source": source,
            "sequences": len(losses),
            "measured": float(losses.mean()),
            "standard_error": float(losses.std(ddof=1) / len(losses) ** 0.5),
            "drift_detected_after": fired,
        }
        if fired is not None:
            fresh = DriftMonitor(risk, engine.certificate.delta)
            engine.circuit_breaker = CircuitBreaker(fresh, "full_depth")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DriftWarning)
                engine.circuit_breaker.add(losses)
            found["after_fallback"] = match_baseline(
                engine, self.tokenizer, encoded[-AFTER:], self.args.new
            )
        return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("artifact", type=Path)
    options.add_argument("--certify", choices=SOURCES, default="spec_bench")
    options.add_argument("--serve", choices=SOURCES, default="gsm8k")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--risk", type=float, nargs="+", default=RISKS)
    options.add_argument("--skip", type=int, default=0, help="prompts that were used before")
    options.add_argument("--sequences", type=int, default=900)
    options.add_argument("--fresh", type=int, default=200, help="prompts of the other source")
    options.add_argument("--same", type=int, default=100, help="fresh prompts of the same source")
    options.add_argument("--new", type=int, default=32)
    options.add_argument("--max-prompt", type=int, default=256)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--kv", default="deferred")
    options.add_argument("--min-layers", type=int, help="use no exit below this depth")
    options.add_argument(
        "--threshold-scale", type=float, nargs="+", default=[0.03, 0.125, 0.5, 1, 2]
    )
    options.add_argument("--force", action="store_true", help="allow risks below the noise floor")
    options.add_argument("--save", type=Path, help="write the artifact with its certificates here")
    options.add_argument("--unused", type=Path, help="write prompts that were not used here")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    made = Artifact.load(args.artifact)
    texts = SOURCES[args.certify]()[args.skip :]
    if args.unused:
        lines = (json.dumps({"prompt": text}) for text in texts[args.sequences + args.same :])
        args.unused.write_text("\n".join(lines) + "\n")
    # Drafts change the speed and not the output; without them large batches are faster.
    least = made.config.min_layers if args.min_layers is None else args.min_layers
    config = tide.TIDEConfig(kv_cache_strategy=args.kv, min_layers=least, drafts=())
    found = certify(
        model, tokenizer, made, texts[: args.sequences], risk=args.risk, new_tokens=args.new,
        max_prompt=args.max_prompt, batch=args.batch, threshold_scales=args.threshold_scale,
        config=config, force=args.force, version=tide.__version__,
    )  # fmt: skip
    if args.save:
        made.save(args.save)
    served = Served(model, tokenizer, made, config, args)
    results = []
    for certificate in found:
        row: dict[str, Any] = {"certificate": certificate.to_dict()}
        if args.fresh and args.kv == "deferred":
            if more := texts[args.sequences :][: args.same]:
                row["same_source"] = served.under(certificate.risk, args.certify, more)
            row["other_source"] = served.under(
                certificate.risk, args.serve, SOURCES[args.serve]()[-args.fresh :]
            )
        results.append(row)
    report(
        f"certificates from {args.certify}, then fresh prompts of {args.certify} and {args.serve}",
        args,
        results,
        dtype=args.dtype,
        kv_cache_strategy=args.kv,
        min_layers=least,
        certified_on=args.certify,
        risks=list(args.risk),
        skipped=args.skip,
        threshold_scale=list(args.threshold_scale),
        batch=args.batch,
        max_prompt=args.max_prompt,
        new_tokens=args.new,
        noise_floor_checked=not args.force and model.dtype != torch.float32,
        calibrated_in=made.record["dtype"],
    )


if __name__ == "__main__":
    main()
