"""The queue that a compile leaves, and quantiles as they would be without compiles."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from analysis.records.requests import Requests, requests_of
from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.run.backlog import with_backlog
from analysis.run.counterfactual import counterfactual
from analysis.run.run import Run
from analysis.run.spikes import (
    CAUSES,
    Attribution,
    CompileEvent,
    attribute,
    compile_events,
    find_spikes,
    without_stalls_ms,
)
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

S = 1_000_000_000
T0 = 1_700_000_000 * S
SERVER = {"trial": 1, "arm": "compiled", "replica": "compiled-0"}


def at(seconds: float) -> int:
    return T0 + int(seconds * S)


def request(index: int, recv_s: float, begin_s: float, end_s: float, **more: object) -> dict[str, object]:
    """A request whose first token comes 0.1 s after its begin."""
    times = {"scheduled_ns": recv_s, "sent_ns": recv_s, "first_token_ns": begin_s + 0.1, "end_ns": end_s}
    times |= {"server_recv_ns": recv_s, "server_end_ns": end_s}
    row = {**SERVER, "request_id": f"{index}", "status": "OK", "output_tokens": 5}
    row |= {"queue_ns": int((begin_s - recv_s) * S), **{name: at(value) for name, value in times.items()}}
    return row | more


def followed(
    requests: list[dict[str, object]], start_s: float, end_s: float
) -> tuple[Requests, tuple[CompileEvent, ...], Attribution]:
    """The requests as one compile from `start_s` to `end_s` left them."""
    event = {**SERVER, "event_id": "e1", "kind": "recompile", "phase": "serving"}
    event |= {"start_ns": at(start_s), "end_ns": at(end_s)}
    table = requests_of(pa.Table.from_pylist(requests, schema=REQUESTS))
    found = compile_events(pa.Table.from_pylist([event], schema=COMPILE_EVENTS), table)
    return table, found, with_backlog(table, found, attribute(table, found))


def one_slot() -> list[dict[str, object]]:
    """A request a second that takes 0.6 s, one at a time; the tenth needs a compile of 5 s."""
    free, rows = 0.0, []
    for index in range(60):
        begin = max(float(index), free)
        free = begin + 0.6 + (5.0 if index == 10 else 0.0)
        first = {"first_token_ns": at(begin + 5.1)} if index == 10 else {}
        rows.append(request(index, float(index), begin, free, **first))
    return rows


def test_the_queue_that_a_compile_made_is_its_backlog_until_it_is_drained() -> None:
    table, _, found = followed(one_slot(), 10.0, 15.0)
    # 5 s of stall and 0.4 s to spare in each second: the delay falls from 5 s by 0.4 s a request.
    delay = found.stall_ms + found.backlog_ms
    assert delay[10:23] == pytest.approx([5000 - 400 * step for step in range(12)] + [200], abs=6)
    assert (delay[:10] == 0).all()
    assert (delay[23:] == 0).all()
    assert found.stall_ms[15:].sum() == 0.0, "the compile had ended when they came"
    assert (found.cause[16:23] == CAUSES.index("in the backlog of one")).all()
    assert without_stalls_ms(table, found, "e2e") == pytest.approx(np.full(60, 600.0), abs=6)
    assert without_stalls_ms(table, found, "ttft") == pytest.approx(np.full(60, 100.0), abs=6)


def test_a_spike_says_how_much_is_direct_and_how_much_is_backlog() -> None:
    calm = [request(100 + index, 100.0 + index, 100.0 + index, 100.6 + index) for index in range(200)]
    table, events, found = followed([*one_slot(), *calm], 10.0, 15.0)
    (spike,) = find_spikes(table, found, events, control="eager")
    assert (spike.cause, spike.event_ids) == ("queued behind a compile", ("e1",))
    assert spike.backlog_pct > spike.direct_pct > 30
    assert spike.explained_pct == pytest.approx(100, abs=2)
    assert spike.explained_pct == pytest.approx(spike.direct_pct + spike.backlog_pct)


def test_a_compile_that_delays_no_request_leaves_no_backlog() -> None:
    rows = [request(index, index, index, index + 0.6, compile_stall_ns=0) for index in range(60)]
    assert followed(rows, 10.0, 15.0)[2].backlog_ms.sum() == 0.0


def test_the_intervals_without_compiles_hold_the_estimates(tmp_path: Path) -> None:
    compiles = [Compile(at_s=40.0 + 90.0 * number, seconds=4.0) for number in range(6)]
    fake = FakeRun(arms=(EAGER, FakeArm(name="compiled", compiles=compiles)), duration_s=600.0, rate=3.0)
    found = counterfactual(Run.of(read_run(write_run(tmp_path, fake))), "compiled", "e2e")
    assert found.low_ms < found.without_ms < found.high_ms
    assert found.least_ms < found.without_ms < found.most_ms
    assert 0.0 <= found.explained_low_pct < found.explained_pct < found.explained_high_pct <= 100.0
    assert found.explained_pct > 50.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"server_columns": False}, "queue_ns"),
        ({"open_loop": False}, "the load waited for the server"),
        ({"telemetry": False, "config": {"compile": {"enabled": True}}}, "no compile events are recorded"),
    ],
    ids=["no server times", "closed loop", "no telemetry"],
)
def test_a_quantile_without_compiles_is_withdrawn_where_the_queue_is_not_known(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    options = dict(change)
    arm = FakeArm(name="compiled", compiles=[Compile(at_s=40.0, seconds=4.0)], config=options.pop("config", {}))
    folder = write_run(tmp_path, replace(FakeRun(arms=(EAGER, arm), duration_s=120.0), **options))
    found = counterfactual(Run.of(read_run(folder)), "compiled", "e2e")
    assert reason in (found.withdrawn or "")
    assert math.isnan(found.without_ms)
    assert math.isnan(found.most_ms)
