"""Replicas with a real engine that start, compile, drain or fail."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from servers.clock import now_ns
from servers.config import ArmConfig, CompileConfig
from servers.rpc import inference_pb2, telemetry_pb2
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.front.replica import (
    ENCODER,
    ENCODER_ENGINE,
    ENGINE,
    Replica,
    ask,
    count_tokens,
    embed,
    end_replicas,
    refusal,
    start,
)
from tests.servers.front.test_embed import TEXTS, assert_as_plain, embed_together

__all__ = ["end_replicas"]


def naive() -> ArmConfig:
    arm = ArmConfig.from_preset("compiled-naive", engine=ENGINE)
    return replace(arm, compile=replace(arm.compile, backend="eager"))


def encoder(preset: str, **engine: float) -> ArmConfig:
    return ArmConfig.from_preset(preset, model=ENCODER, engine=replace(ENCODER_ENGINE, **engine))  # type: ignore[arg-type]


def test_a_drained_replica_finishes_running_answers_and_waiting_texts(tmp_path: Path) -> None:
    replica = start(tmp_path, ArmConfig(name="drains", engine=ENGINE))
    replica.wait_warm()
    call = replica.inference.Generate(ask(max_tokens=1500))
    received = len(next(iter(call)).token_ids)
    replica.process.send_signal(signal.SIGTERM)
    assert received + count_tokens(call) == 1500
    assert replica.process.wait(timeout=PATIENCE_S) == 0
    replica = start(tmp_path, replace(encoder("eager", max_wait_ms=1500.0), name="encoder"))
    replica.wait_warm()
    waiting = replica.inference.Embed.future(inference_pb2.EmbedRequest(text="last"), timeout=PATIENCE_S)
    wait_for(lambda: replica.counters()["in_flight"])
    replica.process.send_signal(signal.SIGTERM)
    assert waiting.result().tokens == 5
    assert replica.process.wait(PATIENCE_S) == 0


def test_an_engine_that_cannot_start_is_reported_and_the_replica_exits_1(tmp_path: Path) -> None:
    policy = CompileConfig(enabled=True, backend="telepathy")
    replica = start(tmp_path, ArmConfig(name="wrong", engine=ENGINE, compile=policy))
    last = replica.wait_warm()[-1]
    assert last.stage == "failed"
    assert "telepathy" in last.detail
    assert replica.process.wait(timeout=PATIENCE_S) == 1


def test_a_replica_records_no_request_of_its_own_and_reports_a_compile_while_it_runs(tmp_path: Path) -> None:
    replica = start(tmp_path, naive())
    assert replica.wait_warm()[-1].stage == "serving"
    counters = replica.counters()
    assert {counters[key] for key in ("requests", "tokens", "steps", "in_flight")} == {0}
    request = telemetry_pb2.WatchRequest(compile_events=True, steps=True, progress=True)
    found = [event for event in replica.retained(request) if event.WhichOneof("event") in ("compile", "steps")]
    assert len(found) == counters["compile_events"] > 0
    assert not any(event.compile.phase == "serving" or event.compile.request_ids for event in found)

    watch = replica.telemetry.Watch(telemetry_pb2.WatchRequest(compile_events=True, under_way=True), timeout=60)
    told = ((now_ns(), event) for event in watch)
    call = replica.inference.Generate(ask(tokens=17, max_tokens=2))
    begun_ns, begun = next((at_ns, event.under_way) for at_ns, event in told if event.under_way.phase == "serving")
    assert (begun.kind, begun.end_ns, begun.batch_id >= 0) == ("compile", 0, True)
    assert begun.shape.startswith("prefill")
    over = next(event.under_way for _, event in told if event.WhichOneof("event") == "under_way")
    assert (over.start_ns, over.compile_id) == (begun.start_ns, begun.compile_id)
    assert begun_ns < over.end_ns, "although the compile holds its interpreter"
    event = next(event.compile for _, event in told if event.compile.phase == "serving")
    assert event.compile_id == begun.compile_id
    assert event.start_ns < over.end_ns
    assert event.end_ns > begun.start_ns
    list(call)
    watch.cancel()


def test_waiting_texts_leave_as_one_batch_by_deadline_or_by_cancellation(tmp_path: Path) -> None:
    """Four texts leave at once; fewer wait for seconds."""
    replica = start(tmp_path, replace(encoder("eager", max_wait_ms=4_000.0), name="patient"))
    replica.wait_warm()
    assert_as_plain(TEXTS[:4], embed_together(replica, TEXTS[:4]))
    (record,) = [record for record in replica.steps(1) if record.batch == 4][:1]
    assert record.padded_batch == 4
    with pytest.raises(grpc.RpcError) as caught:
        replica.inference.Embed(inference_pb2.EmbedRequest(text="late"), timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    replica.wait_until_idle()
    gone = replica.inference.Embed.future(inference_pb2.EmbedRequest(text="gone"), timeout=PATIENCE_S)
    wait_for(lambda: replica.counters()["in_flight"])
    gone.cancel()
    replica.wait_until_idle()
    assert_as_plain(TEXTS[1:5], embed_together(replica, TEXTS[1:5]))


def serving_compiles(replica: Replica) -> list[telemetry_pb2.CompileEvent]:
    events = replica.retained(telemetry_pb2.WatchRequest(compile_events=True))
    return [event.compile for event in events if event.compile.phase == "serving"]


def test_a_bucketed_encoder_runs_compiled_code_and_compiles_nothing_while_serving(tmp_path: Path) -> None:
    replica = start(tmp_path, encoder("compiled-bucketed"))
    replica.wait_warm()
    for size in range(1, 5):
        assert_as_plain(TEXTS[:size], embed_together(replica, TEXTS[:size]))
    assert all(record.compiled for record in replica.steps(4))
    assert serving_compiles(replica) == []
    assert replica.counters()["eager_fallback_steps"] == 0


def test_a_naive_encoder_recompiles_and_names_the_request_that_waited(tmp_path: Path) -> None:
    replica = start(tmp_path, encoder("compiled-naive"))
    replica.wait_warm()
    answer, trailer = embed(replica, "two words", request_id="first of its length")
    assert_as_plain(("two words",), [answer])
    assert int(trailer["tailgate-compile-stall-ns"]) > 0
    (event, *_) = wait_for(lambda: serving_compiles(replica))
    assert event.kind == "recompile"
    assert event.shape == "encode batch 1 × length 10, context 10"
    assert list(event.request_ids) == ["first of its length"]


def test_texts_beyond_the_queue_are_refused_while_the_engine_is_stopped(tmp_path: Path) -> None:
    replica = start(tmp_path, replace(encoder("eager", max_queue=1, slots=2), name="full"))
    replica.wait_warm()
    os.kill(replica.engine, signal.SIGSTOP)
    request = inference_pb2.EmbedRequest(text="w")
    waiting = [replica.inference.Embed.future(request, timeout=PATIENCE_S) for _ in range(3)]
    wait_for(lambda: replica.counters()["in_flight"] == 3)
    error = refusal(replica, inference_pb2.EmbedRequest(text="fourth"))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "3" in (error.details() or "")
    os.kill(replica.engine, signal.SIGCONT)
    assert [call.result().tokens for call in waiting] == [2, 2, 2]
