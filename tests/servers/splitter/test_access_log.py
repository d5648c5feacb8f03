"""What the real Envoy writes of requests and of the copies that shadows got, and the reading of it."""

from __future__ import annotations

import asyncio
import http.server
import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers.fields import ConfigError
from servers.metadata import STATUS_NAMES
from servers.splitter.access_log import LoggedRequest, log_path, parse_line
from servers.splitter.admin import Admin, SplitterError
from servers.splitter.bootstrap import bootstrap
from servers.splitter.envoy import envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig
from servers.splitter.statistics import ArmStatistics, parse_statistics, read_statistics
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.splitter.house import Build, House, ask, dial


def logged(house: House, count: int) -> list[LoggedRequest]:
    """The lines of the log once there are `count`."""
    path = Path(house.config.request_log)

    def ended() -> list[LoggedRequest]:
        rows = map(parse_line, path.read_text().splitlines()) if path.exists() else ()
        return [row for row in rows if row is not None and row.ended]

    wait_for(lambda: len(ended()) >= count, otherwise=path.read_text)
    assert len(ended()) == count
    return ended()


def test_a_request_that_is_under_way_has_a_line_and_its_end_the_same_start(build: Build, tmp_path: Path) -> None:
    house = build({"eager": 1}, request_log=str(tmp_path / "requests.log"))
    house.hold(1)
    path = tmp_path / "requests.log"
    wait_for(lambda: path.exists() and path.read_text().count("\n") == 1)
    begun = parse_line(path.read_text())
    assert begun is not None
    assert (begun.ended, begun.inference) == (False, True)
    house.release()
    (whole,) = logged(house, 1)
    assert (whole.start_ns, whole.connection) == (begun.start_ns, begun.connection)


def test_the_log_of_a_split_is_found_by_its_admin_address(build: Build, tmp_path: Path) -> None:
    house = build({"eager": 1, "compiled": 1}, request_log=str(tmp_path / "requests.log"))
    assert log_path(house.envoy.admin) == str(tmp_path / "requests.log")
    assert log_path(build({"eager": 1}).envoy.admin) == ""


def mirrored(build: Build, tmp_path: Path, **settings: object) -> House:
    shadow: dict[str, object] = {"weights": {"eager": 1, "dark": 0}, "shadows": {"dark": 100}, **settings}
    return build({"eager": 1, "dark": 1}, request_log=str(tmp_path / "requests.jsonl"), **shadow)


def test_a_copy_has_a_line_like_the_request_that_it_copies(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path)
    before = time.time_ns()
    house.ask({"tokens": 3, "session": "s1", "request_id": "1-7"})
    rows = {row.arm: row for row in logged(house, 2)}
    assert {arm: row.copy for arm, row in rows.items()} == {"eager": False, "dark": True}
    for arm, row in rows.items():
        assert (row.request_id, row.session_id, row.pinned) == ("1-7", "s1", False)
        assert (row.status, row.error, row.replica) == ("OK", "", f"{arm}-0")
        assert row.path == "/tailgate.v1.Inference/Generate"
        assert row.figures == {"queue_ns": 1234567890123}
        assert row.first_ns is not None
        assert 0 < row.first_ns <= row.end_ns
        assert before - 1_000_000 <= row.start_ns <= time.time_ns()


def test_a_status_is_read_from_headers_and_trailers_with_its_message(build: Build, tmp_path: Path) -> None:
    house = mirrored(build, tmp_path)
    house.ask({"prompt": "RESOURCE_EXHAUSTED"}, {"prompt": "late INTERNAL", "tokens": 2})
    rows = logged(house, 4)
    assert sorted((row.arm, row.status) for row in rows) == [
        (arm, status) for arm in ("dark", "eager") for status in ("INTERNAL", "RESOURCE_EXHAUSTED")
    ]
    assert {row.error for row in rows} == {"the engine failed"}


def test_torn_lines_are_none() -> None:
    assert [parse_line(line) for line in ("", "{", "[]", "null", '{"arm":"a"}', '{"start_s":"x.y"}')] == [None] * 6


ENDED = {
    "event": "DownstreamEnd",
    "connection": 4,
    "arm": "eager",
    "copy": "0",
    "start_s": "1800000000.5",
    "duration_ms": 7,
    "status": 0,
}


def test_what_is_beyond_a_column_is_no_figure() -> None:
    whole = parse_line(json.dumps({**ENDED, "figures": {"queue_ns": "9" * 30, "batch_id": "1" * 5000, "recv_ns": "5"}}))
    assert whole is not None
    assert (whole.end_ns, whole.figures) == (7_000_000, {"recv_ns": 5})


def test_a_clock_of_today_is_a_figure() -> None:
    whole = parse_line(json.dumps({**ENDED, "figures": {"recv_ns": "1795658587999068231", "end_ns": str(2**63)}}))
    assert whole is not None
    assert whole.figures == {"recv_ns": 1795658587999068231}


