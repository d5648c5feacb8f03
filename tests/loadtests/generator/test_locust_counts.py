from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

# Locust would patch the standard library for every other test in this process.
with patch.dict(os.environ, {"LOCUST_SKIP_MONKEY_PATCH": "1"}):
    from locust.env import Environment

    from loadtests.generator.locust_counts import AT_ONCE, LocustCounts

NAMES = ("Generate e2e", "Generate ttft [eager]")
REQUESTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.floats(0, 2e5, allow_nan=False), st.integers(0, 500)), max_size=3 * AT_ONCE
)


def figures(entry: Any) -> tuple[Any, ...]:
    return (
        entry.num_requests,
        sum(entry.num_reqs_per_sec.values()),
        pytest.approx(entry.total_response_time),  # sums in another order differ in their last digits
        entry.min_response_time,
        entry.max_response_time,
        dict(entry.response_times),
        entry.total_content_length,
    )


@given(REQUESTS)
def test_counts_in_bulk_are_what_locust_would_have_counted_one_by_one(requests: list[tuple[str, float, int]]) -> None:
    one_by_one, in_bulk = Environment(), Environment()
    counts = LocustCounts(in_bulk)
    for name, response_ms, length in requests:
        one_by_one.stats.log_request("gRPC", name, response_ms, length)  # type: ignore[arg-type]
        counts.add("gRPC", name, response_ms, length)
    counts.flush()
    assert figures(in_bulk.stats.total) == figures(one_by_one.stats.total)
    assert in_bulk.stats.entries.keys() == one_by_one.stats.entries.keys()
    for key, entry in one_by_one.stats.entries.items():
        assert figures(in_bulk.stats.entries[key]) == figures(entry)


def test_many_count_without_a_flush() -> None:
    environment = Environment()
    counts = LocustCounts(environment)
    for _ in range(AT_ONCE):
        counts.add("gRPC", "Generate e2e", 1.0, 1)
    assert environment.stats.total.num_requests == AT_ONCE


def test_another_listener_is_noticed() -> None:
    environment = Environment()
    environment.create_local_runner()
    counts = LocustCounts(environment)
    assert counts.alone
    environment.events.request.add_listener(lambda **_: None)  # type: ignore[no-untyped-call]
    assert not counts.alone


def test_a_day_keeps_no_more_of_single_seconds_than_its_last_minute() -> None:
    environment = Environment()
    counts = LocustCounts(environment)
    stats: Any = environment.stats
    for second in range(0, 86_400, 10):
        with patch("loadtests.generator.locust_counts.time.time", return_value=float(second)):
            counts.add("gRPC", "Generate e2e", 1.0, 1)
            counts.flush()
        stats.log_error("gRPC", "Generate e2e", "UNAVAILABLE")
        stats.history.append({"time": second})
        counts.forget(float(second))
    entries = [stats.total, *stats.entries.values()]
    assert len(entries) == 2
    for entry in entries:
        assert entry.num_requests == 8640
        assert list(entry.num_reqs_per_sec) == list(range(86_330, 86_400, 10))
    assert not stats.history


def test_rates_that_locust_shows_are_the_same_after_old_seconds_are_forgotten() -> None:
    environment = Environment()
    counts = LocustCounts(environment)
    for second in range(1000, 1200):
        with patch("loadtests.generator.locust_counts.time.time", return_value=float(second)):
            counts.add("gRPC", "Generate e2e", 1.0, 1)
            counts.flush()
    total: Any = environment.stats.total
    before = total.current_rps, total.total_rps
    counts.forget(1199.0)
    assert (total.current_rps, total.total_rps) == before
