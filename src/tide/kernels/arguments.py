"""What operations take together: norms, heads, routers, confidence models."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CONFIDENCE_FEATURES = 8  # of the head 2, of the router 1, of n-grams 5
CANDIDATE_FEATURES = 7  # of the candidates 5, of n-grams 2


class Norm(NamedTuple):
    """A norm over the hidden size, in an operator's arguments.

    Attributes:
        norm: "none", "rms" or "layer".
        norm_weight, norm_bias: `[hidden]`; None for ones and zeros.
        norm_eps: added to the variance.
    """

    norm: str = "none"
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    norm_eps: float = 0.0


class Head(NamedTuple):
    """A language-model head, in an operator's arguments.

    Attributes:
        head: weight, `[v, hidden]`.
        head_bias: `[v]`, or None.
        multiplier: of the logits.
        cap: soft cap of the logits; 0 for none.
    """

    head: Tensor
    head_bias: Tensor | None = None
    multiplier: float = 1.0
    cap: float = 0.0


class Router(NamedTuple):
    """A router, in an operator's arguments: its norm, and two linear maps with SiLU between them.

    Attributes:
        router_norm: `[hidden]`.
        down, down_bias: `[b, hidden]` and `[b]`.
        up, up_bias: `[b]` and `[1]`.
        router_eps: of the norm.
        router_threshold: least confidence; None if the router does not decide.
    """

    router_norm: Tensor | None = None
    down: Tensor | None = None
    down_bias: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None
    router_eps: float = 0.0
    router_threshold: float | None = None


class Candidates(NamedTuple):
    """The tokens that a prefilter reads of a head, in an operator's arguments.

    Attributes:
        fixed, fixed_bias: vectors and biases of the candidates of every state, `[c, hidden]` and
            `[c]`.
        places: where each token id stands in the head, `[vocabulary + 1]`; -1 for those that it
            does not have, and at the end.
    """

    fixed: Tensor | None = None
    fixed_bias: Tensor | None = None
    places: Tensor | None = None


class Confidence(NamedTuple):
    """A confidence model, in an operator's arguments: two linear maps with SiLU between them.

    Attributes:
        inner, inner_bias: `[w, features]` and `[w]`, in float32; the scaling of the features is
            part of them. A feature that the model does not look at has zeros.
        outer, outer_bias: `[w]` and `[1]`, in float32.
        threshold: least confidence.
    """

    inner: Tensor | None = None
    inner_bias: Tensor | None = None
    outer: Tensor | None = None
    outer_bias: Tensor | None = None
    threshold: float = 0.0
