"""Gives the gates as vLLM's forward pass asks them: which requests leave at a checkpoint.

They are those of the artifact, run by the same code as in the transformers engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import ForwardContext

from tide.errors import ArtifactError, UnsupportedModelError
from tide.exits.artifact import Checkpoint
from tide.exits.heads import ExitHead, Readout
from tide.exits.hints import Hint
from tide.exits.policy import Gate, GatePolicy, Place, Policy, ScriptedPolicy
from tide.exits.table import ContinuationTable
from tide.vllm.history import History
from tide.vllm.metadata import Rows, block_size, rows_of
from tide.vllm.settings import Settings


class Gates:
    """Who leaves where.

    Args:
        model: one of vLLM's causal language models, weights loaded.
        attention: the attention modules of its layers.
        vllm_config: vLLM's.
        settings: ours.

    Attributes:
        checkpoints: the exits that are used, by depth; none where no gate can be passed.
        policy: who leaves.
        history: the tokens of the requests; None if no gate looks at them.
    """

    def __init__(
        self, model: Any, attention: Sequence[Any], vllm_config: Any, settings: Settings
    ) -> None:
        self.checkpoints: list[Checkpoint]
        self.policy: Policy
        self._readout: Readout | None = None
        self._table: ContinuationTable | None = None
        self.history: History | None = None
        self._attention = attention
        config, norm = vllm_config.model_config.hf_text_config, model.model.norm
        # Blocks that have left a sliding window are given back, and their tokens with them.
        self._anchor = next((a for a in attention if not _window(a)), None)
        if settings.script is not None:
            half = len(model.model.layers) // 2 - 1
            self.checkpoints = [Checkpoint(half, ExitHead("identity", config.hidden_size))]
            self.policy = ScriptedPolicy.share(settings.script)
            return
        made, some, boldness = settings.load(vllm_config)
        self.checkpoints = [c for c in some if not c.gate.at(boldness).shut]
        for checkpoint in self.checkpoints:
            if checkpoint.head.tail_layers:
                raise UnsupportedModelError("vLLM does not finish tokens through a tail of layers.")
            if checkpoint.gate == Gate():
                raise ArtifactError(
                    f"The exit after layer {checkpoint.layer + 1} has no calibrated threshold. "
                    "Make the artifact with `tide calibrate`."
                )
            if checkpoint.blend is not None and self._anchor is None:
                raise UnsupportedModelError(
                    "All layers of this model have a sliding window, so vLLM does not keep what "
                    "the gates of this artifact look at: the text of a request from its start."
                )
            checkpoint.to(norm.weight.device, norm.weight.dtype)
        head: Any = _Head(model, config)
        self._readout = Readout(norm, head, config, made.vocabulary)
        if made.vocabulary is not None:
            head.weight = None  # the readout has the rows that it reads
        self._table = ContinuationTable(made.table) if made.table else None
        self.policy = GatePolicy(
            [checkpoint.router for checkpoint in self.checkpoints],
            [checkpoint.gate.at(boldness) for checkpoint in self.checkpoints],
            [checkpoint.blend for checkpoint in self.checkpoints],
            self._readout.tokens,
        )

    def rows(self, context: ForwardContext) -> Rows | None:
        """The requests of a pass, where the history finds their tokens; None if it has none."""
        anchor = self._anchor or self._attention[0]
        return rows_of(context, anchor.layer_name)

    def remember(self, rows: Rows, ids: Tensor | None) -> None:
        """Keep the tokens of a pass, where a blend looks at a request's text."""
        if ids is None or not any(checkpoint.blend for checkpoint in self.checkpoints):
            return
        self.history = self.history or History(block_size(self._anchor), self._table)
        self.history.write(rows, ids)

    def decide(self, number: int, states: Tensor, requests: Sequence[int], rows: Rows) -> list[int]:
        """Which of some requests leave at a checkpoint: indices into `requests`."""
        if get_tensor_model_parallel_world_size() == 1:
            return self._ask(number, states, requests, rows)
        # The first rank decides for all, so that no rounding can part them.
        group = get_tp_group()
        mine = self._ask(number, states, requests, rows) if group.is_first_rank else None
        return list(group.broadcast_object(mine, src=0))

    def _ask(self, number: int, states: Tensor, requests: Sequence[int], rows: Rows) -> list[int]:
        head, lengths = self.checkpoints[number].head, rows.lengths.tolist()
        return self.policy.decide(
            number,
            states,
            [Place(request, lengths[request]) for request in requests],
            lambda chosen: self._read(head, states[list(chosen)]),
            lambda chosen: [self._hint(rows, requests[k]) for k in chosen],
            with_logits=False,
        ).leaves

    def _read(self, head: ExitHead, states: Tensor) -> Tensor:
        assert self._readout is not None
        return self._readout(head.lift(states))

    def _hint(self, rows: Rows, request: int) -> Hint:
        return self.history.hint(rows, request) if self.history is not None else Hint()


def _window(attn: Any) -> bool:
    return (attn.impl.sliding_window or -1) not in (-1, (-1, -1))


class _Head:
    """vLLM's head as `Readout` needs it, its shards put together; every rank has the whole."""

    def __init__(self, model: Any, config: Any) -> None:
        weight = model.lm_head.weight.data
        if get_tensor_model_parallel_world_size() > 1:
            weight = tensor_model_parallel_all_gather(weight, dim=0)
        self.weight = weight[: config.vocab_size]
        self.bias = None

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight)
