"""tailgate's client by itself, without Locust, schedule and records. `python -m benchmarks.bare_client PLAN`."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from pathlib import Path

import gevent
import numpy as np

from benchmarks.observed import Plan, write_calls
from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateRequest


def drive(plan: Plan) -> None:
    """Send the plan's requests until SIGTERM."""
    client = InferenceClient(plan.address, max_connections=1)
    failure = client.connect(10.0)
    if failure:
        sys.exit(failure)
    calls: list[Call] = []
    numbers = itertools.count()

    def send(scheduled_ns: int) -> None:
        name = f"bare-{next(numbers)}"
        body = GenerateRequest(request_id=name, max_tokens=plan.tokens).SerializeToString()
        calls.append(client.start(body, timeout_s=600.0, tag=(name, scheduled_ns)))

    def finish() -> None:
        write_calls(calls, Path(plan.out))
        os._exit(0)

    gevent.signal_handler(signal.SIGTERM, finish)
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(plan.streams):
        send(now_ns())
        gevent.sleep(plan.ramp_s / plan.streams)
    rng, next_ns = np.random.default_rng(plan.seed), now_ns() + 500_000_000
    while plan.rate:
        next_ns += int(rng.exponential(1e9 / plan.rate))
        while (left_ns := next_ns - now_ns()) > 0:
            gevent.sleep(left_ns / 1e9 if left_ns > 1_000_000 else 0)
        send(next_ns)
    while True:
        gevent.sleep(3600)


if __name__ == "__main__":
    drive(Plan.read(Path(sys.argv[1])))
