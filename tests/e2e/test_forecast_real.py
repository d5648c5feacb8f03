from __future__ import annotations

from pathlib import Path

import pytest

from analysis.statistics.decoding import DecodeSteps, decode_steps
from loadtests.commands.trace_forecast import Forecast, forecast
from loadtests.traffic.traces import Trace, read_trace
from servers.config import ArmConfig, CompileConfig, EngineConfig
from servers.inspect.inspection import Inspection, inspect_arm
from servers.inspect.listed_shapes import parse_shapes
from tests.loadtests.commands.test_plan import compiled_after_warmup, policy_of
from tests.servers.compiler.reset import reset_compiler

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)


STEP_S = 0.5
# (seconds, prompt tokens, answer tokens): alone, three at once, alone again, two at once
REQUESTS = [(0.0, 12, 4), (6.0, 20, 6), (6.2, 9, 4), (6.9, 30, 3), (20.0, 7, 3), (30.0, 11, 4), (30.1, 11, 4)]


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


def outcomes(inspection: Inspection, *wanted: str) -> list[tuple[int, int]]:
    return [(visit.shape.batch, visit.shape.context) for visit in inspection.visits if visit.outcome in wanted]


def test_the_default_recompiles_at_the_steps_that_are_foretold(trace: Trace) -> None:
    shapes = new_shapes(trace)
    policy = CompileConfig(enabled=True, backend="eager", warmup="minimal")
    found = inspected(ArmConfig(name="naive", compile=policy, engine=ENGINE), shapes)
    foretold = [shapes[at] for at in compiled_after_warmup(shapes)]
    assert outcomes(found, "recompile", "compile") == foretold
    assert len(foretold) == 2  # for positions, then for rows


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
