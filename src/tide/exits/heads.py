"""Exit heads: from the state in which a token exits to logits. Knows no cache, no loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tide.errors import UnsupportedModelError
from tide.exits.norms import hooked, known_norm
from tide.kernels.arguments import Head, Norm
from tide.kernels.arithmetic import successors_of, top_of
from tide.kernels.dispatch import fused
from tide.kernels.native import decides_exits
from tide.kernels.operators import top_successors, top_token
from tide.models.runner import logit_scales, scale_logits

SUCCESSORS = 8  # likeliest tokens that are kept after each


class Readout:
    """The model's own final norm and head, over all tokens or over a list of them.

    Args:
        norm, head: the model's own modules.
        config: the model's text config, for families that scale their logits.
        vocabulary: ids of the tokens to read, `[v]`; the head then costs only those.

    Attributes:
        native: whether gates that read it are one of our operators.
    """

    def __init__(
        self, norm: nn.Module, head: nn.Module, config: Any, vocabulary: Tensor | None = None
    ) -> None:
        self.norm, self.head, self.config = norm, head, config
        self.size: int = config.vocab_size
        self.vocabulary = vocabulary
        self.native = False
        self._known_norm: Norm | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if vocabulary is not None:
            weight: Any = head.weight
            if weight.device.type == "meta":
                raise UnsupportedModelError(
                    "The head's weight is offloaded, and cannot be read in part. Calibrate with "
                    "vocabulary=0, or keep the head on a device."
                )
            if weight.shape[0] != self.size:
                raise UnsupportedModelError(
                    f"The head's weight has shape {list(weight.shape)}, not one vector for each of "
                    f"{self.size} tokens: it is packed, and cannot be read in part. Calibrate with "
                    "vocabulary=0, or keep the head unquantised."
                )
            self.vocabulary = vocabulary = vocabulary.to(weight.device)
            self._weight = weight.detach()[vocabulary].contiguous()
            bias: Any = getattr(head, "bias", None)
            self._bias = None if bias is None else bias.detach()[vocabulary]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary read, `[..., hidden]` to `[..., v]`."""
        states = self.norm(hidden)
        if self._weight is None:
            logits = self.head(states)
        else:
            # A tied head may be on another device than the norm (device_map="auto").
            states = states.to(self._weight.device)
            logits = nn.functional.linear(states, self._weight, self._bias)
        return scale_logits(self.config, logits)

    def top(self, hidden: Tensor, wanted: Tensor, *, scores: bool = True) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, as token ids; see `tide.kernels.reference.top_token`.

        Args:
            hidden: states, `[n, hidden]`.
            wanted: boolean, `[n]`: of which of them.
            scores: whether log-probabilities are wanted.
        """
        if (found := self.fused) is not None:
            index, tops = top_token(hidden, wanted, *found, scores)
            return self.tokens(index), tops
        return self.top_of_normed(self.norm(hidden), wanted, scores=scores)

    def top_of_normed(
        self, states: Tensor, wanted: Tensor, *, scores: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The same from states that are normed, `[n, hidden]`."""
        weight, bias = self.linear_head()
        if weight is None:
            index, tops = top_of(scale_logits(self.config, self.head(states)), scores)
        else:
            states, wanted = states.to(weight.device), wanted.to(weight.device)
            head = Head(weight, bias, *logit_scales(self.config))
            index, tops = top_token(states, wanted, Norm(), head, scores)
        return self.tokens(index), tops

    def fuse(self, *, compiled: bool = False) -> None:
        """Let norm and head be parts of one operation, where kernels run and both are known.

        Args:
            compiled: whether a gate that reads it is part of graphs; on a CPU, it is then one of
                our operators, which are compiled too.
        """
        weight, _ = self.linear_head()
        self._known_norm, self.native = None, False
        if weight is not None and (weight.device, weight.dtype) == (self.device, self.dtype):
            own = compiled and weight.is_contiguous()
            self.native = own and decides_exits(weight.device, weight.dtype)
            if self.native or fused(weight):
                self._known_norm = known_norm(self.norm)

    @property
    def fused(self) -> tuple[Norm, Head] | None:
        """Norm and head as one operation takes them; None before `fuse`, or if one has hooks."""
        if self._known_norm is None or hooked(self.norm):
            return None
        weight, bias = self.linear_head()
        return None if weight is None else (
            self._known_norm, Head(weight, bias, *logit_scales(self.config))
        )  # fmt: skip

    def linear_head(self) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of a head that is nothing but a linear map; None of any other."""
        if self._weight is not None:
            return self._weight, self._bias
        head = self.head
        if type(head) is not nn.Linear or hooked(head):
            return None, None
        dense = type(head.weight.data) is Tensor and not head.weight.is_meta
        return (head.weight, head.bias) if dense else (None, None)

    @property
    def device(self) -> torch.device:
        """Where states must be to be read."""
        return next(self.norm.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that states must have to be read."""
        return next(self.norm.parameters()).dtype

    def tokens(self, index: Tensor) -> Tensor:
        """Token ids of indices into the logits."""
        return index if self.vocabulary is None else self.vocabulary[index]

    def scatter_to_vocab(self, logits: Tensor) -> Tensor:
        """Logits over all tokens; those not read get -inf. `[n, v]` to `[n, vocabulary]`."""
        if self.vocabulary is None:
            return logits
        scattered = logits.new_full((len(logits), self.size), -torch.inf)
        scattered[:, self.vocabulary] = logits
        return scattered


