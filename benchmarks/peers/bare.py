"""tailgate's client by itself, without Locust, schedule and records. `python -m benchmarks.peers.bare PLAN`."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from array import array
from pathlib import Path
from typing import Any

import gevent
import numpy as np

from benchmarks.observed import Note, Plan, write_notes
from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateRequest


def drive(plan: Plan) -> None:
    """The plan's requests, until SIGTERM."""
    client = InferenceClient(plan.address, max_connections=1)
    failure = client.connect(10.0)
    if failure:
        sys.exit(failure)
    ended: list[Call] = []
    alive: set[Call] = set()
    numbers = itertools.count()
    run_callback: Any = gevent.get_hub().loop.run_callback

    def send(scheduled_ns: int) -> None:
        name = f"bare-{next(numbers)}"
        body = GenerateRequest(request_id=name, max_tokens=plan.tokens).SerializeToString()
        call = client.start(body, timeout_s=600.0, on_done=done, tag=(name, scheduled_ns))
        alive.add(call)

    def done(call: Call) -> None:
        alive.discard(call)
        ended.append(call)
        if plan.mode == "closed":
            run_callback(send, now_ns())

    def finish() -> None:
        notes = []
        for call in (*ended, *alive):
            name, scheduled_ns = call.tag
            note = Note(name=name, scheduled=scheduled_ns, sent=call.sent_ns, stamps=array("q", call.token_ns))
            if call.status:
                note.ended(end_ns=call.end_ns, ok=call.status == "OK", trailing=call.trailing_metadata)
            notes.append(note)
        write_notes(notes, Path(plan.out))
        os._exit(0)

    gevent.signal_handler(signal.SIGTERM, finish)
    gc.collect()
    gc.freeze()
    gc.disable()
    if plan.mode == "streams":
        for _ in range(plan.streams):
            send(now_ns())
            gevent.sleep(plan.ramp_s / plan.streams)
    elif plan.mode == "closed":
        for _ in range(plan.users):
            send(now_ns())
    else:
        rng, next_ns = np.random.default_rng(plan.seed), now_ns() + 500_000_000
        while True:
            next_ns += int(rng.exponential(1e9 / plan.rate))
            while (left_ns := next_ns - now_ns()) > 0:
                gevent.sleep(left_ns / 1e9 if left_ns > 1_000_000 else 0)
            send(next_ns)
    while True:
        gevent.sleep(3600)


if __name__ == "__main__":
    drive(Plan.read(Path(sys.argv[1])))
