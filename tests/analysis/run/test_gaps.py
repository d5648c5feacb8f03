import numpy as np
import pyarrow as pa
import pytest

from analysis.records.requests import requests_of
from analysis.records.schemas import REQUESTS
from analysis.run import gaps
from analysis.run.gaps import gaps_of

S = 1_000_000_000
MS = 1_000_000
T0 = 1_700_000_000 * S


def requests(*rows):
    """Each row is (first token at ms, gaps in ms, status)."""
    table = []
    for first, between, status in rows:
        times = first * MS + np.concatenate(([0], np.cumsum(between))) * MS
        table.append(
            {
                "arm": "a",
                "trial": 1,
                "scheduled_ns": T0,
                "sent_ns": T0,
                "first_token_ns": T0 + int(times[0]),
                "end_ns": T0 + int(times[-1]),
                "status": status,
                "output_tokens": len(times),
                "token_ns": times.astype(int).tolist(),
            }
        )
    return requests_of(pa.Table.from_pylist(table, schema=REQUESTS), deadline_ms=5000)


def test_each_gap_ends_when_its_token_came():
    found = gaps_of(requests((100, [10, 20], "OK"), (50, [40], "OK")), np.array([0, 1]))
    assert found.ms.tolist() == [10, 20, 40]
    assert found.row.tolist() == [0, 0, 1]
    assert ((found.end_ns - T0) / MS).tolist() == pytest.approx([110, 130, 90])


def test_only_the_requests_asked_for_are_there():
    found = gaps_of(requests((100, [10, 20], "OK"), (50, [40, 30], "OK")), np.array([1]))
    assert (found.ms.tolist(), found.row.tolist()) == ([40, 30], [1, 1])
    assert ((found.end_ns - T0) / MS).tolist() == pytest.approx([90, 120])


def test_a_failure_counts_with_the_gaps_it_had_and_one_of_its_deadline():
    found = gaps_of(requests((100, [10, 20], "DEADLINE_EXCEEDED"), (50, [40], "OK")), np.array([0, 1]))
    assert sorted(zip(found.ms.tolist(), found.failed.tolist(), strict=True)) == [
        (10, False),
        (20, False),
        (40, False),
        (5000, True),
    ]


def test_no_request_has_no_gap():
    data = requests((100, [10], "OK"))
    assert len(gaps_of(data, np.zeros(0, dtype=np.int64))) == 0
    assert len(gaps_of(data, np.array([0]), most=1)) == 1


@pytest.mark.parametrize("chunk", [3, 1 << 17])
def test_every_kth_gap_is_taken_where_there_are_many(chunk, monkeypatch):
    monkeypatch.setattr(gaps, "_CHUNK", chunk)
    rng = np.random.default_rng(1)
    data = requests(*[(100, rng.integers(1, 1000, size=rng.integers(1, 9)).tolist(), "OK") for _ in range(20)])
    everything = gaps_of(data, np.arange(20))
    some = gaps_of(data, np.arange(20), most=len(everything) // 4)
    step = len(everything) // len(some)
    assert step >= 4
    assert some.ms.tolist() == everything.ms[::step].tolist()
    assert some.end_ns.tolist() == everything.end_ns[::step].tolist()
