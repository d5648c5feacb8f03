"""Follow the telemetry of every arm replica and append it to the trial's records, flushed each second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from google.protobuf.message import Message

from tailgate.analysis.judging.alarms import ServedCompile
from tailgate.analysis.records.schemas import COMPILE_EVENTS, MACHINES, STEPS
from tailgate.analysis.records.tables import RecordWriter
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig
from tailgate.loadtests.external.grpc_channel import open_channel
from tailgate.loadtests.trials.status import ReplicaState, Status
from tailgate.servers.complaint import named, write_failure
from tailgate.servers.rpc import telemetry_pb2, telemetry_pb2_grpc

log = logging.getLogger("tailgate.telemetry")

FLUSH_EVERY_S = 1.0
_RETRY_S = 0.5
_LOST_S = 1.2  # longer than a retry: a connection may be lost without a death


@dataclass(slots=True)
class _Follower:
    """One replica's stream of telemetry, and what has been taken from it."""

    arm: str
    replica: str
    channel: grpc.Channel
    state: ReplicaState
    call: Any = None
    events_seen: set[str] = field(default_factory=set)
    last_step_ns: int = -1  # the end of it
    last_memory_ns: int = 0
    cut_short: ServedCompile | None = None  # under way when the stream broke off
    lost_s: float | None = None  # since when its telemetry is broken off, on the monotonic clock


