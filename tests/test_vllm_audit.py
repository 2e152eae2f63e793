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
        tokens=len(given),
    )


@pytest.fixture
def audit() -> Any:
    """An audit of all requests; `losses` are those that its monitor was given."""
    settings = Settings(script=0.5, risk=0.2, audit_rate=1.0, on_drift="full_depth")
    made = Audit(settings, Mock(), lambda states: states)
    assert made.monitor is not None
    made.losses, add = [], made.monitor.add
    made.monitor.add = lambda loss: made.losses.append(loss) or add(loss)
    return made


RIGHT, WRONG = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])


def run(audit: Any, found: dict[int, Any], of: Requests, decoding: list[int] | None = None) -> None:
    """A pass in which exit heads read some states; the target token is always the first."""
    decoding = list(range(len(of.lengths))) if decoding is None else decoding
    audits = audit.follow(of, decoding)
    assert list(audits) == decoding
    audit.compare({**audits, **found}, RIGHT.repeat(len(of.lengths), 1))


def test_a_request_that_has_ended_gives_one_loss(audit: Any) -> None:
    # The first grows into another block, the second ends after two decoded tokens.
    run(audit, {0: WRONG, 1: RIGHT}, requests((4, [7, 9]), (2, [8, 0])))
    run(audit, {0: RIGHT, 1: WRONG}, requests((5, [7, 9]), (3, [8, 0])))
    assert audit.losses == []
    run(audit, {0: WRONG}, requests((6, [7, 9])))
    assert audit.losses == []  # that of the second waits for that of the first
    run(audit, {}, requests((4, [5, 0])), decoding=[])  # a prompt is read
    assert audit.losses == [0.5, pytest.approx(1 / 3)]  # one of three: the first is the prompt's
    run(audit, {}, requests((2, [6, 0])), decoding=[])
    assert len(audit.losses) == 2


def test_a_long_request_holds_up_no_other(audit: Any) -> None:
    audit._longest = 3
    run(audit, {0: WRONG, 1: RIGHT}, requests((2, [7, 0]), (2, [8, 0])))
    run(audit, {0: RIGHT}, requests((3, [7, 0])))  # the second has ended
    assert audit.losses == []
    assert list(audit.follow(requests((4, [7, 0])), [0])) == []  # its fourth token: not audited
    assert audit.losses == [pytest.approx(1 / 3), 0.0]
    audit.compare({}, RIGHT.repeat(1, 1))
    run(audit, {}, requests((1, [1, 0])), decoding=[])
    assert len(audit.losses) == 2


def test_where_steps_are_scheduled_ahead_the_last_token_does_not_count(audit: Any) -> None:
    audit._ahead = True
    run(audit, {0: WRONG}, requests((2, [7, 0])))
    run(audit, {0: WRONG}, requests((3, [7, 0])))  # behind the end, and served to nobody
    run(audit, {}, requests((1, [1, 0])), decoding=[])
    assert audit.losses == [0.5]


@pytest.mark.parametrize("length", [2, 3])
def test_a_block_may_have_been_another_requests(audit: Any, length: int) -> None:
    run(audit, {0: WRONG}, requests((3, [7, 0])))
    run(audit, {}, requests((length, [7, 0])))
    assert audit.losses == [0.5]


def test_the_order_of_requests_does_not_matter(audit: Any) -> None:
    run(audit, {0: WRONG}, requests((3, [7, 0]), (2, [8, 0])))
    # A prompt is read between them, and does not decode.
    run(audit, {2: WRONG}, requests((3, [8, 0]), (4, [5, 6]), (4, [7, 0])), decoding=[0, 2])
    run(audit, {}, requests((1, [1, 0])), decoding=[])
    assert sorted(audit.losses) == [0.0, pytest.approx(2 / 3)]


def test_a_share_of_the_requests_is_audited_from_their_first_token_to_their_last() -> None:
    audit = Audit(Settings(script=0.5, audit_rate=0.3), Mock(), Mock())
    several = [requests(*((2 + step, [block, 0]) for block in range(200))) for step in range(3)]
    found = [set(audit.follow(of, list(range(200)))) for of in several]
    assert found[0] == found[1] == found[2] and 40 < len(found[0]) < 80
    assert audit.monitor is None  # no certificate, no bound


def test_drift_turns_exits_off(audit: Any) -> None:
    for block in range(30):
        run(audit, {0: WRONG}, requests((3, [block, 0])))
    assert audit.monitor.fired and audit.tripped
    audit._metrics.drift.assert_called_once()


def test_verdicts_are_counted(audit: Any) -> None:
    run(audit, {0: RIGHT, 1: WRONG}, requests((3, [1, 0]), (3, [2, 0]), (3, [3, 0])))
    verdicts = [call.args[0] for call in audit._metrics.audit.call_args_list]
    assert verdicts == ["same", "differs", "continued"]
