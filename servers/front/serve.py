"""Serve one arm replica: `python -m tailgate.servers.front.serve --config ARM.json --port 50051`.

With --json it prints {"port": …, "pid": …} once the port listens, and a "metrics_port" where metrics are served. Health
turns SERVING when the engine is warm and has answered a request. SIGTERM drains: running requests finish, exit 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from tailgate.servers import stdout
from tailgate.servers.address import FREE_PORT, joined
from tailgate.servers.clock import anchored_environment, now_ns
from tailgate.servers.complaint import ConfigError, named
from tailgate.servers.config import ArmConfig
from tailgate.servers.engine.device import serve_engine
from tailgate.servers.engine.messages import Report, Shutdown
from tailgate.servers.front.front import Front
from tailgate.servers.front.metrics import FrontMetrics
from tailgate.servers.front.requests import METADATA_BYTES, load_tokenizer, message_bytes
from tailgate.servers.front.service import InferenceService, try_out
from tailgate.servers.front.telemetry import TelemetryService
from tailgate.servers.metadata import INFERENCE_SERVICE
from tailgate.servers.program import compile_cache, exit_code, log_to_stderr, pin_to_card, read_arm
from tailgate.servers.rpc import inference_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from tailgate.servers.security import check_named, is_bearer, token_from_variable

log = logging.getLogger("tailgate.serve")

SERVER_OPTIONS = (
    # grpcio answers CANCELLED at random once about 1,000 calls are pending; a burst must not look like a model failure.
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
    ("grpc.max_concurrent_streams", 1_000_000),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    # Two servers on one port would share it silently.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A splitter's or a cluster's health checks carry no token.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
# `Connection.send`, with which the engine answers, writes the length of a message before it.
_LENGTH_BYTES = 4
_POLL_S = 0.02


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls without the bearer token with UNAUTHENTICATED, except health checks."""

    def __init__(self, token: str) -> None:
        self._token = token
        # As a stream, it refuses any kind of method, and before the first message.
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if not details.method.startswith(_OPEN_TO_ALL):
            given = next((value for key, value in details.invocation_metadata or () if key == "authorization"), None)
            if not is_bearer(given, self._token):
                return self._refusal
        return await continuation(handler_call_details)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "a bearer token is missing or wrong: send authorization: Bearer TOKEN"
    )


