"""What `tailgate forecast` foretells of decode steps is what `tailgate inspect` finds when it runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.statistics.decoding import decode_steps
from loadtests.commands.forecast import forecast_text
from loadtests.commands.trace_forecast import Forecast, automatic_compiles, forecast
from loadtests.traffic.traces import Trace, read_trace
from tests.servers.compiler.test_recorder import reset_compiler

WARM = (1, 6)  # what a minimal warm-up decodes: one row after a prompt of five tokens
# (seconds, prompt tokens, answer tokens): alone, three at once, alone again, two at once
REQUESTS = [(0.0, 12, 4), (6.0, 20, 6), (6.2, 9, 4), (6.9, 30, 3), (20.0, 7, 3), (30.0, 11, 4), (30.1, 11, 4)]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[None]:
    yield
    reset_compiler()


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    path = tmp_path / "own.csv"
    path.write_text("time_s,input_tokens,output_tokens\n" + "".join(f"{t},{p},{o}\n" for t, p, o in REQUESTS))
    return read_trace(path)


def compiled_after_warmup(shapes: list[tuple[int, int]]) -> list[int]:
    return [at - 1 for at in automatic_compiles(*zip(WARM, *shapes, strict=True)) if at > 0]


def policy_of(case: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in case["policies"] if row["policy"].startswith(name))


# --- Without a compiler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "compiled"),
    [
        ([(1, 7), (1, 8), (1, 90)], [0]),  # one compile makes the positions dynamic
        ([(1, 6)], []),
        ([(3, 6), (2, 6), (4, 9), (1, 9)], [0, 2, 3]),  # rows, then positions, then a single row's own graph
        ([(3, 9), (1, 9), (2, 40), (1, 50)], [0, 1]),
    ],
)
def test_a_dimension_becomes_dynamic_when_it_first_differs(shapes: list[tuple[int, int]], compiled: list[int]) -> None:
    assert compiled_after_warmup(shapes) == compiled


def test_a_slower_server_meets_larger_batches_and_the_words_say_what_is_assumed(trace: Trace) -> None:
    found = forecast(trace, Forecast(slots=4, step_ms=(10.0, 500.0), compile_s=20.0))
    fast, slow = found["decode"]
    assert (fast["batches"], slow["batches"]) == ([1], [1, 2, 3])
    assert policy_of(slow, "one padded")["padded_over_true"] == pytest.approx(
        4 * slow["steps"] / (slow["mean_batch"] * slow["steps"])
    )
    assert policy_of(slow, "static, no limit")["stalled_s"] == 20.0 * slow["distinct"]
    words = forecast_text(found)
    assert "decode with 4 slots, if a prefill takes no time and a step the same whatever its batch" in words
    assert "500 ms a step: " in words


def test_a_server_too_slow_for_the_trace_is_said_to_be(trace: Trace) -> None:
    assert "too slow for the trace" in forecast_text(forecast(trace, Forecast(slots=1, step_ms=(3000.0,))))
    assert "too slow" not in forecast_text(forecast(trace, Forecast(slots=4, step_ms=(10.0,))))


def test_answers_of_one_token_decode_nothing(tmp_path: Path) -> None:
    path = tmp_path / "single.csv"
    path.write_text("time_s,input_tokens,output_tokens\n0,10,1\n1,12,1\n")
    found = forecast(read_trace(path), Forecast())
    assert [case["steps"] for case in found["decode"]] == [0, 0, 0]
    assert "nothing decodes" in forecast_text(found)


def test_the_first_shapes_are_found_in_their_order() -> None:
    columns = (np.array([0]), np.array([5]), np.array([4]))
    steps = decode_steps(*columns, slots=1, step_s=1.0)
    assert steps.context.tolist() == [6, 7, 8]