def test_half_a_character_is_none() -> None:
    whole = parse_line(json.dumps({**ENDED, "session": "a\ud800", "status": 13, "message": "\udc00b"}))
    assert whole is not None
    assert (whole.session_id, whole.error) == ("a?", "?b")


@pytest.mark.parametrize(
    "line",
    [
        "[" * 50_000,
        json.dumps({**ENDED, "end_ns": float("inf")}),
        json.dumps({**ENDED, "duration_ms": 10**30}),
        json.dumps({**ENDED, "start_s": "1" + "0" * 30}),
        json.dumps({**ENDED, "start_s": "-5"}),
    ],
)
def test_a_line_with_times_of_no_clock_is_none(line: str) -> None:
    assert parse_line(line) is None


def counted(house: House, arm: str, ended: int) -> ArmStatistics:
    """The statistics of the arm once so many requests have ended."""
    wait_for(
        lambda: read_statistics(house.envoy.admin)[arm].ended >= ended,
        otherwise=lambda: read_statistics(house.envoy.admin),
    )
    return read_statistics(house.envoy.admin)[arm]


# --- The real Envoy ---------------------------------------------------------------------------------------------------


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


def test_silent_streams_are_never_cut() -> None:
    config = bootstrap(SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),)))
    (listener,) = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["stream_idle_timeout"] == "0s"
    assert manager["common_http_protocol_options"] == {"idle_timeout": "0s"}
    routes = [route["route"] for route in manager["route_config"]["virtual_hosts"][0]["routes"] if "route" in route]
    assert [(route["timeout"], route["idle_timeout"]) for route in routes] == [("0s", "0s")] * 2
    assert not any("retry_policy" in route for route in routes)


@pytest.mark.parametrize(
    "config",
    [
        SplitterConfig(
            arms=(
                ArmTarget(name="eager", backends=("eager.tailgate.svc:50051", "[::1]:50051")),
                ArmTarget(name="Compiled_2.13", backends=("10.0.0.1:50051",), weight=0, shadow_percent=0.5),
            ),
            host="0.0.0.0",
            port=8080,
            stickiness="replica",
            access_log="/dev/null",
            health_interval_s=0.25,
        ),
        SplitterConfig(arms=(ArmTarget(name="eager", backends=("localhost:50051",)),), stickiness="off", host="::1"),
    ],
)
def test_envoy_accepts_the_written_bootstrap(config: SplitterConfig, tmp_path: Path) -> None:
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(bootstrap(config)))
    outcome = subprocess.run(
        [envoy_path(), "--mode", "validate", "--config-path", path, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "deprecated" not in outcome.stderr.lower()


def lonely_config(**settings: Any) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),), **settings)


def shadow(percent: float, weight: int = 0) -> ArmTarget:
    return ArmTarget(name="a", backends=("h:1",), weight=weight, shadow_percent=percent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArmTarget(name="a b", backends=("h:1",)), 'arm name "a b" is not usable'),
        (lambda: ArmTarget(name="a", backends=()), 'arm "a" has no replica'),
        (lambda: ArmTarget(name="a", backends=("h:1", "h:1")), 'arm "a" names a replica twice'),
        (lambda: ArmTarget(name="a", backends=("h",)), 'address "h" is not host:port'),
        (lambda: ArmTarget(name="a", backends=("h:99999",)), 'address "h:99999" is not host:port'),
        (lambda: shadow(101), 'shadow of arm "a" is 101 %: give 0 %, or from 0.0001 % to 100 %'),
        (lambda: shadow(-1), 'shadow of arm "a" is -1 %'),
        (lambda: shadow(0.00001), 'shadow of arm "a" is 1e-05 %'),
        (lambda: shadow(float("nan")), 'shadow of arm "a" is nan %'),
        (lambda: shadow(25, weight=3), 'arm "a" gets copies of 25 % of the requests and has weight 3: set one of them'),
        (lambda: SplitterConfig(arms=()), "the splitter has no arm"),
        (lambda: lonely_config(host="localhost"), 'splitter.host is "localhost"'),
        (lambda: lonely_config(port=-1), "splitter.port is -1"),
        (lambda: lonely_config(workers=0), "splitter.workers is 0"),
        (lambda: lonely_config(stickiness="host"), "splitter.stickiness is 'host'"),
        (lambda: lonely_config(health_interval_s=0), "splitter.health_interval_s is 0"),
        (
            lambda: SplitterConfig(
                arms=(ArmTarget(name="a.b", backends=("h:1",)), ArmTarget(name="a.b", backends=("h:2",)))
            ),
            'arm name "a.b" is taken',
        ),
    ],
)
def test_impossible_setting_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
