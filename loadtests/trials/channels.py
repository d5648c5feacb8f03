"""Replicas that run: their channels, whether they serve and live, and what they say that they run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from analysis.records.documents import parse_json
from analysis.records.plain_values import mapping
from loadtests.experiments.checks import same_kind_of_device
from servers.complaint import ConfigError
from servers.metadata import INFERENCE_SERVICE
from servers.rpc.telemetry_pb2 import SnapshotResponse

CHANNEL_OPTIONS = (
    # A proxy from the environment must not stand between this process and an arm on loopback.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: object) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._header]), request)

    intercept_unary_stream = intercept_unary_unary


def arm_channel(target: str, *, token: str = "") -> grpc.Channel:
    """A channel to an arm on this machine; every call shows `token` unless it is empty."""
    channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def is_serving(channel: grpc.Channel) -> bool:
    """Whether the server behind `channel` says that it is ready."""
    try:
        answer = _health(channel)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def is_gone(channel: grpc.Channel) -> bool:
    """Whether nobody listens behind `channel`. One that is silent, as in a compile, is not gone."""
    try:
        _health(channel)
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.UNAVAILABLE)  # type: ignore[attr-defined]
    return False


def _health(channel: grpc.Channel) -> health_pb2.HealthCheckResponse:
    request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=2.0)


_EVERY_S = 0.5
_TRIES = 2  # a connection may be lost without a death


class Pulse:
    """Asks each of `targets`, {replica: host:port}, until `stop`. `gone` is told of one that cannot be reached, once a
    death, and `back` of one that answers again: it may die again."""

    def __init__(
        self,
        targets: Mapping[str, str],
        *,
        gone: Callable[[str], None],
        back: Callable[[str], None],
        token: str = "",
    ) -> None:
        self._gone, self._back = gone, back
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(replica, target, token), name=f"pulse-{replica}", daemon=True)
            for replica, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nobody is asked any more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=3.0)

    def _ask(self, replica: str, target: str, token: str) -> None:
        channel = arm_channel(target, token=token)
        missed = 0
        while not self._stopped.wait(_EVERY_S):
            if is_gone(channel):
                missed += 1
                if missed == _TRIES:
                    self._gone(replica)
                continue
            if missed >= _TRIES:
                self._back(replica)
            missed = 0
        channel.close()


def start_up(snapshots: Sequence[SnapshotResponse]) -> dict[str, Any]:
    """What an arm's start cost: the slowest of its replicas for times, their sum for memory."""
    items: dict[str, int] = {}
    memory: Counter[str] = Counter()
    for snapshot in snapshots:
        for key, value in snapshot.startup_ns.items():
            items[key] = max(items.get(key, 0), value)
        memory.update(snapshot.memory_bytes)  # adds
    first = snapshots[0]
    return {
        "items_ns": items,
        "memory_bytes": dict(memory),
        "versions": dict(first.versions),
        # what no replica of the arm could see of its compilers, or one could not
        "blind_spots": sorted({text for snapshot in snapshots for text in snapshot.blind_spots}),
        "device": first.device,
        "dtype": first.dtype,
    }


def check_name(name: str, arm: str, snapshot: SnapshotResponse) -> None:
    """The replica is the one that was started as `name`. Otherwise ConfigError."""
    if (snapshot.arm, snapshot.replica) != (arm, name):
        raise ConfigError(
            f'{name} of arm "{arm}" answers as "{snapshot.replica}" of arm "{snapshot.arm}": see which program its '
            "port belongs to, and run again"
        )


def check_alike(snapshots: Mapping[str, SnapshotResponse], control: SnapshotResponse) -> None:
    """By their own reports all replicas run the same thing as the control. Otherwise ConfigError."""
    for name, snapshot in snapshots.items():
        for what, value, expected in (
            ("dtype", snapshot.dtype, control.dtype),
            ("attention", _attention(name, snapshot), _attention("the control", control)),
            ("vocabulary", snapshot.vocab_size, control.vocab_size),
            ("device", snapshot.device, control.device),
        ):
            alike = same_kind_of_device(str(value), str(expected)) if what == "device" else value == expected
            if not alike:
                raise ConfigError(
                    f"{name} runs with {what} {value} but the control with {expected}: not comparable; "
                    "make them equal, or set compare_models = true at the top if that is the question"
                )


def configuration(name: str, snapshot: SnapshotResponse) -> dict[str, Any]:
    """The tables of the arm's configuration, as the replica called `name` tells it. Otherwise ConfigError."""
    try:
        tables = parse_json(snapshot.config_json)
    except ValueError:
        tables = None
    if not isinstance(tables, dict):
        raise ConfigError(
            f"{name} tells no configuration but {snapshot.config_json[:80]!r}: is it a replica of tailgate?"
        )
    return tables


def _attention(name: str, snapshot: SnapshotResponse) -> str:
    return str(mapping(configuration(name, snapshot).get("model")).get("attention"))
