"""Replicas that run: whether they serve, and what they report of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tailgate.loadtests.experiments.checks import same_kind_of_device
from tailgate.servers.complaint import ConfigError
from tailgate.servers.metadata import INFERENCE_SERVICE
from tailgate.servers.rpc.telemetry_pb2 import SnapshotResponse


def is_serving(channel: grpc.Channel) -> bool:
    """Return whether the server behind `channel` says that it is ready."""
    request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2.0)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def start_up(snapshots: Sequence[SnapshotResponse]) -> dict[str, Any]:
    """Return what an arm's start cost: the slowest of its replicas for times, their sum for memory."""
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


def final_account(snapshot: SnapshotResponse) -> dict[str, Any]:
    """Return what trial.json holds of a replica that still serves at the end."""
    return {
        "counters": dict(snapshot.counters),
        "memory_bytes": dict(snapshot.memory_bytes),
        "blind_spots": list(snapshot.blind_spots),
    }


def check_alike(snapshots: Mapping[str, SnapshotResponse], first: str) -> None:
    """Raise ConfigError unless all replicas report that they run the same thing: that of the control's `first`, or
    where it is not here that of any."""
    for name, snapshot in snapshots.items():
        control = snapshots.get(first) or next(iter(snapshots.values()))
        for what, value, expected in (
            ("dtype", snapshot.dtype, control.dtype),
            ("vocabulary", snapshot.vocab_size, control.vocab_size),
            ("device", snapshot.device, control.device),
        ):
            alike = same_kind_of_device(str(value), str(expected)) if what == "device" else value == expected
            if not alike:
                raise ConfigError(
                    f"{name} runs with {what} {value} but the control with {expected}: not comparable; "
                    "make them equal, or set compare_models = true at the top if that is the question"
                )
