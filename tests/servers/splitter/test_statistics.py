"""What Envoy counts of each arm: the real one before real gRPC servers, and the reading of its answers."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.metadata import STATUS_NAMES
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.envoy import Envoy
from servers.splitter.statistics import (
    LATENCY_BOUNDS_MS,
    ArmStatistics,
    Latencies,
    between,
    parse_statistics,
    read_statistics,
)
from tests.servers.splitter.house import Build, House, ask, dial, wait_for


def counted(house: House, arm: str, completed: int, *, timed: int | None = None) -> ArmStatistics:
    """The statistics of the arm once `completed` requests have ended, and the latencies of `timed` are gathered."""

    def complete() -> bool:
        now = read_statistics(house.envoy.admin)[arm]
        return now.completed >= completed and now.latencies.count >= (timed or 0)

    assert wait_for(complete), read_statistics(house.envoy.admin)[arm]
    return read_statistics(house.envoy.admin)[arm]


# --- The real Envoy ---------------------------------------------------------------------------------------------------


def test_an_arm_without_traffic_counts_nothing_not_even_health_checks(build: Build) -> None:
    house = build({"eager": 2, "idle.arm": 1})
    assert wait_for(lambda: house.envoy.stats("health_check.success$")["cluster.eager.health_check.success"] > 6)
    statistics = read_statistics(house.envoy.admin)
    assert statistics.keys() == {"eager", "idle.arm"}
    eager = statistics["eager"]
    assert (eager.completed, eager.failed, eager.lost, eager.active, eager.cancelled) == (0, 0, 0, 0, 0)
    assert (eager.replicas, eager.healthy_replicas) == (2, 2)
    assert eager.latencies.quantile(0.99) is None


def test_every_status_is_counted_in_headers_and_in_trailers_for_arm_and_shadow(build: Build) -> None:
    house = build({"eager": 1, "dark.er": 1}, weights={"eager": 1, "dark.er": 0}, shadows={"dark.er": 100})
    before = read_statistics(house.envoy.admin)
    prompts = [f"{late}{name}" for name in STATUS_NAMES[1:] for late in ("", "late ")]
    house.ask(*[{"prompt": prompt, "tokens": 2} for prompt in [*prompts, "fine", "fine", "fine"]])
    for arm in ("eager", "dark.er"):
        counted(house, arm, 35, timed=35)
    for arm, statistics in between(before, read_statistics(house.envoy.admin)).items():
        assert statistics.statuses == {"OK": 3, **dict.fromkeys(STATUS_NAMES[1:], 2)}, arm
        assert (statistics.completed, statistics.failed, statistics.lost) == (35, 32, 0)
        assert statistics.latencies.count == 35
        assert (statistics.cancelled, statistics.resets, statistics.http_5xx, statistics.active) == (0, 0, 0, 0)


def test_streams_of_a_replica_that_dies_are_lost_and_not_forgotten(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100}, wired=True)
    held = house.hold(7)
    assert wait_for(lambda: house.replicas["dark"][0].active == 7)
    assert read_statistics(house.envoy.admin)["dark"].active == 7
    for replica in house.all:
        assert replica.wire is not None
        house.loop.run(replica.wire.cut())
    assert {answer.tokens for answer in held.result(10)} == {1}
    for arm in ("eager", "dark"):
        # Envoy has seen the status 200 of each, and never one of gRPC.
        statistics = counted(house, arm, 7)
        assert (statistics.statuses.get("OK", 0), statistics.lost, statistics.failed) == (0, 7, 7)
        assert statistics.active == 0
        assert statistics.latencies.count == 0


def test_requests_that_no_replica_could_take_are_failures(build: Build) -> None:
    house = build({"eager": 1, "compiled": 1})
    house.loop.run(house.replicas["eager"][0].stop())
    assert wait_for(lambda: house.envoy.healthy()["eager"] == (0, 1))
    house.ask(*[{"arm": "eager"}] * 5)
    eager = counted(house, "eager", 5)
    assert (eager.statuses, eager.without_replica, eager.lost) == ({"UNAVAILABLE": 5}, 5, 0)
    assert (eager.replicas, eager.healthy_replicas, eager.http_5xx) == (1, 0, 5)
    assert read_statistics(house.envoy.admin)["compiled"].completed == 0


def test_connections_that_fail_and_the_ejection_that_follows_are_counted(build: Build) -> None:
    # Health is asked once, at the start.
    house = build({"eager": 2}, health_interval_s=3600.0)
    gone = house.replicas["eager"][0]
    house.loop.run(gone.stop())
    for _ in range(40):
        house.ask({})
    eager = counted(house, "eager", 40)
    failures = eager.statuses["UNAVAILABLE"]
    assert 5 <= failures <= 6
    assert eager.connect_failures == failures
    assert eager.ejections == 1
    assert eager.replica_errors[gone.address.replace(":", "_")] == failures
    assert (eager.statuses["OK"], eager.lost, eager.healthy_replicas) == (40 - failures, 0, 1)


def test_a_client_that_gives_up_is_no_failure_of_the_arm(build: Build) -> None:
    house = build({"eager": 1})

    async def give_up() -> None:
        async with dial(house.envoy.target) as channel:
            calls = [asyncio.create_task(ask(channel, prompt="hold", tokens=3)) for _ in range(4)]
            while house.all[0].active < 4:
                await asyncio.sleep(0.005)
            for call in calls:
                call.cancel()

    house.loop.run(give_up())
    assert wait_for(lambda: read_statistics(house.envoy.admin)["eager"].cancelled == 4)
    eager = read_statistics(house.envoy.admin)["eager"]
    assert (eager.completed, eager.failed, eager.active) == (0, 0, 0)


def test_latency_is_that_of_the_whole_stream_and_of_its_own_bucket(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100})
    house.ask({})
    started_s = time.perf_counter()
    held = house.hold(3)
    assert wait_for(lambda: house.replicas["dark"][0].active == 3)
    held_s = time.perf_counter()
    threading.Event().wait(0.3)
    released_s = time.perf_counter()
    house.release()
    held.result(10)
    ended_s = time.perf_counter()
    for arm in ("eager", "dark"):
        latencies = counted(house, arm, 4, timed=4).latencies
        assert [int(bound) for bound, _ in latencies.buckets[:-1]] == list(LATENCY_BOUNDS_MS[:-1])
        longest = latencies.quantile(1.0)
        assert longest is not None
        assert longest.upper_ms > (released_s - held_s) * 1000
        if arm == "eager":
            assert longest.lower_ms <= (ended_s - started_s) * 1000
        assert longest.upper_ms <= longest.lower_ms * 1.16
        assert longest.lower_ms <= longest.estimate_ms <= longest.upper_ms


def test_a_restart_of_envoy_between_readings_is_an_error(build: Build) -> None:
    house = build({"eager": 1})
    house.ask({})
    earlier = dict(read_statistics(house.envoy.admin))
    house.envoy.stop()
    house.envoy = Envoy.start(house.config, log_path=house.work_dir / "again.log", work_dir=house.work_dir)
    house.envoy.wait_ready(20)
    with pytest.raises(
        SplitterError, match=r'^arm "eager": statuses OK fell from 1 to 0 between the readings, as when'
    ):
        between(earlier, read_statistics(house.envoy.admin))


@pytest.mark.parametrize("answer", ["OK", "[]", "{}", '{"stats": []}', '{"stats": [{"name": "server.uptime"}]}'])
def test_who_is_no_split_is_named_in_one_line(answer: str) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, format: str, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        port = server.server_port
        with pytest.raises(SplitterError, match=rf"^127\.0\.0\.1:{port} answered no statistics of arms \(\w+\): is it"):
            read_statistics(Admin("127.0.0.1", port))
        thread.join()


# --- The reading of what it answers -----------------------------------------------------------------------------------


def document(values: Mapping[str, int], latencies_ms: Sequence[float] = (), *, uptime_s: int = 100) -> dict[str, Any]:
    """An answer of Envoy's about the arm "eager"."""
    times = np.array(latencies_ms)
    buckets = [{"upper_bound": bound, "interval": 0, "cumulative": int((times < bound).sum())} for bound in BOUNDS]
    return {
        "stats": [
            {"name": "server.uptime", "value": uptime_s},
            {"name": "cluster.eager.membership_total", "value": 1},
            *({"name": f"cluster.eager.{name}", "value": value} for name, value in values.items()),
            {"histograms": [{"name": "cluster.eager.upstream_rq_time", "buckets": buckets}]},
        ]
    }


