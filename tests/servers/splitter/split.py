"""Arms of real gRPC servers behind a real Envoy, and calls to them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tailgate.servers.metadata import ARM_HEADER, INFERENCE_SERVICE, SESSION_HEADER
from tailgate.servers.rpc import inference_pb2, inference_pb2_grpc
from tailgate.servers.splitter.envoy import Envoy
from tailgate.servers.splitter.envoy_config import ArmTarget, SplitterConfig, stat_name
from tests.fakes.processes import PATIENCE_S, wait_for

T = TypeVar("T")
INTERNAL = grpc.StatusCode.INTERNAL
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Loop:
    """One event loop in a thread of its own, on which all servers and clients of this module live."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = PATIENCE_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


class Replica(inference_pb2_grpc.InferenceServicer):
    """Answers `max_tokens` chunks. The prompt "hold" waits for `release` after the first, "mute" before it.

    A prompt that is the name of a status code aborts with it, after its chunks where "late " stands before the name;
    every prompt aborts with INTERNAL where the replica `fails`.
    """

    def __init__(self, arm: str, index: int) -> None:
        self.arm = arm
        self.name = f"{arm}-{index}"
        self.calls = 0
        self.active = 0
        self.fails = False
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
        names = (("tailgate-arm", self.arm), ("tailgate-replica", self.name))
        context.set_trailing_metadata(
            (*names, ("tailgate-queue-ns", "1234567890123"), ("tailgate-shape-bin", b"\x00\xff\x01"))
        )
        try:
            prompt = request.text.removeprefix("late ")
            code = INTERNAL if self.fails else grpc.StatusCode.__members__.get(prompt)
            if code is not None and prompt == request.text:
                await context.abort(code, "the engine failed")
            if request.text == "mute":
                await self.release.wait()
            for index in range(request.max_tokens):
                if index == 1 and request.text == "hold":
                    await self.release.wait()
                yield inference_pb2.GenerateChunk(token_ids=[index])
            if code is not None:
                await context.abort(code, "the engine failed")
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


@dataclass(frozen=True)
class Answer:
    code: grpc.StatusCode
    details: str
    tokens: int
    initial: dict[str, str | bytes]
    trailing: dict[str, str | bytes]

    @property
    def arm(self) -> str:
        return str(self.trailing.get("tailgate-arm", ""))

    @property
    def replica(self) -> str:
        return str(self.trailing.get("tailgate-replica", ""))


async def ask(
    channel: grpc.aio.Channel,
    *,
    prompt: str = "",
    tokens: int = 1,
    arm: str = "",
    session: str = "",
) -> Answer:
    headers = ((ARM_HEADER, arm), (SESSION_HEADER, session))
    request = inference_pb2.GenerateRequest(text=prompt, max_tokens=tokens)
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(request, metadata=tuple(item for item in headers if item[1]), timeout=PATIENCE_S)
    received = 0
    try:
        async for _ in call:
            received += 1
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        call.cancel()  # grpc cancels no call whose task is cancelled while it still begins
        raise
    initial, trailing = dict(await call.initial_metadata() or ()), dict(await call.trailing_metadata() or ())
    return Answer(await call.code(), await call.details() or "", received, initial, trailing)


@contextlib.asynccontextmanager
async def dial(target: str) -> AsyncIterator[grpc.aio.Channel]:
    # A subchannel pool of its own: the next Envoy must not meet the connections of the last one.
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


async def ask_many(target: str, requests: list[dict[str, Any]]) -> list[Answer]:
    async with dial(target) as channel:
        return await asyncio.gather(*(ask(channel, **request) for request in requests))


class Split:
    def __init__(self, loop: Loop, work_dir: Path, replicas: dict[str, int], **settings: Any) -> None:
        self.loop = loop
        self.work_dir = work_dir
        weights, shadows = settings.pop("weights", {}), settings.pop("shadows", {})
        self.replicas = {arm: [Replica(arm, index) for index in range(count)] for arm, count in replicas.items()}
        for replica in self.all:
            loop.run(replica.start())
        arms = (
            ArmTarget(
                name=arm,
                backends=tuple(item.address for item in items),
                weight=weights.get(arm, 1),
                shadow_percent=shadows.get(arm, 0.0),
            )
            for arm, items in self.replicas.items()
        )
        self.config = SplitterConfig(
            arms=tuple(arms),
            **{"health_interval_s": 0.1, **settings},
        )
        self.envoy = Envoy(self.config, log_path=work_dir / "envoy.log", work_dir=work_dir)

    @property
    def all(self) -> list[Replica]:
        return [replica for replicas in self.replicas.values() for replica in replicas]

    def ask(self, *requests: dict[str, Any]) -> list[Answer]:
        return self.loop.run(ask_many(self.envoy.target, list(requests)))

    def set_health(self, replica: Replica, status: int) -> None:
        self.loop.run(replica.health.set(INFERENCE_SERVICE, status))

    def hold(self, count: int, **request: Any) -> concurrent.futures.Future[list[Answer]]:
        """Starts `count` streams that stay open until the replicas release them; returns when all of them run."""
        before = self._answering()
        requests = [{"prompt": "hold", "tokens": 3, **request}] * count
        held = asyncio.run_coroutine_threadsafe(ask_many(self.envoy.target, requests), self.loop.loop)
        wait_for(
            lambda: held.done() or self._answering() == before + count,
            otherwise=lambda: f"{self._answering() - before} of {count} streams run",
        )
        assert not held.done(), held.result()
        return held

    def _answering(self) -> int:
        """Streams that replicas answer to users, copies left out."""
        shadows = self.config.shadows
        return sum(item.active for arm, items in self.replicas.items() if arm not in shadows for item in items)

    def copies(self, arm: str) -> int:
        """How many copies the shadow `arm` ever got; returns when none is on its way."""
        name = f"cluster.{stat_name(arm)}.upstream_rq_total"

        def arrived() -> bool:
            return self.envoy.admin.stats(name)[name] == sum(item.calls for item in self.replicas[arm])

        wait_for(arrived)
        return sum(item.calls for item in self.replicas[arm])

    def release(self) -> None:
        for replica in self.all:
            self.loop.loop.call_soon_threadsafe(replica.release.set)

    def close(self) -> None:
        self.release()
        self.envoy.stop(grace_s=1.0)
        for replica in self.all:
            self.loop.run(replica.stop())


Build = Callable[..., Split]


def binomial_bound(trials: int, share: float) -> float:
    """Five standard deviations of a binomial count: a sound splitter leaves it once in two million runs."""
    return 5 * (trials * share * (1 - share)) ** 0.5


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture
def build(loop: Loop, tmp_path: Path) -> Iterator[Build]:
    splits: list[Split] = []

    def make(replicas: dict[str, int], *, ready: bool = True, **settings: Any) -> Split:
        split = Split(loop, tmp_path / str(len(splits)), replicas, **settings)
        splits.append(split)
        if ready:
            split.envoy.wait_ready(PATIENCE_S)
        return split

    yield make
    for split in splits:
        split.close()


@pytest.fixture(scope="module")
def shared(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """Two arms of weights 3 and 1, and one of weight 0. Tests leave it as they found it."""
    split = Split(
        loop,
        tmp_path_factory.mktemp("shared"),
        {"eager": 2, "compiled-padded": 1, "idle.arm": 1},
        weights={"eager": 3, "compiled-padded": 1, "idle.arm": 0},
    )
    split.envoy.wait_ready(PATIENCE_S)
    yield split
    split.close()
