"""`tailgate.v1.Telemetry` of a replica, and the messages that carry its events."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio

from tailgate.servers.front.front import Front, TelemetryEvent, Watcher
from tailgate.servers.rpc import telemetry_pb2, telemetry_pb2_grpc
from tailgate.servers.rpc.telemetry_pb2 import CompileEvent, CompileUnderWay, MemoryReading, Progress, StepRecord

# A message costs as much as fifty step records, and delays the tokens that are streamed meanwhile: steps are gathered
# for a while, and a replay of what is retained pauses between messages.
GATHER_S = 0.05
REPLAY_PAUSE_S = 0.01
EVENTS_AT_ONCE = 200

# The field of TelemetryEvent for each kind of event but steps, which travel together.
_FIELDS: dict[type, str] = {
    CompileEvent: "compile",
    Progress: "progress",
    MemoryReading: "memory",
    CompileUnderWay: "under_way",
}


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    def __init__(self, front: Front) -> None:
        self.front = front

    async def Watch(  # noqa: N802  (gRPC's name)
        self, request: telemetry_pb2.WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[telemetry_pb2.TelemetryEvent]:
        """Replay what is retained, then follow until the server stops."""
        with self.front.watch() as watcher:
            while events := await take(watcher, EVENTS_AT_ONCE):
                for message in telemetry_events(events):
                    yield message
                if isinstance(events[-1], StepRecord):
                    await asyncio.sleep(GATHER_S if watcher.empty() else REPLAY_PAUSE_S)

    async def Snapshot(  # noqa: N802
        self, request: telemetry_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> telemetry_pb2.SnapshotResponse:
        """Return the arm as it runs: configuration, versions, counters, memory, start-up cost."""
        front = self.front
        answer = telemetry_pb2.SnapshotResponse(
            arm=front.arm.name,
            replica=front.replica,
            config_json=json.dumps(front.arm.to_dict()),
            counters={**front.metrics.totals(), "in_flight": front.in_flight + sum(front.others("in_flight"))},
            blind_spots=front.blind_spots,
        )
        if front.ready is not None:
            answer.MergeFrom(front.ready)
        return answer


async def take(watcher: Watcher, most: int) -> list[TelemetryEvent]:
    """Wait for events and return up to `most` of them; none at the end."""
    events: list[TelemetryEvent] = []
    while (event := await watcher.get()) is not None:
        events.append(event)
        if len(events) == most or watcher.empty():
            return events
    watcher.put_nowait(None)  # for the next call
    return events


def telemetry_events(events: Sequence[TelemetryEvent]) -> Iterator[telemetry_pb2.TelemetryEvent]:
    """Yield the messages that carry the events in order, consecutive steps in one."""
    for kind, group in itertools.groupby(events, type):
        alike: Any = group
        if kind is StepRecord:
            yield telemetry_pb2.TelemetryEvent(steps=telemetry_pb2.StepRecords(records=alike))
        else:
            yield from (telemetry_pb2.TelemetryEvent(**{_FIELDS[kind]: event}) for event in alike)
