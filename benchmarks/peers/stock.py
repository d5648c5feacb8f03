"""The usual load generator: stock Locust, synchronous grpcio under gevent, statistics by events.

A locustfile. It reads its plan from the file that BENCHMARK_PLAN names (benchmarks.observed.Plan).
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import gevent
import grpc
import grpc.experimental.gevent
import numpy as np
from locust import User, constant, events, task

from benchmarks.observed import Note, Plan, write_notes
from servers.clock import now_ns
from servers.rpc import inference_pb2_grpc
from servers.rpc.inference_pb2 import GenerateRequest

grpc.experimental.gevent.init_gevent()

PLAN = Plan.read(Path(os.environ["BENCHMARK_PLAN"]))
NOTES: list[Note] = []
_numbers = itertools.count()
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def send(user: ChatUser, scheduled_ns: int) -> None:
    """One request from its start to its end, timed as Locust's users are."""
    name = f"stock-{next(_numbers)}"
    request = GenerateRequest(request_id=name, max_tokens=PLAN.tokens)
    note = Note(name=name, scheduled=scheduled_ns, sent=now_ns())
    NOTES.append(note)
    failure: Exception | None = None
    trailing: dict[str, Any] = {}
    try:
        call = user.stub.Generate(request, timeout=600.0)
        for chunk in call:
            at_ns = now_ns()
            note.stamps.extend([at_ns] * len(chunk.token_ids))
        trailing = dict(call.trailing_metadata())
    except grpc.RpcError as error:
        failure = error
    end_ns = now_ns()
    note.ended(end_ns=end_ns, ok=failure is None, trailing=trailing)
    fire: Any = user.environment.events.request.fire
    fire(
        request_type="gRPC",
        name="Generate",
        response_time=(end_ns - scheduled_ns) / 1e6,
        response_length=len(note.stamps),
        exception=failure,
        context={},
    )


class ChatUser(User):
    """streams and closed: one request after the other. open: one Poisson source that waits for no answer."""

    wait_time = constant(0)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.channel = grpc.insecure_channel(PLAN.address, options=_OPTIONS)
        self.stub: Any = inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]
        self.rng = np.random.default_rng((PLAN.seed, next(_numbers)))
        self.next_ns = now_ns() + 500_000_000

    @task
    def chat(self) -> None:
        if PLAN.mode != "open":
            send(self, now_ns())
            return
        self.next_ns += int(self.rng.exponential(1e9 / PLAN.rate))
        while (left_ns := self.next_ns - now_ns()) > 0:
            gevent.sleep(left_ns / 1e9 if left_ns > 1_000_000 else 0)
        gevent.spawn(send, self, self.next_ns)


def finish() -> None:
    """What was seen is on disk and the process is gone: a starved hub might never end in order."""
    write_notes(NOTES, Path(PLAN.out))
    os._exit(0)


def on_init(**_: Any) -> None:
    gevent.signal_handler(signal.SIGTERM, finish)


_hooks: Any = events
_hooks.init.add_listener(on_init)