class EnginePipe:
    """The front's end of the pipe to the engine process. What does not fit in the pipe waits in memory, so that the
    front answers health checks and signals meanwhile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def of(cls, connection: Connection) -> Self:
        """Take over the socket of `connection`, which is closed."""
        with connection:
            end = socket.socket(fileno=os.dup(connection.fileno()))
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        """Send a message, now or later; it is lost if the engine is gone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(_LENGTH_BYTES) + body)

    async def received(self) -> AsyncIterator[list[object]]:
        """Yield what the engine sends at once, until it is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
                yield pickle.loads(await self._reader.readexactly(size))


async def serve(
    arm: ArmConfig, options: argparse.Namespace, *, cache_dir: str, token: str, number: int = 0, end: Any = None
) -> int:
    """Run frontend `number` until a signal stops it, and return the exit code: 0 drained, 1 the engine failed.

    The first one starts and stops the engine and the other frontends, which get their `end` of a pipe to the engine.
    """
    replica = options.replica or f"{arm.name}-0"
    processes: list[BaseProcess] = []
    ends: list[Connection] = []  # of the processes
    if not number:
        spawn = multiprocessing.get_context("spawn")
        (end, *others), engine_ends = zip(*(spawn.Pipe() for _ in range(arm.engine.frontends)), strict=True)
        table, ends = pin_to_card(arm, os.environ).to_dict(), [*engine_ends, *others]
        processes.append(spawn.Process(target=serve_engine, args=(engine_ends, table, cache_dir), name=replica))
        for further, other in enumerate(others, 1):
            processes.append(spawn.Process(target=_serve_further, args=(arm, options, token, further, other)))
    pipe = await EnginePipe.of(end)
    front = Front(arm, replica, pipe.send, load_tokenizer(arm.model.id), FrontMetrics(arm.name, replica), number)
    health_service = health.aio.HealthServicer()

    async def set_health(status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", INFERENCE_SERVICE):
            await health_service.set(service, status)

    await set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    server = _server(front, health_service, token)
    port = _listen(server, options.host, options.port and options.port + number)
    await server.start()
    places = {"port": port, "pid": os.getpid()}
    if options.metrics_port != "0" and not number:
        wanted = 0 if options.metrics_port == FREE_PORT else int(options.metrics_port)
        page, _ = start_http_server(wanted, addr=options.host, registry=front.metrics.registry)
        places["metrics_port"] = page.server_port

    os.environ.update(anchored_environment())
    for process in processes:
        process.start()
    for theirs in ends:
        theirs.close()
    stop, unready = asyncio.Event(), asyncio.Event()

    async def check_readiness() -> None:
        try:
            fault = await try_out(front)
        except Exception as error:
            log.exception("the first request of its own")
            fault = named(error)
        if fault:
            front.fail(fault)
            unready.set()
            return
        while not all(front.others("has_answered")):
            await asyncio.sleep(_POLL_S)
        gc.freeze()  # as in the engine, what start-up leaves behind stays
        front.open()
        await set_health(health_pb2.HealthCheckResponse.SERVING)
        log.info("%s is warm and has answered", replica)

    async def follow() -> None:
        readiness = None
        async for messages in pipe.received():
            front.receive(messages)
            if front.warm is not None and readiness is None:
                readiness = asyncio.create_task(check_readiness())

    async def report() -> None:
        while number:
            state = {"has_answered": front.ready is not None, "has_drained": front.draining and not front.in_flight}
            pipe.send(Report(number=number, port=port, in_flight=front.in_flight, counts=front.metrics.counts, **state))
            await asyncio.sleep(0.2)

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    log.info("%s listens on %s:%d (pid %d) and warms up", replica, options.host, port, os.getpid())
    engine_gone, _reporting = asyncio.create_task(follow()), asyncio.create_task(report())
    while not (all(front.others("port")) or engine_gone.done() or stop.is_set()):
        await asyncio.sleep(_POLL_S)
    if not number:
        further_ports = {"further_ports": front.others("port")} if front.reports else {}
        stdout.write("", places | further_ports, as_json=options.json)
    waits = [engine_gone, *(asyncio.create_task(event.wait()) for event in (stop, unready))]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    failed = not stop.is_set()
    for process in processes[1:]:
        process.terminate()  # they drain too
    if failed:
        if engine_gone.done() and processes:
            processes[0].join(5.0)
        code = f" with exit code {processes[0].exitcode}" if processes else ""
        front.fail(front.failure or f"the engine process died{code}")
        log.error("%s: %s", replica, front.failure)
    else:
        front.draining = True
        front.publish(telemetry_pb2.Progress(at_ns=now_ns(), stage="draining", detail=f"{front.in_flight} in flight"))
        deadline = loop.time() + arm.engine.drain_grace_s
        while not (engine_gone.done() or loop.time() >= deadline):
            if not front.in_flight and all(front.others("has_drained")):
                break
            await asyncio.sleep(_POLL_S)
        if front.in_flight:
            log.warning("%s: %d requests did not finish within the grace time", replica, front.in_flight)
            front.fail("the server stopped before the request finished")
    front.close()
    await server.stop(grace=2.0)
    if not number:
        pipe.send(Shutdown())
    elif not failed:
        await engine_gone  # which would take an earlier end of this process for a failure
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()  # a compile holds the engine, and it has nothing left to do
            process.join()
    return 1 if failed else 0


def _server(front: Front, health_service: health.aio.HealthServicer, token: str) -> grpc.aio.Server:
    options = (*SERVER_OPTIONS, ("grpc.max_receive_message_length", message_bytes(front.arm.engine)))
    server = grpc.aio.server(options=options, interceptors=(TokenCheck(token),) if token else ())
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(front), server)  # type: ignore[no-untyped-call]
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(TelemetryService(front), server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    telemetry = telemetry_pb2.DESCRIPTOR.services_by_name["Telemetry"].full_name
    names = (INFERENCE_SERVICE, telemetry, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind the server and return its port. Raises ConfigError when `port` cannot be had."""
    try:
        bound: int = server.add_insecure_port(joined(host, port))
        return bound
    except RuntimeError:
        raise ConfigError(
            f"port {port} on {host} is in use or not allowed: choose another --port, or 0 for a free one"
        ) from None


def _serve_further(arm: ArmConfig, options: argparse.Namespace, token: str, number: int, end: Connection) -> None:
    log_to_stderr()
    sys.exit(exit_code(lambda: asyncio.run(serve(arm, options, cache_dir="", token=token, number=number, end=end))))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tailgate.servers.front.serve")
    parser.add_argument("--config", required=True, help="the arm as JSON (ArmConfig.to_dict())")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (default)")
    parser.add_argument("--replica", default="", help="name in records; defaults to the arm's name and -0")
    parser.add_argument("--cache-dir", default="", help="keep compile artifacts here; default: a fresh one each start")
    help_text = f'serve Prometheus metrics here; 0 is off, "{FREE_PORT}" takes a free one and says which'
    parser.add_argument("--metrics-port", default="0", metavar="PORT", help=help_text)
    parser.add_argument("--token-env", default=None, help="environment variable with the bearer token that calls need")
    parser.add_argument("--json", action="store_true", help="print port and pid as JSON")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _serve(options))


def _serve(options: argparse.Namespace) -> int:
    log_to_stderr()
    arm = read_arm(options.config)
    check_named({"--token-env": options.token_env})
    token = token_from_variable(options.token_env, key="--token-env") if options.token_env else ""
    with compile_cache(options.cache_dir) as cache:
        return asyncio.run(serve(arm, options, cache_dir=cache, token=token))


if __name__ == "__main__":
    sys.exit(main())
