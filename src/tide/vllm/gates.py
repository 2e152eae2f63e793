"""The gates in vLLM's forward pass: which requests exit at a checkpoint.

They come from the artifact and run the same code as in the transformers engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import ForwardContext

from tide.errors import ArtifactError, UnsupportedModelError
from tide.exits.candidates import candidate_readout
from tide.exits.checkpoint import Checkpoint
from tide.exits.gate import ExitGate, OpenGate
from tide.exits.heads import ExitHead, Readout
from tide.exits.ngrams import NGramPrediction
from tide.exits.policy import ScriptedPolicy, TokenPosition
from tide.exits.table import ContinuationTable
from tide.exits.thresholds import Thresholds
from tide.models.tokens import NOTES
from tide.vllm.history import History
from tide.vllm.metadata import Requests, requests_of
from tide.vllm.settings import Settings


class Gates:
    """The decision at each checkpoint.

    Args:
        model: one of vLLM's causal language models, weights loaded.
        attention: the attention modules of its layers.
        vllm_config: vLLM's.
        settings: ours.

    Attributes:
        checkpoints: the checkpoints in use, by depth; those with unreachable thresholds are not.
        gates: of the checkpoints.
        script: which requests may exit where; None if all may.
        longest: most tokens of an answer that the certificate covers; None without one.
        history: the tokens of the requests; None if no gate needs them.
    """

    def __init__(
        self, model: Any, attention: Sequence[Any], vllm_config: Any, settings: Settings
    ) -> None:
        self.checkpoints: list[Checkpoint]
        self.gates: list[ExitGate]
        self.script: ScriptedPolicy | None = None
        self.longest: int | None = None
        self.history: History | None = None
        self._attention = attention
        config, norm = vllm_config.model_config.hf_text_config, model.model.norm
        # vLLM frees the blocks that a sliding window has passed, and their tokens with them.
        self._anchor = next((a for a in attention if not _window(a)), None)
        if settings.script is not None:
            half = len(model.model.layers) // 2 - 1
            self.checkpoints = [Checkpoint(half, ExitHead("identity", config.hidden_size))]
            self.script = ScriptedPolicy.share(settings.script)
            self.gates = [OpenGate(self.checkpoints[0].head, None)]
            return
        made, checkpoints, scale, self.longest = settings.load(vllm_config)
        self.checkpoints = [c for c in checkpoints if not c.thresholds.scaled(scale).unreachable]
        if not self.checkpoints:
            self.gates = []
            return
        for checkpoint in self.checkpoints:
            checkpoint.to(norm.weight.device, norm.weight.dtype)
        head = _head(model, config)
        readout = Readout(norm, head, config, made.vocabulary)
        if made.vocabulary is not None:
            head.register_parameter("weight", None)  # the readout has copied the part it needs
        candidates = candidate_readout(readout, made.candidates)
        self.gates = [
            ExitGate.of(c, readout, c.thresholds.scaled(scale), candidates)
            for c in self.checkpoints
        ]
        compiles = vllm_config.compilation_config.mode != CompilationMode.NONE
        for checkpoint, gate in zip(self.checkpoints, self.gates, strict=True):
            self._require(checkpoint, gate)
            gate.fuse(compiled=compiles)
        if any(gate.wants_ngrams for gate in self.gates):
            table = ContinuationTable(made.table) if made.table else None
            self.history = History(table, 2 * int(vllm_config.scheduler_config.max_num_seqs))

    def _require(self, checkpoint: Checkpoint, gate: ExitGate) -> None:
        """Raise for a checkpoint whose gate cannot run here."""
        if checkpoint.thresholds == Thresholds():
            raise ArtifactError(
                f"The exit after layer {checkpoint.layer + 1} has no calibrated threshold. "
                "Make the artifact with `tide calibrate`."
            )
        if gate.wants_ngrams and self._anchor is None:
            raise UnsupportedModelError(
                "All layers of this model have a sliding window, so vLLM does not keep the whole "
                "text of a request, which the gates of this artifact need."
            )

    def requests(self, context: ForwardContext) -> Requests | None:
        """The requests of a pass, with the slots that the history uses; None in a warm-up pass."""
        return requests_of(context, self._anchor or self._attention[0])

    def remember(self, requests: Requests, ids: Tensor | None) -> None:
        """Store the tokens of a pass if a gate needs a request's text."""
        if ids is not None and self.history is not None:
            self.history.write(requests, ids)

    def decide(
        self, number: int, states: Tensor, candidates: Sequence[int], requests: Requests
    ) -> list[int]:
        """Evaluate the gate of a checkpoint.

        Args:
            number: of the checkpoint.
            states: of the candidates, `[n, hidden]`.
            candidates: requests that may exit, as indices into `requests`.
            requests: of the pass.

        Returns:
            Which of the candidates exit, as indices into `candidates`.
        """
        if get_tensor_model_parallel_world_size() == 1:
            return self._decide(number, states, candidates, requests)
        # The first rank decides for all, so that rounding errors cannot make the ranks diverge.
        group = get_tp_group()
        exits = self._decide(number, states, candidates, requests) if group.is_first_rank else None
        return list(group.broadcast_object(exits, src=0))

    def _decide(
        self, number: int, states: Tensor, candidates: Sequence[int], requests: Requests
    ) -> list[int]:
        gate, notes = self.gates[number], []
        lengths = [] if self.script is None else requests.lengths.tolist()
        for request in candidates:
            may = self.script is None or self.script.script(
                TokenPosition(request, lengths[request]), number
            )
            told = partial(self._predict, requests, request)
            notes.append(gate.note(told) if may else (0,) * NOTES)
        decision = gate(states, torch.tensor(notes, device=states.device))
        return [i for i, exits in enumerate(decision[:, 0].tolist()) if exits]

    def _predict(self, requests: Requests, request: int) -> NGramPrediction:
        return self.history.predict(requests, request) if self.history else NGramPrediction()


def _window(attn: Any) -> bool:
    return (attn.impl.sliding_window or -1) not in (-1, (-1, -1))


def _head(model: Any, config: Any) -> nn.Linear:
    """vLLM's LM head as `Readout` needs it: all shards gathered, the same on every rank."""
    weight = model.lm_head.weight.data
    if get_tensor_model_parallel_world_size() > 1:
        weight = tensor_model_parallel_all_gather(weight, dim=0)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(weight[: config.vocab_size], requires_grad=False)
    return head
