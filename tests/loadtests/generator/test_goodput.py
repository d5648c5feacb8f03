"""Goodput as it is counted by hand: requests within every limit, per second from first to last."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from loadtests.generator.goodput import Goodput

MS = 1_000_000


@dataclass
class Record:
    ttft_ms: float | None = 100.0
    e2e_ms: float = 400.0
    output_tokens: int = 4
    ok: bool = True
    arm: str | None = "eager"
    scheduled_ns: int = 1_000 * MS
    end_ns: int = 2_000 * MS
    token_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.array([100, 200, 300, 400]) * MS)


@pytest.mark.parametrize(
    ("limits", "record", "good"),
    [
        ({"ttft": 100}, Record(), True),
        ({"ttft": 99}, Record(), False),
        ({"tpot": 100}, Record(), True),
        ({"tpot": 99}, Record(), False),
        ({"tpot": 1}, Record(output_tokens=1), True),
        ({"ttft": 100, "tpot": 99}, Record(), False),
        ({"e2el": 400}, Record(), True),
        ({"e2e": 399}, Record(), False),
        ({"max_itl": 100}, Record(), True),
        ({"max_itl": 99}, Record(), False),
        ({"ttft": 1000}, Record(ok=False), False),
        ({"ttft": 1000}, Record(ttft_ms=None), False),
    ],
)
def test_a_request_is_good_within_every_limit(limits: dict[str, float], record: Record, good: bool) -> None:
    assert Goodput(limits).is_good(record) is good


def test_lines_say_the_rate_from_first_to_last() -> None:
    counted = Goodput({"ttft": 200.0})
    for second in range(10):
        bad = second == 3
        counted.add(
            Record(ttft_ms=300.0 if bad else 100.0, scheduled_ns=second * 1000 * MS + 1, end_ns=second * 1000 * MS + 1)
        )
    (line,) = counted.lines()
    assert line == "goodput of eager: 1 requests/s; 9 of 10 requests (90 %) within ttft 200 ms, in 9 s"


def test_counts_of_several_processes_add_up() -> None:
    whole, parts = Goodput({"ttft": 200.0}), [Goodput({"ttft": 200.0}) for _ in range(2)]
    for second in range(10):
        record = Record(scheduled_ns=second * 1000 * MS + 1, end_ns=second * 1000 * MS + 500 * MS)
        whole.add(record)
        parts[second % 2].add(record)
    total = Goodput({"ttft": 200.0})
    for part in parts:
        total.merge(part.take())
        assert part.take()["arms"] == {}
    assert total.lines() == whole.lines()


def test_nothing_ended_is_said() -> None:
    assert Goodput({"ttft": 200.0}).lines() == ["goodput: no request ended; limits ttft 200 ms"]