BOUNDS = LATENCY_BOUNDS_MS
BEFORE = {"grpc.0": 10, "grpc.13": 2, "endpoint.10.0.0.1_1.rq_error": 3, "upstream_rq_tx_reset": 1}


def test_latency_bounds_are_fine_few_and_have_two_digits() -> None:
    assert sorted(set(BOUNDS)) == list(BOUNDS)
    assert BOUNDS[0] == 1
    assert 600_000 in BOUNDS
    assert len(BOUNDS) < 130
    assert all(later / earlier < 1.16 for earlier, later in itertools.pairwise(BOUNDS[9:-1]))
    assert all(float(f"{bound:.1e}") == bound for bound in BOUNDS)


@given(
    st.lists(st.floats(0, 900_000), min_size=1, max_size=60),
    st.sampled_from((0.0, 0.01, 0.5, 0.9, 0.99, 1.0)),
)
def test_a_quantile_lies_in_its_bucket(times_ms: list[float], q: float) -> None:
    latencies = parse_statistics(document({}, times_ms), read_s=0.0)["eager"].latencies
    found = latencies.quantile(q)
    assert found is not None
    assert latencies.count == len(times_ms)
    exact = float(np.quantile(np.array(times_ms), q, method="inverted_cdf"))
    assert found.lower_ms <= exact < found.upper_ms
    assert found.lower_ms <= found.estimate_ms <= found.upper_ms
    assert found.upper_ms in {*BOUNDS[:-1], math.inf}


