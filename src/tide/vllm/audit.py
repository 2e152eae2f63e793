"""The audit while serving: some requests run at full depth, whatever their gates decide.

Their predicted tokens are compared with the target tokens. The loss of a request is the share of
its new tokens that differ, as in a certificate. The drift monitor is given it when the request has
ended: one loss for each request, since the tokens of a request tend to be wrong together.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tide.drift import DriftMonitor, InOrder
from tide.vllm.metadata import Requests
from tide.vllm.metrics import Metrics
from tide.vllm.settings import Settings

logger = logging.getLogger("vllm.tide")  # below vLLM's, so that it is shown


@dataclass
class Followed:
    """A request, followed from pass to pass.

    Attributes:
        audited: whether it runs at full depth.
        number: how many audited requests began before it.
        length: tokens so far.
        new: tokens predicted so far; the first is the prompt's.
        differ: those that differ from the target tokens, but for the newest.
        newest_differs: whether that does.
    """

    audited: bool
    number: int
    length: int = 0
    new: int = 1
    differ: int = 0
    newest_differs: bool = False


class Audit:
    """Chooses requests to audit, compares their tokens, and tells the drift monitor.

    Args:
        settings: ours.
        metrics: to count in.
        logits: vLLM's LM head.
        ahead: whether vLLM schedules a step before it knows the tokens of the one before; a request
            that has ended may then be in one more pass, whose token nobody gets, so the newest
            token of a request is not counted.
        longest: most tokens of an answer that the certificate covers; later ones are not audited.

    Attributes:
        monitor: the drift monitor; None without a certificate.
        tripped: whether drift has turned exits off.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        logits: Callable[[Tensor], Tensor],
        *,
        ahead: bool = False,
        longest: int | None = None,
    ) -> None:
        self._settings, self._metrics, self._logits = settings, metrics, logits
        self._ahead, self._longest = ahead, longest
        self._draw = random.Random(0)  # the same on all ranks
        self.monitor: DriftMonitor | None = None
        self.tripped = False
        if settings.risk is not None and not settings.uncertified:
            self.monitor = DriftMonitor(settings.risk, settings.delta)
        # By the KV cache block of their newest token, which no other request shares.
        self._running: dict[int, Followed] = {}
        self._audited: dict[int, Followed] = {}  # by their index in the pass
        self._begun, self._losses = 0, InOrder()

    def follow(self, requests: Requests, decoding: Sequence[int]) -> dict[int, Tensor | None]:
        """Find the requests of the last pass again; those that no longer decode have ended.

        Must see every pass: a block may be another request's a pass later.

        Args:
            requests: of the pass.
            decoding: those that decode.

        Returns:
            The requests to audit, for what their exit heads will return.
        """
        if not self._settings.audit_rate:  # nothing to follow, and nothing to read from the device
            return {}
        lengths, running = requests.lengths[decoding].long(), dict[int, Followed]()
        blocks = [requests.block_of(decoding, lengths - back).tolist() for back in (2, 1)]
        self._audited = {}
        for request, length, before, now in zip(decoding, lengths.tolist(), *blocks, strict=True):
            known = self._running.get(before)
            if known is not None and known.length < length:
                del self._running[before]
            else:
                audited = self._draw.random() < self._settings.audit_rate
                known = Followed(audited, self._begun)
                self._begun += audited
            known.length, known.new = length, known.new + 1
            known.differ, known.newest_differs = known.differ + known.newest_differs, False
            if (other := running.get(now)) is not None and other.audited:
                self._end(other)  # never seen; a loss that is never told would hold up all others
            running[now] = known
            if known.audited and self._longest is not None and known.new > self._longest:
                # No more of it is covered, and the losses of later requests wait for its own.
                known.audited = False
                self._tell(known.number, known.differ / self._longest)
            if known.audited:
                self._audited[request] = known
        ended, self._running = self._running, running
        for gone in ended.values():
            if gone.audited:
                self._end(gone)
        return dict.fromkeys(self._audited)

    def compare(self, audits: Mapping[int, Tensor | None], last: Tensor) -> None:
        """Compare the predicted tokens of audited requests with the target tokens.

        Args:
            audits: by request, the normed state of its exit; None if it passed no gate.
            last: the normed state at full depth of every request, `[n, hidden]`.
        """
        read = {request: state for request, state in audits.items() if state is not None}
        if read:
            both = self._logits(torch.stack([*read.values(), *last[list(read)]])).argmax(-1)
            predicted, target = both.view(2, -1)
            for request, differs in zip(read, (predicted != target).tolist(), strict=True):
                self._audited[request].newest_differs = differs
                self._metrics.audit("differs" if differs else "same")
        for _ in range(len(audits) - len(read)):
            self._metrics.audit("continued")

    def _end(self, request: Followed) -> None:
        """Tell the drift monitor what a request that has ended has lost."""
        new, differ = request.new, request.differ
        if self._ahead:
            new -= 1
        else:
            differ += request.newest_differs
        self._tell(request.number, differ / new)

    def _tell(self, number: int, loss: float) -> None:
        """Tell the drift monitor the loss of a request, once those of earlier ones are known."""
        monitor, losses = self.monitor, self._losses.end(number, loss)
        if monitor is None or monitor.fired or not any(monitor.add(loss) for loss in losses):
            return
        self.tripped = self._settings.on_drift == "full_depth"
        logger.warning(
            "TIDE: in %d audited requests, %.2f%% of the tokens differ from full depth on average; "
            "the certified bound is %.2f%%. %s Certify on prompts like these with `tide certify`.",
            monitor.sequences, 100 * (monitor.estimate or 0.0), 100 * monitor.risk,
            "Exits are off until a restart." if self.tripped else "Exits stay on.",
        )  # fmt: skip
        self._metrics.drift()
