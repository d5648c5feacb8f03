"""The same arm as its users meet it: servers.front.serve in a process of its own, Envoy before it, a gRPC client here.

gevent and Envoy are needed here and nowhere else in the benchmark: this file is imported when it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gevent.event import Event

from benchmarks.environment import ROOT, child_environment
from benchmarks.measure import Answer, Session
from benchmarks.traffic import Request
from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from loadtests.trials.channels import arm_channel
from loadtests.trials.processes import Child, describe_exit
from servers.clock import now_ns
from servers.config import ArmConfig
from servers.rpc import inference_pb2, telemetry_pb2, telemetry_pb2_grpc
from servers.splitter.admin import SplitterError
from servers.splitter.envoy import Envoy
from servers.splitter.envoy_config import ArmTarget, SplitterConfig

# Longer than any measured set of requests takes: an arm that hangs ends the measurement.
_TIMEOUT_S = 600.0


class WireError(RuntimeError):
    """The served arm did not come up or did not stay up; the message says where its log is."""


class Wire:
    """A served, warm arm behind Envoy. Use it from one thread; `close()` ends its processes."""

    def __init__(self, arm: ArmConfig, *, folder: Path, cache_dir: str, note: Callable[[str], None]) -> None:
        config = folder / "arm.json"
        config.write_text(json.dumps(arm.to_dict()))
        command = [sys.executable, "-m", "servers.front.serve", "--config", str(config), "--port", "0"]
        command += ["--cache-dir", cache_dir]
        with contextlib.ExitStack() as started:
            self._server = Child(
                "serve", command, log_path=folder / "serve.log", environment=child_environment(), folder=ROOT
            )
            started.callback(self._server.stop, 5.0)
            self.address = f"127.0.0.1:{self._port()}"
            self._channel = started.enter_context(arm_channel(self.address))
            splitter = SplitterConfig(arms=(ArmTarget(name=arm.name, backends=(self.address,), weight=1),))
            self._envoy = Envoy.start(splitter, log_path=folder / "envoy.log", work_dir=folder)
            started.callback(self._envoy.stop, 0.0)
            self._wait_until_warm(note)
            self._client = InferenceClient(self._envoy.target, max_connections=1)
            started.callback(self._client.close)
            failure = self._client.connect(10.0)
            if failure:
                raise WireError(f"no connection to Envoy at {self._envoy.target}: {failure}")
            self.close = started.pop_all().close

    def _port(self) -> int:
        while True:
            line = self._server.line(0.1)
            if line is not None:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return int(json.loads(line)["port"])
            self._check()

    def _check(self) -> None:
        code = self._server.poll()
        if code is not None:
            raise WireError(f"servers.front.serve ended with {describe_exit(code)}: {self._server.log_tail()}")

    def _wait_until_warm(self, note: Callable[[str], None]) -> None:
        started = noted = time.monotonic()
        while True:
            self._check()
            try:
                return self._envoy.wait_ready(1.0)
            except SplitterError:
                if self._envoy.poll() is not None:
                    raise
            if time.monotonic() - noted > 15:
                noted = time.monotonic()
                note(f"waiting for the served arm to be warm, {noted - started:.0f} s so far")

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to this, exclusive."""
        return int(self.snapshot().vocab_size)

    def snapshot(self) -> Any:
        """What the server says of itself."""
        stub = telemetry_pb2_grpc.TelemetryStub(self._channel)  # type: ignore[no-untyped-call]
        return stub.Snapshot(telemetry_pb2.SnapshotRequest(), timeout=10.0)

    def serve(self, requests: Sequence[Request]) -> Session:
        """All `requests` at once, until the last is answered; times are those at which tokens reached this client."""
        bodies = [
            inference_pb2.GenerateRequest(
                request_id=f"{now_ns():x}-{number}",
                token_ids=inference_pb2.TokenIds(ids=request.prompt),
                max_tokens=request.max_tokens,
                ignore_eos=True,
            ).SerializeToString()
            for number, request in enumerate(requests)
        ]
        left = len(bodies)
        all_done = Event()

        def done(call: Call) -> None:
            nonlocal left
            left -= 1
            if not left:
                all_done.set()

        start_ns = now_ns()
        calls = [self._client.start(body, timeout_s=_TIMEOUT_S, on_done=done) for body in bodies]
        while not all_done.wait(1.0):
            self._check()
        end_ns = now_ns()
        answers = {
            f"r{number}": Answer(
                prompt_tokens=len(request.prompt), due_ns=start_ns, token_ns=list(call.token_ns), status=call.status
            )
            for number, (request, call) in enumerate(zip(requests, calls, strict=True))
        }
        return Session(start_ns=start_ns, end_ns=end_ns, answers=answers, outputs=[], events=[])

    @contextmanager
    def watched(self, on: bool) -> Iterator[None]:
        """Inside, another process follows the server's telemetry (compile events and steps), or not."""
        if not on:
            yield
            return
        spawn = multiprocessing.get_context("spawn")
        seen = spawn.Value("q", -1)
        watcher = spawn.Process(target=_watch, args=(self.address, seen), name="watcher", daemon=True)
        watcher.start()
        try:
            before = -1
            while seen.value < 0 or seen.value != before:  # it replays what is retained first
                before = seen.value
                time.sleep(0.3)
                if not watcher.is_alive():
                    raise WireError("the process that follows the telemetry ended")
            yield
        finally:
            watcher.terminate()
            watcher.join()


def _watch(address: str, seen: Any) -> None:
    stub = telemetry_pb2_grpc.TelemetryStub(arm_channel(address))  # type: ignore[no-untyped-call]
    seen.value = 0
    for _ in stub.Watch(telemetry_pb2.WatchRequest(compile_events=True, steps=True)):
        seen.value += 1
