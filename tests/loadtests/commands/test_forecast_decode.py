"""What `tailgate forecast` foretells of decode steps is what `tailgate inspect` finds when it runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.statistics.decoding import DecodeSteps, decode_steps
from loadtests.commands.forecast import forecast_text
from loadtests.commands.trace_forecast import Forecast, automatic_compiles, forecast
from loadtests.traffic.traces import Trace, read_trace
from servers.config import ArmConfig, CompileConfig, EngineConfig, ShapeConfig
from servers.inspect.inspection import Inspection, inspect_arm
from servers.inspect.listed_shapes import parse_shapes
from tests.servers.compiler.reset import reset_compiler

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)
WARM = (1, 6)  # what a minimal warm-up decodes: one row after a prompt of five tokens
STEP_S = 0.5
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


def steps_of(trace: Trace) -> DecodeSteps:
    columns = (trace.offset_ns, trace.input_tokens, trace.output_tokens)
    return decode_steps(*columns, slots=ENGINE.slots, step_s=STEP_S)


def new_shapes(trace: Trace) -> list[tuple[int, int]]:
    """(rows, positions) of the decode steps, as they come for the first time."""
    steps = steps_of(trace)
    return list(dict.fromkeys(zip(steps.batch.tolist(), steps.context.tolist(), strict=True)))


def inspected(arm: ArmConfig, shapes: list[tuple[int, int]]) -> Inspection:
    reset_compiler()
    listed = parse_shapes(", ".join(f"decode {rows}@{positions}" for rows, positions in shapes), arm)
    return inspect_arm(arm, listed, report=lambda line: None)


def compiled_after_warmup(shapes: list[tuple[int, int]]) -> list[int]:
    return [at - 1 for at in automatic_compiles(*zip(WARM, *shapes, strict=True)) if at > 0]


def outcomes(inspection: Inspection, *wanted: str) -> list[tuple[int, int]]:
    return [(visit.shape.batch, visit.shape.context) for visit in inspection.visits if visit.outcome in wanted]


def test_the_default_recompiles_at_the_steps_that_are_foretold(trace: Trace) -> None:
    shapes = new_shapes(trace)
    policy = CompileConfig(enabled=True, backend="eager", warmup="minimal")
    found = inspected(ArmConfig(name="naive", compile=policy, engine=ENGINE), shapes)
    foretold = [shapes[at] for at in compiled_after_warmup(shapes)]
    assert outcomes(found, "recompile", "compile") == foretold
    assert len(foretold) == 2  # for positions, then for rows


@pytest.mark.slow
def test_static_shapes_recompile_until_the_limit_that_is_foretold(trace: Trace) -> None:
    shapes = new_shapes(trace)
    policy = CompileConfig(enabled=True, backend="eager", dynamic=False, warmup="minimal", recompile_limit=6)
    found = inspected(ArmConfig(name="static", compile=policy, engine=ENGINE), shapes)
    (case,) = forecast(trace, Forecast(slots=ENGINE.slots, step_ms=(STEP_S * 1e3,), recompile_limit=6))["decode"]
    static = policy_of(case, "static, each shape")
    # the warm-up's own graph is one of the six
    assert outcomes(found, "recompile") == shapes[: static["compiles_while_serving"] - 1]
    assert outcomes(found, "limit") == shapes[static["compiles_while_serving"] - 1 :]
    assert case["distinct"] == len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pad", "buckets"])
def test_ladders_that_are_warmed_never_recompile_as_foretold(kind: Any, trace: Trace) -> None:
    policy = CompileConfig(enabled=True, backend="eager", dynamic=False)
    arm = ArmConfig(name=kind, shapes=ShapeConfig(kind=kind), compile=policy, engine=ENGINE)
    found = inspected(arm, new_shapes(trace))
    (case,) = forecast(trace, Forecast(slots=ENGINE.slots, step_ms=(STEP_S * 1e3,)))["decode"]
    foretold = policy_of(case, "one padded" if kind == "pad" else "buckets")
    assert len(found.unready) == foretold["compiles_while_serving"] == 0
    decoded = [graph for graph in found.graphs if (graph.shape or "").startswith("decode")]
    assert len(decoded) == foretold["graphs_before_serving"]


@pytest.mark.slow
def test_a_marked_dynamic_arm_never_recompiles_as_foretold(trace: Trace) -> None:
    preset = ArmConfig.from_preset("compiled-dynamic", engine=ENGINE)
    found = inspected(replace(preset, compile=replace(preset.compile, backend="eager")), new_shapes(trace))
    (case,) = forecast(trace, Forecast(slots=ENGINE.slots, step_ms=(STEP_S * 1e3,)))["decode"]
    assert len(found.unready) == policy_of(case, "dynamic, marked")["compiles_while_serving"] == 0


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
