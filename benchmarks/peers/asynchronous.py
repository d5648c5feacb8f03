"""The load generator of those who leave gevent: grpc.aio. `python -m benchmarks.peers.asynchronous PLAN`."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from benchmarks.observed import Notes, Plan
from servers.clock import now_ns
from servers.rpc import inference_pb2_grpc
from servers.rpc.inference_pb2 import GenerateRequest


async def drive(plan: Plan) -> None:
    """The plan's requests, until SIGTERM."""
    notes = Notes()

    def finish() -> None:
        notes.write(Path(plan.out))
        os._exit(0)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, finish)
    numbers = itertools.count()
    channel = grpc.aio.insecure_channel(plan.address, options=(("grpc.enable_http_proxy", 0),))
    stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    async def ask(scheduled_ns: int) -> None:
        name = f"asyncio-{next(numbers)}"
        number, stamps = notes.begin(name, scheduled_ns=scheduled_ns, sent_ns=now_ns())
        call = stub.Generate(GenerateRequest(request_id=name, max_tokens=plan.tokens), timeout=600.0)
        ok, trailing = True, {}
        try:
            async for chunk in call:
                at_ns = now_ns()
                stamps.extend([at_ns] * len(chunk.token_ids))
            trailing = dict(await call.trailing_metadata())
        except grpc.aio.AioRpcError:
            ok = False
        notes.end(number, end_ns=now_ns(), ok=ok, trailing=trailing)

    async def one_after_another() -> None:
        while True:
            await ask(now_ns())

    running: set[asyncio.Task[None]] = set()

    def start(scheduled_ns: int) -> None:
        asked = asyncio.create_task(ask(scheduled_ns))
        running.add(asked)
        asked.add_done_callback(running.discard)

    await channel.channel_ready()
    if plan.mode == "streams":
        for _ in range(plan.streams):
            start(now_ns())
            await asyncio.sleep(plan.ramp_s / plan.streams)
    elif plan.mode == "closed":
        await asyncio.gather(*(one_after_another() for _ in range(plan.users)))
    else:
        rng, next_ns = np.random.default_rng(plan.seed), now_ns() + 500_000_000
        while True:
            next_ns += int(rng.exponential(1e9 / plan.rate))
            while (left_ns := next_ns - now_ns()) > 0:
                await asyncio.sleep(left_ns / 1e9 if left_ns > 1_000_000 else 0)
            start(next_ns)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(drive(Plan.read(Path(sys.argv[1]))))
