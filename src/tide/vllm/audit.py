"""The audit while serving: some tokens run at full depth, whatever their gate decides.

Their predicted token is compared with the target token. The tokens of a request tend to be wrong
together, which the drift monitor must not take for drift. So it is given one loss for each request:
the share of its audited tokens that differ, once it has ended.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from tide.risk import DriftMonitor
from tide.vllm.metadata import Requests
from tide.vllm.metrics import Metrics
from tide.vllm.settings import Settings

logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown


class Audit:
    """Chooses tokens to audit, compares them, and tells the drift monitor.

    Args:
        settings: ours.
        metrics: to count in.
        logits: vLLM's LM head.

    Attributes:
        monitor: the drift monitor; None without a certificate.
        tripped: whether drift has turned exits off.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, logits: Callable[[Tensor], Tensor]
    ) -> None:
        self._settings, self._metrics, self._logits = settings, metrics, logits
        self._draw = random.Random(0)  # the same on all ranks
        self.monitor: DriftMonitor | None = None
        self.tripped = False
        if settings.risk is not None and not settings.uncertified:
            self.monitor = DriftMonitor(settings.risk, settings.delta)
        # Of each request that decodes, its length and what its audited tokens lost: by the block of
        # its newest token, which no other request shares.
        self._running: dict[int, tuple[int, list[float]]] = {}

    def choose(self, candidates: Iterable[int]) -> dict[int, Tensor | None]:
        """The requests to audit in a pass; the states that their exit heads return go in here."""
        rate = self._settings.audit_rate
        return dict.fromkeys(r for r in candidates if self._draw.random() < rate)

    def compare(self, audits: Mapping[int, Tensor | None], last: Tensor) -> dict[int, float]:
        """Whether the predicted tokens of audited requests differ from the target tokens.

        Args:
            audits: by request, the normed state of its exit; None if it passed no gate.
            last: the normed state at full depth of every request, `[n, hidden]`.

        Returns:
            By request, 1 if they differ, else 0.
        """
        found = {}
        for request, read in audits.items():
            found[request], verdict = 0.0, "continued"
            if read is not None:
                predicted, target = self._logits(torch.stack([read, last[request]])).argmax(-1)
                found[request] = float(predicted != target)
                verdict = "differs" if found[request] else "same"
            self._metrics.audit(verdict)
        return found

    def note(self, found: Mapping[int, float], requests: Requests, decoding: Sequence[int]) -> None:
        """Note what was found in a pass; requests that no longer decode have ended.

        Args:
            found: by request, its loss.
            requests: of the pass.
            decoding: those that decode.
        """
        if self.monitor is None:
            return
        lengths, running = requests.lengths[decoding].long(), {}
        blocks = [requests.block_of(decoding, lengths - back).tolist() for back in (2, 1)]
        for request, length, before, now in zip(decoding, lengths.tolist(), *blocks, strict=True):
            shorter, losses = self._running.get(before, (length, []))
            if shorter < length:  # otherwise another request had this block
                del self._running[before]
            else:
                losses = []
            running[now] = length, [*losses, found[request]] if request in found else losses
        ended, self._running = self._running, running
        for _, losses in ended.values():
            if losses and not self.monitor.fired and self.monitor.add(fmean(losses)):
                self._fire(self.monitor)

    def _fire(self, monitor: DriftMonitor) -> None:
        self.tripped = self._settings.on_drift == "full_depth"
        logger.warning(
            "TIDE: in %d audited requests %.2f%% of tokens differ from full depth; the certified "
            "bound is %.2f%%. %s Certify on prompts like these with `tide certify`.",
            monitor.sequences, 100 * (monitor.estimate or 0.0), 100 * monitor.risk,
            "Exits are off until a restart." if self.tripped else "Exits stay on.",
        )  # fmt: skip
        self._metrics.drift()
