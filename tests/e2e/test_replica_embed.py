from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import grpc

from servers.rpc import inference_pb2
from tests.fakes.patience import PATIENCE_S, wait_for
from tests.servers.front.test_embed import (
    TEXTS,
    Replica,
    arm_of,
    assert_as_plain,
    embed,
    refusal,
    start,
    stop,
    together,
)


def test_a_full_batch_does_not_wait_and_runs_as_one_step(patient: Replica) -> None:
    assert_as_plain(TEXTS[:4], together(patient, TEXTS[:4]))
    (record,) = [record for record in patient.steps(1) if record.batch == 4][:1]
    assert record.padded_batch == 4


def test_texts_beyond_the_queue_are_refused_at_once(tmp_path: Path) -> None:
    """The engine is stopped, so that what was let in stays."""
    replica = start(tmp_path, replace(arm_of("eager", max_queue=1, slots=2), name="full"))
    children = Path(f"/proc/{replica.process.pid}/task/{replica.process.pid}/children").read_text().split()
    (engine,) = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    try:
        os.kill(engine, signal.SIGSTOP)
        waiting = [
            replica.inference.Embed.future(inference_pb2.EmbedRequest(text="w"), timeout=PATIENCE_S) for _ in range(3)
        ]
        wait_for(lambda: replica.counters()["in_flight"] == 3)
        error = refusal(replica, inference_pb2.EmbedRequest(text="fourth"))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3 requests are in flight; the limit is 3 (slots + max_queue)" in (error.details() or "")
        os.kill(engine, signal.SIGCONT)
        assert [call.result().tokens for call in waiting] == [2, 2, 2]
    finally:
        os.kill(engine, signal.SIGCONT)
        stop(replica)


def test_a_replica_that_drains_answers_what_waits_and_ends_well(tmp_path: Path) -> None:
    replica = start(tmp_path, replace(arm_of("eager", max_wait_ms=1500.0), name="draining"))
    waiting = replica.inference.Embed.future(inference_pb2.EmbedRequest(text="last"), timeout=PATIENCE_S)
    wait_for(lambda: replica.counters()["in_flight"])
    os.kill(replica.process.pid, signal.SIGTERM)
    assert waiting.result().tokens == 5
    assert replica.process.wait(PATIENCE_S) == 0


def test_a_bucketed_encoder_runs_compiled_code_and_compiles_nothing_while_serving(tmp_path: Path) -> None:
    replica = start(tmp_path, arm_of("compiled-bucketed"))
    try:
        for size in range(1, 5):
            assert_as_plain(TEXTS[:size], together(replica, TEXTS[:size]))
        assert_as_plain(TEXTS[4:], together(replica, TEXTS[4:]))
        assert all(record.compiled for record in replica.steps(4))
        assert replica.compiles() == []
        assert replica.counters()["eager_fallback_steps"] == 0
    finally:
        stop(replica)


def test_a_naive_encoder_recompiles_and_says_who_waited(tmp_path: Path) -> None:
    replica = start(tmp_path, arm_of("compiled-naive"))
    try:
        answer, trailer = embed(replica, "two words", request_id="first of its length")
        assert_as_plain(("two words",), [answer])
        assert int(trailer["tailgate-compile-stall-ns"]) > 0
        (event, *_) = replica.compiles(until=1)
        assert event.kind == "recompile"
        assert event.shape == "encode batch 1 × length 10, context 10"
        assert list(event.request_ids) == ["first of its length"]
    finally:
        stop(replica)
