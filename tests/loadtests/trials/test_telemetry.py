"""Telemetry of replicas on disk, and the snapshots by which arms are compared."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from tailgate.analysis.judging.alarms import ServedCompile
from tailgate.analysis.records.schemas import COMPILE_EVENTS, MACHINES, STEPS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.trials import telemetry as collecting
from tailgate.loadtests.trials.replicas import check_alike, start_up
from tailgate.loadtests.trials.status import Status
from tailgate.loadtests.trials.telemetry import Collector
from tailgate.servers.complaint import ConfigError
from tailgate.servers.rpc import telemetry_pb2, telemetry_pb2_grpc
from tailgate.servers.rpc.telemetry_pb2 import SnapshotResponse
from tests.fakes import grpc_servers
from tests.fakes.processes import refusal, wait_for


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    collector = Collector(tmp_path, trial=2, status=Status())
    yield collector
    collector.stop()


class Telemetry(telemetry_pb2_grpc.TelemetryServicer):
    """Tells `events` and ends the stream, again and again."""

    def __init__(self, *events: telemetry_pb2.TelemetryEvent) -> None:
        self.events = events
        self.calls = 0

    def Watch(  # noqa: N802
        self, request: telemetry_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[telemetry_pb2.TelemetryEvent]:
        self.calls += 1
        yield from self.events


@contextlib.contextmanager
def followed(collector: Collector, telemetry: telemetry_pb2_grpc.TelemetryServicer) -> Iterator[None]:
    """The replica naive-0 of the arm naive serves this telemetry, which is collected."""
    with grpc_servers.serving(telemetry_pb2_grpc.add_TelemetryServicer_to_server, telemetry) as address:
        collector.follow("naive", "naive-0", address)
        yield


def step_batch(count: int) -> telemetry_pb2.TelemetryEvent:
    records = [telemetry_pb2.StepRecord(step_id=n, kind="decode", end_ns=1000 + n) for n in range(count)]
    return telemetry_pb2.TelemetryEvent(steps=telemetry_pb2.StepRecords(records=records))


def serving(at_ns: int) -> telemetry_pb2.TelemetryEvent:
    return telemetry_pb2.TelemetryEvent(progress=telemetry_pb2.Progress(at_ns=at_ns, stage="serving"))


def test_a_replica_that_serves_since_another_time_has_restarted(collector: Collector) -> None:
    telemetry = Telemetry(serving(5))
    with followed(collector, telemetry):
        wait_for(lambda: telemetry.calls >= 2)
        assert collector.served_since_ns == {"naive-0": [5]}
        telemetry.events = (serving(9),)
        last = telemetry.calls + 2
        wait_for(lambda: telemetry.calls >= last)
        collector.stop()
    assert collector.served_since_ns == {"naive-0": [5, 9]}


def test_events_are_on_disk_at_once_and_a_resumed_stream_repeats_none(tmp_path: Path, collector: Collector) -> None:
    compiles = [telemetry_pb2.CompileEvent(event_id=str(number), kind="compile") for number in range(3)]
    readings = [
        telemetry_pb2.MemoryReading(at_ns=5, memory_bytes=9),
        telemetry_pb2.MemoryReading(at_ns=6, memory_bytes=9, peak_bytes=0),
    ]
    # A replica replays everything that it retains to each call.
    telemetry = Telemetry(
        serving(5),
        *(telemetry_pb2.TelemetryEvent(compile=event) for event in compiles),
        step_batch(4),
        *(telemetry_pb2.TelemetryEvent(memory=reading) for reading in readings),
    )
    path = tmp_path / "compile_events.arrow"
    with followed(collector, telemetry):
        wait_for(lambda: telemetry.calls >= 3)
        wait_for(lambda: read_table(path, COMPILE_EVENTS)[0].num_rows == 3)
    assert collector.snapshot("naive-0", timeout_s=0.5) is None, "the replica is gone"
    collector.stop()
    table, truncated = read_table(path, COMPILE_EVENTS)
    assert (table.num_rows, truncated) == (3, ())
    assert {(row["trial"], row["arm"], row["replica"]) for row in table.to_pylist()} == {(2, "naive", "naive-0")}
    assert read_table(tmp_path / "steps.arrow", STEPS)[0].num_rows == 4
    memory = read_table(tmp_path / "machines-arms.arrow", MACHINES)[0].to_pylist()
    known = [{name: value for name, value in row.items() if value is not None} for row in memory]
    place = {"trial": 2, "kind": "allocator", "name": "naive-0", "arm": "naive", "memory_bytes": 9}
    assert known == [{**place, "at_ns": 5}, {**place, "at_ns": 6, "peak_bytes": 0}]


def test_a_replica_is_lost_once_its_telemetry_stays_away(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry(serving(5))
    with followed(collector, telemetry):
        wait_for(lambda: telemetry.calls >= 3)
        assert collector.lost() == frozenset()  # each stream ended, and the next one came in time
    monkeypatch.setattr(collecting, "_LOST_S", 0.1)
    wait_for(lambda: collector.lost() == {"naive-0"})


class LiveTelemetry(telemetry_pb2_grpc.TelemetryServicer):
    """Tells what is put, on one stream after the other; None ends a stream."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[telemetry_pb2.TelemetryEvent | None] = queue.SimpleQueue()
        self.streams = 0

    def tell(self, *, end_ns: int = 0, phase: str = "serving") -> None:
        under_way = telemetry_pb2.CompileUnderWay(
            kind="compile", start_ns=5, end_ns=end_ns, shape="2x64", batch_id=7, phase=phase
        )
        self.events.put(telemetry_pb2.TelemetryEvent(under_way=under_way))

    def Watch(  # noqa: N802
        self, request: telemetry_pb2.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[telemetry_pb2.TelemetryEvent]:
        self.streams += 1
        yield from iter(self.events.get, None)


NOW = ServedCompile(arm="naive", replica="naive-0", kind="compile", start_ns=5, shape="2x64")


@pytest.mark.parametrize("over", [{"end_ns": 9}, {"phase": "warmup"}], ids=["its end", "one of the warm-up"])
def test_a_compile_is_under_way_until_something_else_is_reported(over: dict[str, Any], collector: Collector) -> None:
    live = LiveTelemetry()
    with followed(collector, live):
        live.tell()
        wait_for(lambda: collector.compiling == [NOW])
        live.tell(**over)
        wait_for(lambda: collector.compiling == [])
        live.events.put(None)
    if "end_ns" in over:
        assert collector.unfinished("naive-0", 9) == {}


def snapshot(*, dtype: str = "float32", device: str = "cuda:0", vocab: int = 256, **more: int) -> SnapshotResponse:
    return SnapshotResponse(
        dtype=dtype,
        device=device,
        vocab_size=vocab,
        startup_ns={"load": more.get("load_ns", 1)},
        memory_bytes={"weights": more.get("weights", 10)},
    )


def test_an_arm_starts_as_its_slowest_replica_and_its_memory_and_blind_spots_add_up() -> None:
    blind = SnapshotResponse(blind_spots=["torch 9 is not read"])
    cost = start_up([snapshot(load_ns=5, weights=10), snapshot(load_ns=9, weights=12), blind, blind])
    assert (cost["items_ns"], cost["memory_bytes"]) == ({"load": 9}, {"weights": 22})
    assert cost["blind_spots"] == ["torch 9 is not read"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"dtype": "float16"}, ("dtype float16", "float32")),
        ({"vocab": 300}, ("vocabulary 300", "256")),
        ({"device": "cpu"}, ("device cpu", "cuda:0")),
    ],
)
def test_a_replica_unlike_the_control_is_named(other: dict[str, Any], words: tuple[str, ...]) -> None:
    check_alike({"eager-0": snapshot(), "new-0": snapshot(device="cuda:1")}, "eager-0")
    said = refusal(ConfigError, check_alike, {"new-0": snapshot(**other), "eager-0": snapshot()}, "eager-0")
    assert all(word in said for word in ("new-0", *words))


def test_telemetry_ends_also_after_a_thread_that_could_not_start(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            collector.follow("naive", "naive-0", "127.0.0.1:1")
    collector.stop()


def test_an_error_of_our_own_in_telemetry_is_shown(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("no such column")

    monkeypatch.setattr(collector, "_take", fail)
    with followed(collector, Telemetry(step_batch(1))):
        wait_for(lambda: collector.failure)
    for words in ("naive-0", "KeyError"):
        assert words in str(collector.failure)