class TargetHead(nn.Module):
    """What follows full depth: the tokens that it predicts.

    Args:
        readout: over the whole vocabulary.
    """

    def __init__(self, readout: Readout) -> None:
        super().__init__()
        self.readout = readout

    def forward(self, states: Tensor, notes: Tensor) -> Tensor:
        """The token after each that is wanted, `[sequences, tokens]`.

        Args:
            states: after the last layer, `[sequences, tokens, hidden]`.
            notes: of the tokens, `[sequences, tokens, NOTES]`.
        """
        wanted = (notes[..., 0] != 0).flatten().to(states.device)
        tokens, _ = self.readout.top(states.flatten(0, 1), wanted, scores=False)
        return tokens.unflatten(0, states.shape[:2])


class SuccessorHead(TargetHead):
    """What follows full depth: the tokens that it predicts, and the likeliest successors."""

    def forward(self, states: Tensor, notes: Tensor) -> Tensor:
        """The token after each that is wanted, then its likeliest successors.

        Takes what `TargetHead.forward` takes.

        Returns:
            `[sequences, tokens, 1 + SUCCESSORS]`.
        """
        readout = self.readout
        normed, wanted = readout.norm(states.flatten(0, 1)), (notes[..., 0] != 0).flatten()
        weight, bias = readout.linear_head()
        if weight is None:
            logits = scale_logits(readout.config, readout.head(normed))
            found = successors_of(logits, SUCCESSORS)
        else:
            normed, wanted = normed.to(weight.device), wanted.to(weight.device)
            head = Head(weight, bias, *logit_scales(readout.config))
            found = top_successors(normed, wanted, head, SUCCESSORS)
        return found.unflatten(0, states.shape[:2])


class ExitHead(nn.Module):
    """What happens to a state between a checkpoint and the readout.

    Args:
        strategy: "identity" (nothing, as published) or "affine" (a residual affine map).
        hidden_size: size of the state.
    """

    def __init__(self, strategy: str, hidden_size: int) -> None:
        super().__init__()
        self.strategy = strategy
        self.affine: nn.Linear | None = None
        if strategy != "identity":
            self.affine = nn.Linear(hidden_size, hidden_size)
            nn.init.zeros_(self.affine.weight)
            nn.init.zeros_(self.affine.bias)

    def transform(self, hidden: Tensor) -> Tensor:
        """The state to be read, `[..., hidden]`."""
        if self.affine is None:
            return hidden
        return hidden + self.affine(hidden.to(self.affine.weight)).to(hidden)
