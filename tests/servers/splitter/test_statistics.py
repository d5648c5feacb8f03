"""What Envoy counts of each arm: the real one before real gRPC servers, and the reading of its answers."""

from __future__ import annotations

import asyncio
import http.server
import threading

import pytest

from servers.metadata import STATUS_NAMES
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.statistics import ArmStatistics, parse_statistics, read_statistics
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.splitter.house import Build, House, ask, dial


def counted(house: House, arm: str, ended: int) -> ArmStatistics:
    """The statistics of the arm once so many requests have ended."""
    wait_for(
        lambda: read_statistics(house.envoy.admin)[arm].ended >= ended,
        otherwise=lambda: read_statistics(house.envoy.admin),
    )
    return read_statistics(house.envoy.admin)[arm]


# --- The real Envoy ---------------------------------------------------------------------------------------------------


def test_an_arm_without_traffic_counts_nothing_not_even_health_checks(build: Build) -> None:
    house = build({"eager": 2, "idle.arm": 1})
    wait_for(lambda: house.envoy.stats("health_check.success$")["cluster.eager.health_check.success"] > 6)
    statistics = read_statistics(house.envoy.admin)
    assert statistics.keys() == {"eager", "idle.arm"}
    assert (statistics["eager"].ended, statistics["eager"].active) == (0, 0)


def test_every_status_is_counted_in_headers_and_in_trailers_for_arm_and_shadow(build: Build) -> None:
    house = build({"eager": 1, "dark.er": 1}, weights={"eager": 1, "dark.er": 0}, shadows={"dark.er": 100})
    prompts = [f"{late}{name}" for name in STATUS_NAMES[1:] for late in ("", "late ")]
    house.ask(*[{"prompt": prompt, "tokens": 2} for prompt in [*prompts, "fine", "fine", "fine"]])
    for arm in ("eager", "dark.er"):
        statistics = counted(house, arm, 35)
        assert statistics.statuses == {"OK": 3, **dict.fromkeys(STATUS_NAMES[1:], 2)}, arm
        assert (statistics.ended, statistics.lost, statistics.cancelled) == (35, 0, 0)


def test_streams_of_a_replica_that_dies_are_lost_and_not_forgotten(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100}, wired=True)
    held = house.hold(7)
    wait_for(lambda: house.replicas["dark"][0].active == 7)
    assert read_statistics(house.envoy.admin)["dark"].active == 7
    for replica in house.all:
        assert replica.wire is not None
        house.loop.run(replica.wire.cut())
    assert {answer.tokens for answer in held.result(PATIENCE_S)} == {1}
    for arm in ("eager", "dark"):
        # Envoy has seen the status 200 of each, and never one of gRPC.
        statistics = counted(house, arm, 7)
        assert (statistics.statuses.get("OK", 0), statistics.lost, statistics.active) == (0, 7, 0)


def test_requests_that_no_replica_could_take_are_counted(build: Build) -> None:
    house = build({"eager": 1, "compiled": 1})
    house.loop.run(house.replicas["eager"][0].stop())
    wait_for(lambda: house.envoy.healthy()["eager"] == (0, 1))
    house.ask(*[{"arm": "eager"}] * 5)
    eager = counted(house, "eager", 5)
    assert (eager.statuses, eager.without_replica, eager.lost) == ({"UNAVAILABLE": 5}, 5, 0)
    assert read_statistics(house.envoy.admin)["compiled"].ended == 0


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
    wait_for(lambda: read_statistics(house.envoy.admin)["eager"].cancelled == 4)
    eager = read_statistics(house.envoy.admin)["eager"]
    assert (eager.ended, eager.active) == (4, 0)


@pytest.mark.parametrize(
    "answer",
    ["OK", "\xff", "[]", "[" * 5000, "{}", '{"stats": [1]}', '{"stats": []}', '{"stats": [{"name": "server.uptime"}]}'],
)
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
            read_statistics(Admin(f"127.0.0.1:{port}"))
        thread.join()


# --- The reading of what it answers -----------------------------------------------------------------------------------


def test_a_status_that_grpc_does_not_define_is_unknown() -> None:
    stats = [{"name": "server.uptime", "value": 100}, {"name": "cluster.eager.grpc.99", "value": 3}]
    assert parse_statistics({"stats": stats}, read_s=0.0)["eager"].statuses == {"UNKNOWN": 3}