@pytest.mark.parametrize("q", [-0.1, 1.5, math.nan])
def test_a_quantile_out_of_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="is out of range: give a share from 0 to 1"):
        Latencies().quantile(q)


def test_between_counts_what_came_after_and_shows_what_stands_now() -> None:
    after = {**BEFORE, "grpc.0": 40, "grpc.8": 5, "endpoint.10.0.0.1_1.rq_error": 6, "upstream_rq_active": 7}
    earlier = parse_statistics(document(BEFORE, [5.0] * 12), read_s=1000.0)
    later = parse_statistics(document(after, [5.0] * 12 + [300.0] * 35, uptime_s=160), read_s=1060.4)
    eager = between(earlier, later)["eager"]
    assert eager.statuses == {"OK": 30, "INTERNAL": 0, "RESOURCE_EXHAUSTED": 5}
    assert (eager.lost, eager.completed, eager.failed, eager.cancelled, eager.active) == (3, 38, 8, 0, 7)
    assert eager.latencies.count == 35
    median = eager.latencies.quantile(0.5)
    assert median is not None
    assert (median.lower_ms, median.upper_ms) == (300, 330)


def test_the_first_requests_of_an_arm_are_between_too() -> None:
    nothing = {"stats": [item for item in document({})["stats"] if "histograms" not in item]}
    eager = between(parse_statistics(nothing, read_s=0.0), parse_statistics(document(BEFORE, [2.0] * 12), read_s=0.0))[
        "eager"
    ]
    assert (eager.completed, eager.latencies.count) == (13, 12)


def test_a_replica_that_came_back_counts_from_nothing_and_one_that_left_is_left_out() -> None:
    earlier = parse_statistics(document({"endpoint.a_1.rq_error": 9, "endpoint.b_1.rq_error": 4}), read_s=0.0)
    later = parse_statistics(document({"endpoint.a_1.rq_error": 2, "endpoint.c_1.rq_error": 1}), read_s=0.0)
    assert between(earlier, later)["eager"].replica_errors == {"a_1": 2, "c_1": 1}


def test_another_start_is_found_although_all_counters_grew() -> None:
    earlier = parse_statistics(document(BEFORE, uptime_s=30), read_s=1000.0)
    later = parse_statistics(document(dict.fromkeys(BEFORE, 99), uptime_s=50), read_s=1060.0)
    with pytest.raises(SplitterError, match=r'^arm "eager": Envoy was started anew between the readings, and counts'):
        between(earlier, later)


@pytest.mark.parametrize("name", ["cancelled", "latencies"])
def test_counters_that_fall_are_named(name: str) -> None:
    earlier = parse_statistics(document(BEFORE, [5.0] * 3), read_s=0.0)
    later = parse_statistics(document({**BEFORE, "upstream_rq_tx_reset": int(name != "cancelled")}), read_s=0.0)
    with pytest.raises(SplitterError, match=rf'^arm "eager": {name} fell from \d to 0 between the readings') as refusal:
        between(earlier, later)
    assert "\n" not in str(refusal.value)


def test_readings_of_two_splits_are_not_compared() -> None:
    eager = parse_statistics(document(BEFORE), read_s=0.0)
    with pytest.raises(
        SplitterError, match=r"^Envoy splits over eager and not over eager, compiled as before: read it"
    ):
        between({**eager, "compiled": eager["eager"]}, eager)


def test_a_status_that_grpc_does_not_define_is_unknown() -> None:
    eager = parse_statistics(document({"grpc.2": 1, "grpc.99": 2, "grpc.success": 5, "grpc.total": 8}), read_s=0.0)
    assert eager["eager"].statuses == {"UNKNOWN": 3}
    assert grpc.StatusCode["UNKNOWN"].value[0] == 2
