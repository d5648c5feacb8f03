"""What the front makes of the engine's messages."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from array import array

import grpc
import pytest
from prometheus_client import generate_latest

from tailgate.servers.config import ArmConfig, CompileConfig, EngineConfig
from tailgate.servers.engine.messages import BlindSpots, Cancel, Finished, StepOutput, Submit
from tailgate.servers.front.front import Front, TelemetryEvent
from tailgate.servers.front.metrics import FrontMetrics
from tailgate.servers.front.requests import RefusedError, load_tokenizer
from tailgate.servers.front.serve import EnginePipe
from tailgate.servers.front.service import embed_response
from tailgate.servers.front.telemetry import TelemetryService, take, telemetry_events
from tailgate.servers.rpc import inference_pb2, telemetry_pb2
from tailgate.servers.rpc.telemetry_pb2 import (
    CompileEvent,
    CompileUnderWay,
    MemoryReading,
    Progress,
    SnapshotResponse,
    StepRecord,
)


def front_of(*messages: object, compiles: bool = True) -> Front:
    arm = ArmConfig(name="arm", compile=CompileConfig(enabled=compiles))
    front = Front(arm, "arm-0", lambda message: None, load_tokenizer(arm.model.id), FrontMetrics("arm", "arm-0"))
    for message in messages:
        front.receive([message])  # type: ignore[list-item]
    return front


def snapshot_of(front: Front) -> telemetry_pb2.SnapshotResponse:
    return asyncio.run(TelemetryService(front).Snapshot(telemetry_pb2.SnapshotRequest(), None))  # type: ignore[arg-type]


def metrics_of(front: Front) -> str:
    return generate_latest(front.metrics.registry).decode()


BREAK = "llama.py:12 in forward: print"


def test_blind_spots_reach_the_snapshot() -> None:
    assert list(snapshot_of(front_of(BlindSpots(texts=("torch 9 is not read",)))).blind_spots) == [
        "torch 9 is not read"
    ]


def test_memory_reaches_watchers_and_metrics_without_figures_that_cannot_be_read() -> None:
    on_cpu = MemoryReading(at_ns=7, memory_bytes=1 << 20)
    on_device = MemoryReading(at_ns=8, memory_bytes=2 << 20, reserved_bytes=0, peak_bytes=3)
    front = front_of(on_cpu, on_device)
    with front.watch() as late:
        wires = [wire.memory for wire in telemetry_events(asyncio.run(take(late, 9)))]
    assert [{field.name: value for field, value in wire.ListFields()} for wire in wires] == [
        {"at_ns": 7, "memory_bytes": 1 << 20},
        {"at_ns": 8, "memory_bytes": 2 << 20, "reserved_bytes": 0, "peak_bytes": 3},
    ]
    assert 'tailgate_memory_now_bytes{arm="arm",replica="arm-0",what="memory"} 2.097152e+06' in metrics_of(front)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_step_fell_back_where_the_arm_should_compile(compiles: bool) -> None:
    front = front_of(compiles=compiles)
    for number in range(4):
        sizes = {"batch": 1, "padded_batch": 1, "tokens": 1, "padded_tokens": 1, "start_ns": 0, "end_ns": 1}
        record = StepRecord(step_id=number, kind="decode", compiled=compiles and number != 2, **sizes)  # type: ignore[arg-type]
        front.receive([StepOutput(emit_ns=1, step=record)])
    assert snapshot_of(front).counters["steps"] == 4
    fell_back = 'tailgate_steps_total{arm="arm",fell_back="yes",kind="decode",replica="arm-0"} 1.0'
    assert (fell_back in metrics_of(front)) == compiles


def test_all_of_a_compile_goes_over_the_wire_and_its_time_is_counted() -> None:
    event = CompileEvent(
        event_id="7",
        kind="recompile",
        start_ns=1_000_000_000,
        end_ns=3_500_000_000,
        request_ids=("a", "b"),
        phase="serving",
        breaks=(BREAK,),
        backend_ns=5,
    )
    metrics, wire = metrics_of(front_of(event)), next(telemetry_events([event])).compile
    assert (wire.backend_ns, list(wire.breaks), list(wire.request_ids)) == (5, [BREAK], ["a", "b"])
    labels = 'arm="arm",kind="recompile",phase="serving",replica="arm-0"'
    assert f"tailgate_compile_events_total{{{labels}}} 1.0" in metrics
    assert f"tailgate_compile_seconds_total{{{labels}}} 2.5" in metrics
    assert snapshot_of(front_of(event, event)).counters["compile_events"] == 2


def under_way_now(front: Front) -> list[telemetry_pb2.CompileUnderWay]:
    with front.watch() as late:
        front.close()
        wires = list(telemetry_events(asyncio.run(take(late, 9))))
    return [wire.under_way for wire in wires if wire.WhichOneof("event") == "under_way"]


def under_way(start_ns: int = 10, end_ns: int = 0) -> CompileUnderWay:
    where = {"compile_id": "0/1", "shape": "prefill 2x64", "batch_id": 7, "phase": "serving"}
    return CompileUnderWay(kind="compile", start_ns=start_ns, end_ns=end_ns, **where)  # type: ignore[arg-type]


PARTS = {"process": 5, "load": 7, "decode batch 1": 10, "decode batch 2": 20, "capture decode batch 1": 1, "other": 2}
READY = SnapshotResponse(vocab_size=259, device="cpu", dtype="float32", memory_bytes={"weights": 3}, startup_ns=PARTS)


def test_a_late_watcher_gets_the_compile_that_is_under_way() -> None:
    front = front_of(under_way(1), under_way(1, 9), under_way())
    (wire,) = under_way_now(front)
    assert (wire.kind, wire.start_ns, wire.end_ns, wire.phase) == ("compile", 10, 0, "serving")
    assert (wire.compile_id, wire.shape, wire.batch_id) == ("0/1", "prefill 2x64", 7)
    front = front_of(under_way())
    front.fail("the engine process died with exit code -9")
    assert under_way_now(front) == []
    # a compile for the replica's own first request is part of its warm-up
    assert [wire.phase for wire in under_way_now(front_of(READY, under_way()))] == ["warmup"]


@pytest.mark.parametrize("numbers", [0, 1, 31, 32, 384, 5000])  # 31 × 4 bytes is the most whose length takes one byte
def test_the_bytes_of_a_vector_are_the_answers_values(numbers: int) -> None:
    vector = array("f", (0.5 * place - 3.0 for place in range(numbers)))
    assert embed_response(vector.tobytes(), 7) == inference_pb2.EmbedResponse(values=vector, tokens=7)


def event(number: int) -> TelemetryEvent:
    return Progress(at_ns=number, stage="load")


def test_a_watcher_gives_earlier_events_then_later_ones_then_the_end() -> None:
    async def read() -> list[int]:
        front = front_of(event(1), event(2))
        with front.watch() as watcher:
            seen = await take(watcher, 1) + await take(watcher, 9)
            waiting = asyncio.create_task(take(watcher, 9))
            await asyncio.sleep(0)
            front.publish(event(3))
            seen += await waiting
            front.publish(event(4))
            front.close()
            front.publish(event(5))
            seen += await take(watcher, 9)
            assert await take(watcher, 9) == await take(watcher, 9) == []
        return [item.at_ns for item in seen if isinstance(item, Progress)]

    assert asyncio.run(read()) == [1, 2, 3, 4]


def submit(name: object = "same", tokens: int = 1) -> Submit:
    return Submit(request_id=str(name), name=str(name), prompt=[5] * tokens, max_tokens=2, recv_ns=0)


def test_an_engine_that_does_not_read_blocks_no_sender_and_gets_every_message_in_order() -> None:
    near, far = multiprocessing.get_context("spawn").Pipe()
    sent: list[object] = []
    for number in range(400):  # a pipe takes some 200 KiB
        sent += [submit(number, 50_000 if number % 50 == 0 else 2_000), Cancel(request_id=str(number))]

    async def talk() -> list[object]:
        pipe = await EnginePipe.of(near)
        for message in sent:  # on the one thread of the loop, which nothing reads meanwhile
            pipe.send(message)
        got = await asyncio.to_thread(lambda: [far.recv() for _ in sent])
        far.send(["one", "two"])
        far.close()
        answers = [messages async for messages in pipe.received()]
        assert answers == [["one", "two"]], "an engine that is gone is no error"
        pipe.send(Cancel(request_id="late"))
        return got

    assert asyncio.run(talk()) == sent


def output(*tokens: int, of: str = "0", ends: bool = False) -> StepOutput:
    """What the engine says of the request with the id `of`: they count from 0."""
    return StepOutput(
        emit_ns=1,
        tokens=[(of, token) for token in tokens],
        finished=[Finished(request_id=of, status="OK", reason="length")] if ends else [],
    )


@pytest.fixture
def front() -> Front:
    front = front_of(READY)
    front.open()
    return front


def test_requests_that_cannot_be_taken_are_refused_and_the_first_failure_is_reported(front: Front) -> None:
    def refused(request_id: str, of: Front = front) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(RefusedError) as caught:
            of.admit(submit(request_id))
        return caught.value.code, caught.value.message

    assert refused("early", front_of())[0] is grpc.StatusCode.UNAVAILABLE
    front.admit(submit())
    limit = front.arm.engine.slots + front.arm.engine.max_queue
    for _ in range(1, limit):  # of one name, which is the client's affair
        front.admit(submit())
    code, message = refused("one more")
    assert (code, f"limit is {limit}" in message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    front.receive([Progress(at_ns=1, stage="failed", detail="no memory")])
    front.fail("exit code 1")
    assert front.in_flight == 0
    code, message = refused("late")
    assert (code, "no memory" in message) == (grpc.StatusCode.UNAVAILABLE, True)
    front.failure, front.draining = "", True
    assert refused("last")[0] is grpc.StatusCode.UNAVAILABLE


def test_the_shares_of_three_frontends_make_the_limit_of_the_replica_and_their_ids_differ() -> None:
    arm = ArmConfig(engine=EngineConfig(slots=4, max_queue=3, frontends=3))
    sent: list[Submit] = []
    for number, share in enumerate((3, 2, 2)):
        front = Front(arm, "arm-0", sent.append, load_tokenizer(arm.model.id), FrontMetrics("arm", "arm-0"), number)  # type: ignore[arg-type]
        front.ready = READY
        for name in range(share):
            front.admit(submit(str(name)))
        with pytest.raises(RefusedError, match=rf"limit is {share} \(slots \+ max_queue over 3 frontends\)"):
            front.admit(submit("one more"))
    ends = [Finished(request_id=one.request_id, status="OK") for one in sent]
    parts = StepOutput(emit_ns=1, finished=ends).divided(3)
    assert [part.finished for part in parts] == [ends[:3], ends[3:5], ends[5:]]


@pytest.mark.parametrize("ended", [True, False])
def test_what_is_left_of_an_earlier_request_of_the_same_name_is_not_the_retrys(front: Front, ended: bool) -> None:
    front.admit(submit())
    front.receive([output(7, 8, ends=ended)])
    if not ended:
        front.abandon("0")
    retry = front.admit(submit())
    front.abandon("0")  # by a reader that was slow
    front.receive([output(8), output(9, ends=True)])  # in flight when the cancel reached the engine
    assert (retry.token_ids, retry.finished) == ([], None)
    front.receive([output(5, of="1"), output(6, of="1", ends=True)])
    assert (retry.token_ids, retry.finished is not None) == ([5, 6], True)
    assert front.in_flight == 0
    front.admit(submit())


def test_a_bad_message_costs_no_other(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = front.admit(submit())

    def fail(event: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(front, "publish", fail)
    with caplog.at_level(logging.ERROR):
        front.receive([Progress(at_ns=1, stage="load"), output(5, ends=True)])
    assert answer.token_ids == [5]
    assert asyncio.run(answer.next())[0] == [5]
    assert "Progress" in caplog.text
