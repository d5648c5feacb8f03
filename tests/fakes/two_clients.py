"""The same paced calls through both clients, in a process that gevent has patched: one JSON line with what each saw.

Run it as a process of its own: `python -m tests.fakes.two_clients '{"target": ..., "script": "paced"}'`.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import logging  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402

from loadtests.clients.call import Call  # noqa: E402
from loadtests.clients.inference import InferenceClient  # noqa: E402
from loadtests.clients.metadata import encode_metadata  # noqa: E402
from loadtests.external.client_security import SecurityConfig  # noqa: E402
from servers.rpc.inference_pb2 import GenerateRequest  # noqa: E402
from tests.fakes.grpcio_client import GrpcioClient  # noqa: E402

Client = InferenceClient | GrpcioClient
CLIENTS: dict[str, type[Client]] = {"frames": InferenceClient, "grpcio": GrpcioClient}


def ask(text: str = "hello", tokens: int = 3) -> bytes:
    return GenerateRequest(request_id="r", text=text, max_tokens=tokens).SerializeToString()


def wait(calls: list[Call]) -> None:
    with gevent.Timeout(60):
        while not all(call.done for call in calls):
            gevent.sleep(0.005)


def paced(client: Client, streams: int, tokens: int) -> dict[str, Any]:
    """Run streams that start 10 ms apart: counts, statuses, median first-token time and gap in ms."""
    calls, ended = [], []
    for number in range(streams):
        headers = encode_metadata([("x-number", str(number))])
        calls.append(
            client.start(ask(tokens=tokens), headers=headers, timeout_s=30.0, on_done=ended.append, tag=number)
        )
        gevent.sleep(0.01)
    wait(calls)
    gaps = [later - sooner for call in calls for sooner, later in zip(call.token_ns, call.token_ns[1:], strict=False)]
    return {
        "statuses": sorted({call.status for call in calls}),
        "tokens": [call.output_tokens for call in calls],
        "tags": sorted(call.tag for call in ended),
        "ttft_ms": statistics.median(((call.first_token_ns or 0) - call.sent_ns) / 1e6 for call in calls),
        "itl_ms": statistics.median(gaps) / 1e6,
        "trailing": sorted(calls[0].trailing_metadata),
        "initial": sorted(calls[0].initial_metadata),
        "ordered": all(
            call.start_ns <= call.sent_ns <= call.token_ns[0] <= call.token_ns[-1] <= call.end_ns for call in calls
        ),
    }


def in_turns(options: dict[str, Any], security: SecurityConfig) -> dict[str, Any]:
    """Run both clients by turns, after one round that warms the server up; times over all rounds."""
    clients = {name: kind(options["target"], security=security) for name, kind in CLIENTS.items()}
    out: dict[str, Any] = {name: {"connect": client.connect(10.0)} for name, client in clients.items()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    for number in range(options.get("rounds", 1) + 1):
        for name, client in clients.items():
            seen = paced(client, options["streams"], options["tokens"])
            if number:
                rounds[name].append(seen)
    for name, client in clients.items():
        out[name] |= rounds[name][0]
        # A disturbance makes a wait longer; it makes gaps shorter too, when two tokens are late together.
        out[name]["ttft_ms"] = min(item["ttft_ms"] for item in rounds[name])
        out[name]["itl_ms"] = statistics.median(item["itl_ms"] for item in rounds[name])
        client.close()
    return out


def ends(client: Client) -> dict[str, Any]:
    failed = client.start(ask("RESOURCE_EXHAUSTED"), timeout_s=30.0)
    late = client.start(ask(tokens=100_000), timeout_s=0.3)
    dropped = client.start(ask(tokens=100_000), timeout_s=30.0)
    while not dropped.output_tokens:
        gevent.sleep(0.001)
    dropped.cancel()
    running = client.start(ask(tokens=100_000), timeout_s=30.0)
    wait([failed, late, dropped])
    gevent.sleep(0.1)
    answered = client.start(ask("hi"), timeout_s=30.0)
    wait([answered])
    client.close()
    after = client.start(ask())
    wait([running, after])
    return {
        "failed": [failed.status, failed.error],
        "late": late.status,
        "dropped": [dropped.status, dropped.error],
        "answered": [answered.status, answered.output_tokens],
        "running": [running.status, running.error],
        "after": [after.status, after.error],
    }


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    security = SecurityConfig(**options.get("security", {}))
    if options["script"] == "paced":
        out = in_turns(options, security)
    else:
        out = {}
        for name, kind in CLIENTS.items():
            client = kind(options["target"], security=security)
            out[name] = {"connect": client.connect(10.0)} | ends(client)
    print(json.dumps(out))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
