"""Requests that stand still while their server goes on with others."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from analysis.blackbox.partial import partial_stalls
from analysis.records.requests import Requests, requests_of
from analysis.records.schemas import REQUESTS
from analysis.run.spikes import Windows, windows_of

S = 1_000_000_000
T0 = 1_700_000_000 * S
NEVER = windows_of([])


def answers(*times_s: tuple[float, list[float]], lengths: list[int] | None = None, tokens: bool = True) -> Requests:
    """Requests as (when sent, when each token came)."""
    rows = []
    for index, (sent, came) in enumerate(times_s):
        row = {"request_id": str(index), "arm": "a", "trial": 1, "status": "OK", "output_tokens": len(came)}
        row |= {"scheduled_ns": T0 + int(sent * S), "sent_ns": T0 + int(sent * S)}
        row |= {"first_token_ns": T0 + int(came[0] * S), "end_ns": T0 + int(came[-1] * S)}
        row |= {"prompt_tokens": lengths[index] if lengths else 100}
        row |= {"token_ns": [int((at - sent) * S) for at in came] if tokens else None}
        rows.append(row)
    return requests_of(pa.Table.from_pylist(rows, schema=REQUESTS))


def spans(requests: Requests, silences: Windows = NEVER) -> list[tuple[float, float, int]]:
    found = partial_stalls(requests, np.arange(len(requests)), requests.start_ns, silences)
    return [((gap.start_ns - T0) / S, (gap.end_ns - T0) / S, gap.requests.size) for gap in found]


def steps(first: float, last: float, *holes: tuple[float, float]) -> list[float]:
    """A token every 20 ms, but for those within holes."""
    times = np.arange(round(first / 0.02), round(last / 0.02) + 1) * 0.02
    return [float(at) for at in times if not any(low < at < high for low, high in holes)]


def test_two_that_stop_and_go_on_together_while_another_is_answered_stood_still() -> None:
    held = [(0.0, steps(0.1, 6.0, (2.0, 4.0))), (0.5, steps(0.6, 6.0, (2.0, 4.0)))]
    ((start, end, count),) = spans(answers(*held, (0.2, steps(0.3, 6.0))))
    assert (start, end) == pytest.approx((2.0, 4.0), abs=0.05)
    assert count == 2


def test_a_server_that_stands_still_for_all_leaves_nobody_standing() -> None:
    assert not spans(answers(*[(at, steps(at + 0.1, 6.0, (2.0, 4.0))) for at in (0.0, 0.2, 0.5)]))


def test_a_prefill_that_holds_up_every_answer_leaves_nobody_standing() -> None:
    late = (2.1, steps(3.0, 6.0, (3.0, 4.0)))  # its first token comes between two prefills
    assert not spans(answers(*[(at, steps(at + 0.1, 6.0, (2.0, 4.0))) for at in (0.0, 0.2)], late))


def test_one_request_alone_may_have_lost_a_packet() -> None:
    def held(seconds: float) -> Requests:
        return answers((0.0, steps(0.1, 6.0, (2.0, 2.0 + seconds))), (0.2, steps(0.3, 6.0)))

    assert not spans(held(0.8))
    assert len(spans(held(1.6))) == 1


@pytest.mark.parametrize("tokens", [True, False])
def test_who_is_overtaken_for_longer_than_prompts_as_long_take_stood_still(tokens: bool) -> None:
    usual = [(0.1 * at, [0.1 * at + 0.2, 0.1 * at + 0.4]) for at in range(60)]
    held = [(1.05, [4.05, 4.3]), (1.52, [4.25, 4.5]), (1.91, [4.3, 4.4])]
    ordered = sorted([*usual, *held])
    ((start, end, count),) = spans(answers(*ordered, tokens=tokens))
    assert (start, end) == pytest.approx((1.05, 4.3))
    assert count == 3
    assert not spans(answers(*sorted([*usual, *held[:2]]), tokens=tokens)), "two may have reasons of their own"
    asleep = windows_of([(T0 + S, T0 + 4 * S)])
    assert not spans(answers(*ordered, tokens=tokens), asleep), "it stood still for all"


def test_long_prompts_may_be_overtaken() -> None:
    usual = [(0.1 * at, [0.1 * at + 0.2, 0.1 * at + 0.4]) for at in range(60)]
    slow = [(0.2 * at + 0.05, [0.2 * at + 3.05, 0.2 * at + 3.3]) for at in range(30)]
    ordered = sorted([*usual, *slow])
    assert not spans(answers(*ordered, lengths=[4000 if one in slow else 100 for one in ordered]))


def test_a_queue_in_order_leaves_nobody_standing() -> None:
    assert not spans(answers(*[(0.1 * at, [0.5 * at + 0.5, 0.5 * at + 0.6]) for at in range(40)]))


def test_nothing_is_found_of_nothing() -> None:
    assert not spans(answers((0.0, [0.1, 0.2])))
    assert not partial_stalls(answers((0.0, [0.1])), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), NEVER)
