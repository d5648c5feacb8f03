"""What the front makes of the engine's messages: counters, facts, metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from servers.compiler.events import CompileEvent, CompilerFacts, CompileUnderWay
from servers.config import ArmConfig, CompileConfig
from servers.engine.messages import MemoryReading, Ready, StepOutput, StepRecord
from servers.front.front import Front
from servers.front.metrics import MOST_CAUSES, FrontMetrics
from servers.front.service import TelemetryService, telemetry_event
from servers.front.tokenizer import load_tokenizer
from servers.rpc import telemetry_pb2


def front_of(*, compiles: bool = True) -> Front:
    arm = ArmConfig(name="arm", compile=CompileConfig(enabled=compiles))
    return Front(arm, "arm-0", lambda message: None, load_tokenizer(arm.model.id), FrontMetrics("arm", "arm-0"))


def snapshot_of(front: Front) -> telemetry_pb2.SnapshotResponse:
    return asyncio.run(TelemetryService(front).Snapshot(telemetry_pb2.SnapshotRequest(), None))  # type: ignore[arg-type]


def metrics_of(front: Front) -> str:
    return generate_latest(front.metrics.registry).decode()


def step(number: int, *, compiled: bool) -> StepOutput:
    record = StepRecord(
        step_id=number,
        kind="decode",
        start_ns=0,
        end_ns=1,
        batch=1,
        padded_batch=1,
        tokens=1,
        padded_tokens=1,
        compiled=compiled,
    )
    return StepOutput(emit_ns=1, step=record)


BREAK, SKIP = "llama.py:12 in forward: print", "mutated inputs"


def test_facts_reach_watchers_snapshot_and_metrics() -> None:
    front = front_of()
    with front.watch(CompilerFacts) as early:
        front.receive([CompilerFacts(graph_breaks={BREAK: 1}, cudagraph_skips={})])
        blind = ("torch 9 is not read",)
        front.receive([CompilerFacts(graph_breaks={BREAK: 3}, cudagraph_skips={SKIP: 2}, blind_spots=blind)])
        seen = [asyncio.run(early.get()) for _ in range(3)]
    assert [telemetry_event(item).facts.graph_breaks.get(BREAK, 0) for item in seen if item is not None] == [0, 1, 3]
    with front.watch(CompilerFacts) as late:
        assert asyncio.run(late.get()) == seen[-1]
    snapshot = snapshot_of(front)
    assert dict(snapshot.graph_breaks) == {BREAK: 3}
    assert dict(snapshot.cudagraph_skips) == {SKIP: 2}
    assert tuple(snapshot.blind_spots) == blind
    assert f'tailgate_graph_breaks_total{{arm="arm",cause="{BREAK}",replica="arm-0"}} 3.0' in metrics_of(front)
    assert f'tailgate_cudagraph_skips_total{{arm="arm",cause="{SKIP}",replica="arm-0"}} 2.0' in metrics_of(front)


def test_causes_that_come_up_late_share_one_label() -> None:
    front = front_of()
    for last in (MOST_CAUSES, MOST_CAUSES + 30):
        front.receive([CompilerFacts(graph_breaks={f"{at}": 2 for at in range(last)}, cudagraph_skips={})])
    lines = [line for line in metrics_of(front).splitlines() if line.startswith("tailgate_graph_breaks_total{")]
    assert len(lines) == MOST_CAUSES + 1
    assert 'tailgate_graph_breaks_total{arm="arm",cause="others",replica="arm-0"} 60.0' in lines


def test_memory_reaches_watchers_and_metrics_and_nothing_is_made_of_what_cannot_be_read() -> None:
    front = front_of()
    on_cpu = MemoryReading(at_ns=7, memory_bytes=1 << 20)
    on_device = MemoryReading(at_ns=8, memory_bytes=2 << 20, allocated_bytes=0, peak_bytes=3, out_of_memory=1)
    front.receive([on_cpu, on_device])
    with front.watch(MemoryReading) as late:
        seen = [asyncio.run(late.get()) for _ in range(2)]
    wires = [telemetry_event(item).memory for item in seen if item is not None]
    assert [{field.name: value for field, value in wire.ListFields()} for wire in wires] == [
        {"at_ns": 7, "memory_bytes": 1 << 20},
        {"at_ns": 8, "memory_bytes": 2 << 20, "allocated_bytes": 0, "peak_bytes": 3, "out_of_memory": 1},
    ]
    assert 'tailgate_memory_now_bytes{arm="arm",replica="arm-0",what="memory"} 2.097152e+06' in metrics_of(front)
    front.receive([MemoryReading(at_ns=9, out_of_memory=3)])
    failed = 'tailgate_failed_allocations_total{arm="arm",replica="arm-0",what="out_of_memory"} 3.0'
    assert failed in metrics_of(front), "counted from the start, and not once more at each reading"
    assert "allocator_retries" not in metrics_of(front)


@pytest.mark.parametrize(("compiles", "share"), [(True, 0.25), (False, 0.0)])
def test_the_share_of_eager_steps_is_that_of_an_arm_which_should_compile(compiles: bool, share: float) -> None:
    front = front_of(compiles=compiles)
    assert snapshot_of(front).eager_fallback_share == 0
    front.receive([step(number, compiled=compiles and number != 2) for number in range(4)])
    snapshot = snapshot_of(front)
    assert snapshot.eager_fallback_share == share
    assert snapshot.counters["steps"] == 4
    assert snapshot.counters["eager_fallback_steps"] == 4 * share


def test_everything_that_a_compile_tells_goes_over_the_wire_and_its_time_is_counted() -> None:
    front = front_of()
    event = CompileEvent(
        event_id="7",
        kind="recompile",
        start_ns=1_000_000_000,
        end_ns=3_500_000_000,
        reason="0/0: size mismatch",
        request_ids=("a", "b"),
        phase="serving",
        autotune_ns=5,
        guards=6,
        nodes=7,
        kernels=8,
        breaks=(BREAK,),
    )
    front.receive([event])
    wire = telemetry_event(event).compile
    assert (wire.autotune_ns, wire.guards, wire.nodes, wire.kernels) == (5, 6, 7, 8)
    assert (list(wire.breaks), list(wire.request_ids)) == ([BREAK], ["a", "b"])
    labels = 'arm="arm",kind="recompile",phase="serving",replica="arm-0"'
    assert f"tailgate_compile_events_total{{{labels}}} 1.0" in metrics_of(front)
    assert f"tailgate_compile_seconds_total{{{labels}}} 2.5" in metrics_of(front)


def under_way_now(front: Front) -> list[telemetry_pb2.CompileUnderWay]:
    """What somebody who comes now is told."""
    with front.watch(CompileUnderWay) as late:
        front.close()
        return [telemetry_event(event).under_way for event in iter(lambda: asyncio.run(late.get()), None)]  # type: ignore[arg-type]


UNDER_WAY = CompileUnderWay(
    kind="compile", start_ns=10, compile_id="0/1", shape="prefill 2x64", batch_id=7, phase="serving"
)


def test_who_comes_late_is_told_how_it_stands_with_the_last_compile() -> None:
    front = front_of()
    front.receive([replace(UNDER_WAY, start_ns=1), replace(UNDER_WAY, start_ns=1, end_ns=9), UNDER_WAY])
    (wire,) = under_way_now(front)
    assert (wire.kind, wire.start_ns, wire.end_ns, wire.phase) == ("compile", 10, 0, "serving")
    assert (wire.compile_id, wire.shape, wire.batch_id) == ("0/1", "prefill 2x64", 7)


def test_with_a_dead_engine_nothing_is_under_way() -> None:
    front = front_of()
    front.receive([UNDER_WAY])
    front.fail("the engine process died with exit code -9")
    assert under_way_now(front) == []


def test_a_compile_for_the_replicas_own_first_request_is_part_of_its_warm_up() -> None:
    front = front_of()
    front.receive([ready_of({}), UNDER_WAY])
    assert [wire.phase for wire in under_way_now(front)] == ["warmup"]


def ready_of(items: dict[str, int]) -> Ready:
    return Ready(
        vocab_size=9, device="cpu", dtype="float32", versions={}, memory_bytes={"weights": 3}, startup_ns=items
    )


def test_the_start_is_summed_by_the_first_word_of_each_item() -> None:
    items = {
        "process": 5,
        "load": 7,
        "decode batch 1": 10,
        "decode batch 2": 20,
        "capture decode batch 1": 1,
        "other": 2,
    }
    front = front_of()
    front.receive([ready_of(items)])
    front.open()
    groups = {"process": 5, "load": 7, "decode": 30, "capture": 1, "other": 2, "total": 45}
    assert dict(snapshot_of(front).startup_groups_ns) == groups
    assert 'tailgate_startup_seconds{arm="arm",part="decode",replica="arm-0"} 3e-08' in metrics_of(front)
