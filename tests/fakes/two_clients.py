"""The same calls over the frame client and over stock grpcio, by turns: a second opinion on statuses, counts and times.

grpcio runs on threads and takes a message's time when it hands the message over. Below a hundred streams both should
agree: docs/decisions/0003-http2-client.md.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import gevent
import grpc

from loadtests.clients.call import Call
from loadtests.clients.inference import InferenceClient
from loadtests.clients.metadata import encode_metadata
from servers.clock import now_ns
from servers.rpc.inference_pb2 import GenerateRequest
from servers.rpc.inference_pb2_grpc import InferenceStub

Times = tuple[str, list[str], int, list[int]]  # status, trailing metadata, when it was sent, when each token came


def request(text: str = "hello", tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(request_id="r", text=text, max_tokens=tokens)


def wait(calls: list[Call]) -> None:
    with gevent.Timeout(60):
        while not all(call.done for call in calls):
            gevent.sleep(0.005)


def by_frames(client: InferenceClient, streams: int, tokens: int) -> list[Times]:
    calls = []
    for number in range(streams):
        headers = encode_metadata([("x-number", str(number))])
        calls.append(client.start(request(tokens=tokens).SerializeToString(), headers=headers, timeout_s=30.0))
        gevent.sleep(0.01)
    wait(calls)
    return [(call.status, sorted(call.trailing_metadata), call.sent_ns, list(call.token_ns)) for call in calls]


def by_grpcio(stub: Any, streams: int, tokens: int) -> list[Times]:
    def one(number: int) -> Times:
        sent_ns = now_ns()
        call = stub.Generate(request(tokens=tokens), timeout=30.0, metadata=(("x-number", str(number)),))
        came_ns = [now_ns() for chunk in call for _ in chunk.token_ids]
        return call.code().name, sorted(key for key, _ in call.trailing_metadata()), sent_ns, came_ns

    with ThreadPoolExecutor(streams) as pool:
        running = []
        for number in range(streams):
            running.append(pool.submit(one, number))
            time.sleep(0.01)
        return [item.result() for item in running]


def paced(client: InferenceClient, stub: Any, *, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Run streams that start 10 ms apart; the first round of each client warms the server up and does not count.

    A disturbance makes a wait longer; it makes gaps shorter too, when two tokens are late together.
    """
    seen: dict[str, list[list[Times]]] = {"frames": [], "grpcio": []}
    for _ in range(rounds + 1):
        seen["frames"].append(by_frames(client, streams, tokens))
        seen["grpcio"].append(by_grpcio(stub, streams, tokens))
    out = {}
    for name, (_, *counted) in seen.items():
        waits = [statistics.median((came[0] - sent) / 1e6 for *_, sent, came in calls) for calls in counted]
        gaps = [
            statistics.median(later - sooner for *_, came in calls for sooner, later in itertools.pairwise(came))
            for calls in counted
        ]
        out[name] = {
            "statuses": sorted({status for status, *_ in counted[0]}),
            "tokens": [len(came) for *_, came in counted[0]],
            "trailing": counted[0][0][1],
            "ordered": all(sent <= came[0] and came == sorted(came) for *_, sent, came in counted[0]),
            "ttft_ms": min(waits),
            "itl_ms": statistics.median(gaps) / 1e6,
        }
    return out


def ends(client: InferenceClient, stub: Any) -> dict[str, Any]:
    """End calls in every way; grpcio tells of those that the server or the clock ends."""

    def start(*what: Any, timeout_s: float = 30.0) -> Call:
        return client.start(request(*what).SerializeToString(), timeout_s=timeout_s)

    failed, late, dropped = start("RESOURCE_EXHAUSTED"), start("x", 100_000, timeout_s=0.3), start("x", 100_000)
    while not dropped.output_tokens:
        gevent.sleep(0.001)
    dropped.cancel()
    running = start("x", 100_000)
    wait([failed, late, dropped])
    gevent.sleep(0.1)
    answered = start("hi")
    wait([answered])
    client.close()
    after = start("hi")
    wait([running, after])
    calls = {"failed": failed, "late": late, "dropped": dropped, "answered": answered}
    frames = {name: [call.status, call.error] for name, call in {**calls, "running": running, "after": after}.items()}

    def stock(*what: Any, timeout_s: float = 30.0) -> list[str]:
        call = stub.Generate(request(*what), timeout=timeout_s)
        with suppress(grpc.RpcError):  # its status is read below
            list(call)
        return [call.code().name, call.details() or ""]

    grpcio = {
        "failed": stock("RESOURCE_EXHAUSTED"),
        "late": stock("x", 100_000, timeout_s=0.3),
        "answered": stock("hi"),
    }
    return {"frames": frames, "grpcio": grpcio}


def main(options: dict[str, Any]) -> None:
    target, script = options.pop("target"), options.pop("script")
    client = InferenceClient(target)
    failure = client.connect(10.0)
    assert not failure, failure
    with grpc.insecure_channel(target) as channel:
        stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
        print(json.dumps(paced(client, stub, **options) if script == "paced" else ends(client, stub)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
