from __future__ import annotations

import pytest

from benchmarks.measure import (
    Answer,
    Session,
    latencies,
    median_interval,
    steady_decode,
    throughput,
)
from servers.engine.messages import StepOutput, StepRecord

MS = 1_000_000


def step(at_ms: float, kind: str, names: str, *, batch: int = 0) -> StepOutput:
    """A step emitted at `at_ms` with one token for each letter of `names`; `batch` rows ran, as many unless given."""
    record = StepRecord(
        step_id=0,
        kind=kind,
        start_ns=0,
        end_ns=int(at_ms * MS),
        batch=batch or len(names),
        padded_batch=4,
        tokens=len(names),
        padded_tokens=4,
        compiled=True,
    )
    return StepOutput(emit_ns=int(at_ms * MS), tokens=[(name, 7) for name in names], step=record)


def test_only_full_decode_steps_behind_full_decode_steps_count() -> None:
    outputs = [
        step(0, "prefill", "a"),
        step(10, "decode", "a"),  # one row: not full
        step(50, "prefill", "b"),
        step(60, "decode", "ab"),  # full, but it waited behind a prefill: starts the clock
        step(64, "decode", "ab"),  # 4 ms
        step(70, "decode", "ab"),  # 6 ms
        step(170, "prefill", "c"),
        step(171, "decode", "ab", batch=3),  # another row ran with them
        step(172, "decode", "ab"),  # full again: starts the clock
        step(177, "decode", "ab"),  # 5 ms
        step(178, "decode", "a"),
    ]
    seen = steady_decode(outputs, {"a": 100, "b": 200, "c": 5}, batch=2)
    assert seen.steps == 3
    assert seen.seconds == pytest.approx(0.015)
    assert seen.step_ms == pytest.approx(5.0)
    assert seen.tokens_per_s == pytest.approx(2 * 3 / 0.015)


def test_positions_are_those_a_step_attends_to() -> None:
    outputs = [step(0, "prefill", "a"), step(1, "decode", "a"), step(2, "decode", "a")]
    # The third token is computed from the second, written at position 11: 12 positions with the ten of the prompt.
    assert steady_decode(outputs, {"a": 10}, batch=1).positions == 12


def test_an_output_without_a_step_does_not_stop_the_clock() -> None:
    outputs = [step(0, "decode", "a"), StepOutput(emit_ns=3 * MS), step(5, "decode", "a")]
    assert steady_decode(outputs, {"a": 1}, batch=1).step_ms == pytest.approx(5.0)


def answer(*token_ms: float, due_ms: float = 0, status: str = "OK") -> Answer:
    return Answer(
        prompt_tokens=1, due_ns=int(due_ms * MS), token_ns=[int(at_ms * MS) for at_ms in token_ms], status=status
    )


def test_throughput_is_counted_from_the_start_to_the_last_token() -> None:
    session = Session(
        start_ns=100 * MS,
        end_ns=900 * MS,
        answers={"a": answer(200, 300), "b": answer(250, 600)},
        outputs=[],
        events=[],
    )
    assert throughput(session) == pytest.approx(4 / 0.5)
    assert session.failed == {}


def test_latencies_count_from_the_due_time_and_leave_failures_out() -> None:
    figures = latencies([answer(30, 40, 60, due_ms=10), answer(1, 500, due_ms=0, status="INTERNAL")])
    assert figures["p50_ttft_ms"] == pytest.approx(20)
    assert figures["p50_itl_ms"] == pytest.approx(15)
    assert figures["max_itl_ms"] == pytest.approx(20)
    assert figures["p99_itl_over_median"] == pytest.approx(19.9 / 15)


@pytest.mark.parametrize(
    ("n", "interval"),
    [(1, None), (5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))],  # Hollander & Wolfe's table for 95 %
)
def test_the_interval_of_a_median_is_the_sign_tests(n: int, interval: tuple[int, int] | None) -> None:
    assert median_interval(list(range(n, 0, -1))) == interval
