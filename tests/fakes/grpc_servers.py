"""What fake gRPC servers share: health checks, trailing metadata, and a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tailgate.servers.clock import anchored_environment
from tailgate.servers.rpc import inference_pb2_grpc
from tests.fakes.processes import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "tailgate.v1.Inference"


def trailers(**values: object) -> tuple[tuple[str, str], ...]:
    """Return trailing metadata of a call: `queue_ns` is called tailgate-queue-ns."""
    return tuple((f"tailgate-{key.replace('_', '-')}", str(value)) for key, value in values.items())


class Health(health.HealthServicer):
    def answer(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            self.set(name, status.SERVING if serving else status.NOT_SERVING)


def add_inference(server: Any, servicer: Any, *, serving: bool = True) -> Health:
    """Add the servicer and its health checks to a gRPC server, synchronous or asyncio's."""
    add: Any = inference_pb2_grpc.add_InferenceServicer_to_server
    add(servicer, server)
    checks = Health()
    checks.answer(serving=serving)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    return checks


@contextmanager
def serving(add: Callable[[Any, Any], object], servicer: Any) -> Iterator[str]:
    """Serve what `add` adds to a gRPC server in this process until the block ends; yield its address."""
    server = grpc.server(ThreadPoolExecutor(16))
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@contextmanager
def spawned(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `module` as a process until the block ends; yield it and the port, which its first line tells as JSON."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | anchored_environment()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        assert line, f"{module} ended with exit code {process.wait(timeout=PATIENCE_S)} before it listened"
        yield process, json.loads(line)["port"]
    finally:
        process.kill()
        process.wait()
