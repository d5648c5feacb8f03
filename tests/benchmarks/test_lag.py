from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lag import own_error, stalled_latencies, stream_figures
from benchmarks.observed import Emitted, Observed

MS = 1_000_000


def observed(**columns: list[int]) -> Observed:
    count = len(columns["sent"])
    zeros = [0] * count
    plain = {
        name: np.array(columns.get(name, zeros), np.int64) for name in ("scheduled", "sent", "end", "recv", "answer")
    }
    return Observed(
        names=np.array([f"r{number}" for number in range(count)]),
        ok=np.array(columns.get("ok", [1] * count), np.int64),
        stamps=np.array(columns.get("stamps", []), np.int64),
        counts=np.array(columns.get("counts", zeros), np.int64),
        **plain,
    )


def emitted(streams: int, tokens: int) -> Emitted:
    """Streams in phase 0 of 2, a tick each 10 ms, from 1 s on; every stream starts with the first tick."""
    ticks = np.arange(2 * tokens, dtype=np.int64)
    return Emitted(
        ticks=ticks,
        emits=1000 * MS + ticks * 10 * MS,
        names=np.array([f"r{number}" for number in range(streams)]),
        first_ticks=np.zeros(streams, np.int64),
        tokens=np.full(streams, tokens, np.int64),
        phases=2,
    )


def test_lag_is_the_stamp_less_the_servers_send_time() -> None:
    sent = emitted(1, 10)
    stamps = [1000 * MS + 20 * MS * k + (3 * MS if k == 4 else 1 * MS) for k in range(10)]
    figures = stream_figures(observed(sent=[0], stamps=stamps, counts=[10]), sent, start_ns=0, end_ns=10**12)
    assert figures["sent"] == 10
    assert figures["delivered"] == 1.0
    assert figures["p50_lag_ms"] == 1.0
    assert figures["max_lag_ms"] == 3.0
    assert figures["p99_itl_error_ms"] == pytest.approx(2.0, abs=0.01)


def test_tokens_that_do_not_come_are_late_until_the_window_ends() -> None:
    sent = emitted(1, 10)
    stamps = [1000 * MS + 20 * MS * k for k in range(5)]
    figures = stream_figures(observed(sent=[0], stamps=stamps, counts=[5]), sent, start_ns=1000 * MS, end_ns=1200 * MS)
    assert figures["delivered"] == 0.5
    assert figures["max_lag_ms"] == 100.0


def test_own_error_is_late_start_and_delivery_and_not_the_server() -> None:
    seen = observed(
        scheduled=[0, 100 * MS], sent=[1 * MS, 100 * MS], recv=[2 * MS, 101 * MS], answer=[52 * MS, 151 * MS],
        end=[54 * MS, 152 * MS],
    )  # fmt: skip
    figures = own_error(seen, start_ns=0, end_ns=10**9)
    assert figures["due"] == 2
    assert figures["answered"] == 1.0
    assert figures["max_own_ms"] == 3.0
    assert figures["p50_late_ms"] == 0.5
    assert figures["p50_delivery_ms"] == 1.5
    assert figures["p50_path_ms"] == 3.0  # 54 − 50 and 52 − 50


def test_a_stall_delays_what_would_have_been_answered_in_it() -> None:
    due = [0, 900 * MS, 1000 * MS, 2000 * MS, 3950 * MS, 4000 * MS]
    latency = stalled_latencies(due, service_ns=50 * MS, stall_ns=(1000 * MS, 4000 * MS)) / MS
    assert latency.tolist() == [50, 50, 3000, 2000, 50, 50]
