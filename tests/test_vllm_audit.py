"""The audit in vLLM: the drift monitor gets one loss for each request, when it has ended."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")

from tide.vllm.audit import Audit
from tide.vllm.metadata import Requests
from tide.vllm.settings import Settings

# The worker that imports vLLM for other tests too.
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

BLOCK = 4


def requests(*given: tuple[int, list[int]]) -> Requests:
    """Requests that decode: their lengths and blocks."""
    return Requests(
        starts=torch.arange(len(given) + 1),
        lengths=torch.tensor([length for length, _ in given], dtype=torch.int32),
        blocks=torch.tensor([blocks for _, blocks in given], dtype=torch.int32),
        slots=torch.arange(len(given)),
        block=BLOCK,
    )


@pytest.fixture
def audit() -> Any:
    """An audit of every token; `losses` are those that its monitor was given."""
    settings = Settings(script=0.5, risk=0.2, audit_rate=1.0, on_drift="full_depth")
    made = Audit(settings, Mock(), Mock())
    assert made.monitor is not None
    made.losses, add = [], made.monitor.add
    made.monitor.add = lambda loss: made.losses.append(loss) or add(loss)
    return made


def test_a_request_that_has_ended_gives_one_loss(audit: Any) -> None:
    # The first grows into another block, the second ends after two tokens.
    audit.note({0: 1.0, 1: 0.0}, requests((4, [7, 9]), (2, [8, 0])), [0, 1])
    audit.note({0: 0.0, 1: 1.0}, requests((5, [7, 9]), (3, [8, 0])), [0, 1])
    assert audit.losses == []
    audit.note({0: 0.0}, requests((6, [7, 9])), [0])
    assert audit.losses == [0.5]
    # The first ends; another decodes, and none of its tokens is audited.
    audit.note({}, requests((3, [5, 0])), [0])
    assert audit.losses == [0.5, pytest.approx(1 / 3)]
    audit.note({}, requests((2, [6, 0])), [0])
    assert len(audit.losses) == 2


def test_a_block_may_have_been_another_requests(audit: Any) -> None:
    audit.note({0: 1.0}, requests((4, [7, 0])), [0])
    audit.note({0: 0.0}, requests((2, [7, 0])), [0])
    assert audit.losses == [1.0]


def test_the_order_of_requests_does_not_matter(audit: Any) -> None:
    audit.note({0: 1.0, 1: 0.0}, requests((3, [7, 0]), (2, [8, 0])), [0, 1])
    # A prompt is read between them, and does not decode.
    audit.note({0: 0.0, 2: 1.0}, requests((3, [8, 0]), (4, [5, 6]), (4, [7, 0])), [0, 2])
    audit.note({}, requests((1, [1, 0])), [])
    assert sorted(audit.losses) == [0.0, 1.0]


def test_drift_turns_exits_off(audit: Any) -> None:
    for block in range(30):
        audit.note({0: 1.0}, requests((3, [block, 0])), [0])
    assert audit.monitor.fired and audit.tripped
    audit._metrics.drift.assert_called_once()


def test_predicted_tokens_are_compared_with_target_tokens(audit: Any) -> None:
    audit._logits = lambda states: states
    last = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = audit.compare({0: torch.tensor([1.0, 0.0]), 1: torch.tensor([0.0, 1.0]), 2: None}, last)
    assert found == {0: 0.0, 1: 1.0, 2: 0.0}
    assert [call.args[0] for call in audit._metrics.audit.call_args_list] == [
        "same", "differs", "continued",
    ]  # fmt: skip
    assert list(audit.choose([0, 2])) == [0, 2]
