from __future__ import annotations

from analysis.statistics.decoding import DecodeSteps, decode_steps
from loadtests.commands.trace_forecast import Forecast, forecast
from loadtests.traffic.traces import Trace
from servers.config import ArmConfig, CompileConfig, EngineConfig
from servers.inspect.inspection import Inspection, inspect_arm
from servers.inspect.listed_shapes import parse_shapes
from tests.loadtests.commands.test_forecast_decode import compiled_after_warmup, policy_of, trace
from tests.servers.compiler.test_recorder import reset_compiler

__all__ = ["trace"]

ENGINE = EngineConfig(slots=4, max_prompt_tokens=40, max_new_tokens=12)


STEP_S = 0.5


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