class Collector:
    """Append `compile_events.arrow`, `steps.arrow` and `machines-arms.arrow` (the memory that engines hold) in `folder`
    from `follow` until `stop`.

    `status` shows each replica's progress and compiles. `failure` is the line to show when records cannot be written. A
    replica may start anew in between. Steps and compiles while serving that ended before `since_ns` are left out.
    """

    def __init__(self, folder: Path, *, trial: int, status: Status, since_ns: int = 0) -> None:
        self._since_ns = since_ns
        self._trial = trial
        self._status = status
        self._followers: dict[str, _Follower] = {}
        self._lock = threading.Lock()
        schemas = {"compile_events": COMPILE_EVENTS, "steps": STEPS, "machines-arms": MACHINES}
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in schemas}
        self._writers = {table: RecordWriter(folder / f"{table}.arrow", schema) for table, schema in schemas.items()}
        self._stopping = threading.Event()
        self._taken = 0
        self.failure: str | None = None
        self.served_since_ns: dict[str, list[int]] = {}  # of each replica, by its own word; a second one is a restart
        self.served_compiles: list[ServedCompile] = []  # while serving, in the order of their reports
        self._threads = [threading.Thread(target=self._flush_until_stopped, name="collector", daemon=True)]
        self._threads[0].start()

    def follow(self, arm: str, replica: str, target: str, security: SecurityConfig = OPEN) -> None:
        """Record the telemetry of `replica` at host:port `target`, from its beginning."""
        state = self._status.replicas.setdefault(replica, ReplicaState())
        follower = _Follower(arm=arm, replica=replica, channel=open_channel(target, security), state=state)
        self._followers[replica] = follower
        thread = threading.Thread(target=self._follow, args=(follower,), name=f"watch-{replica}", daemon=True)
        thread.start()  # may fail where memory is short
        self._threads.append(thread)

    def take_logged(self, event: dict[str, Any]) -> None:
        """Record the event, a row of `compile_events` from a server's log."""
        state = self._status.replicas.get(event["replica"] or "")
        if state is not None:
            state.compiles = (state.compiles or 0) + 1
        self._append("compile_events", event)

    def snapshot(self, replica: str, *, timeout_s: float = 5.0) -> telemetry_pb2.SnapshotResponse | None:
        """Return the replica's counters, memory, versions and configuration now; None when it does not answer."""
        stub = telemetry_pb2_grpc.TelemetryStub(self._followers[replica].channel)  # type: ignore[no-untyped-call]
        try:
            answer: telemetry_pb2.SnapshotResponse = stub.Snapshot(
                telemetry_pb2.SnapshotRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.RpcError:
            return None
        return answer

    @property
    def compiling(self) -> list[ServedCompile]:
        """Return what replicas that serve compile now, the longest first."""
        states = [state.compiling for state in list(self._status.replicas.values())]
        return sorted(filter(None, states), key=lambda compile: compile.start_ns)

    def unfinished(self, replica: str, at_ns: int) -> dict[str, Any]:
        """Return what trial.json states of a compile of the replica whose end was not seen until `at_ns`, be it that
        its telemetry broke off: {"compiling": …}, or nothing."""
        compiling = self._followers[replica].state.compiling or self._followers[replica].cut_short
        if compiling is None:
            return {}
        seconds = compiling.seconds(at_ns)
        return {"compiling": {"start_ns": compiling.start_ns, "seconds": seconds, "shape": compiling.shape}}

    def lost(self) -> frozenset[str]:
        """Return the replicas that cannot be reached: their telemetry broke off, and did not come back in time."""
        before_s = time.monotonic() - _LOST_S
        followers = self._followers.items()
        return frozenset(name for name, item in followers if item.lost_s is not None and item.lost_s < before_s)

    def settle(self, *, quiet_s: float = 0.5, timeout_s: float = 5.0) -> None:
        """Wait until nothing new came for `quiet_s`, or `timeout_s` have passed."""
        deadline, taken = time.monotonic() + timeout_s, -1
        while time.monotonic() < deadline and self._taken != taken:
            taken = self._taken
            time.sleep(quiet_s)

    def stop(self) -> None:
        """End the following and complete the files."""
        self._stopping.set()
        for follower in self._followers.values():
            if follower.call is not None:
                follower.call.cancel()
        for thread in reversed(self._threads):
            thread.join(timeout=5.0)
        for follower in self._followers.values():
            follower.channel.close()
        self._flush()
        for writer in self._writers.values():
            self._guarded(writer.close)

    def _follow(self, follower: _Follower) -> None:
        stub = telemetry_pb2_grpc.TelemetryStub(follower.channel)  # type: ignore[no-untyped-call]
        while not self._stopping.is_set():
            try:
                follower.call = stub.Watch(telemetry_pb2.WatchRequest(), wait_for_ready=True)
                for event in follower.call:
                    self._take(follower, event)
            except grpc.RpcError:
                pass  # the replica died or is too busy; when it comes back it replays what it retains
            except Exception as error:
                log.exception("telemetry of %s", follower.replica)
                self.failure = self.failure or f"the telemetry of {follower.replica} cannot be taken: {named(error)}"
                return
            follower.cut_short, follower.state.compiling = follower.state.compiling or follower.cut_short, None
            follower.lost_s = follower.lost_s or time.monotonic()
            if self._stopping.wait(_RETRY_S):
                return

    def _take(self, follower: _Follower, event: telemetry_pb2.TelemetryEvent) -> None:
        follower.lost_s = None
        kind = event.WhichOneof("event")
        if kind == "progress":
            self._take_progress(follower, event.progress)
        elif kind == "under_way":
            follower.cut_short, compiling = None, event.under_way
            is_served = compiling.phase != "warmup" and not compiling.end_ns
            follower.state.compiling = _served(follower, compiling, None) if is_served else None
        elif kind == "compile":
            compile, served = event.compile, event.compile.phase != "warmup"
            identity = f"{self._trial}-{follower.replica}-{compile.event_id}"  # the check telemetry reads the number
            if self._since_ns:
                identity = f"{identity}-{compile.start_ns}"  # a replica that may start anew counts anew
            if identity in follower.events_seen or (served and compile.end_ns < self._since_ns):
                return
            follower.events_seen.add(identity)
            follower.state.compiles = len(follower.events_seen)
            if served:
                self.served_compiles.append(_served(follower, compile, compile.end_ns))
            row = _row(COMPILE_EVENTS, compile, self._trial, follower)
            self._append("compile_events", {**row, "event_id": identity})
        elif kind == "steps":
            for step in event.steps.records:
                if step.end_ns > max(follower.last_step_ns, self._since_ns):
                    follower.last_step_ns = step.end_ns
                    self._append("steps", _row(STEPS, step, self._trial, follower))
        elif kind == "memory" and event.memory.at_ns > follower.last_memory_ns:
            follower.last_memory_ns = event.memory.at_ns
            place = {"trial": self._trial, "kind": "allocator", "name": follower.replica, "arm": follower.arm}
            known = {field.name: value for field, value in event.memory.ListFields()}
            self._append("machines-arms", {**place, **known})

    def _append(self, table: str, row: dict[str, Any]) -> None:
        with self._lock:
            self._taken += table != "machines-arms"  # which never rests
            self._rows[table].append(row)

    def _take_progress(self, follower: _Follower, progress: telemetry_pb2.Progress) -> None:
        state = follower.state
        if progress.stage == "serving":
            since_ns = self.served_since_ns.setdefault(follower.replica, [])
            if not since_ns or progress.at_ns > since_ns[-1]:
                since_ns.append(progress.at_ns)
        if state.stage != "dead":
            state.stage, state.detail = progress.stage, progress.detail
            state.done, state.total = progress.done, progress.total

    def _flush_until_stopped(self) -> None:
        while not self._stopping.wait(FLUSH_EVERY_S):
            self._flush()

    def _flush(self) -> None:
        for table, writer in self._writers.items():
            with self._lock:
                rows, self._rows[table] = self._rows[table], []
            for row in rows:
                writer.append(row)
            if rows:
                self._guarded(writer.flush)

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self.failure = self.failure or f"telemetry cannot be written: {write_failure(error)} and run again"


def _served(
    by: _Follower, compile: telemetry_pb2.CompileEvent | telemetry_pb2.CompileUnderWay, end_ns: int | None
) -> ServedCompile:
    columns = {name: getattr(compile, name) for name in ("kind", "start_ns", "shape")}
    return ServedCompile(arm=by.arm, replica=by.replica, end_ns=end_ns, **columns)


def _row(schema: pa.Schema, message: Message, trial: int, follower: _Follower) -> dict[str, Any]:
    """Return the columns of `schema`, each from the field of `message` that has its name."""
    row: dict[str, Any] = {"trial": trial, "arm": follower.arm, "replica": follower.replica}
    for column in schema:
        if column.name not in row:
            value = getattr(message, column.name)
            row[column.name] = list(value) if pa.types.is_list(column.type) else value
    return row
