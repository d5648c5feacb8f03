"""Incidents that others had with compiled servers: planted in a small arm, and judged by what the arm's engine records.

A stall that no compiler reports is planted in tests/analysis/checks/test_telemetry.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tailgate.analysis.summary.summary import analyze
from tailgate.servers.compiler.jit import jit_compile
from tailgate.servers.compiler.recorder import CompileRecorder
from tailgate.servers.config import ArmConfig, ShapeConfig
from tailgate.servers.engine import steps
from tailgate.servers.engine.in_process import ask, requests_of
from tailgate.servers.engine.runner import ModelRunner
from tests.analysis.checks.test_telemetry import QUIET
from tests.fakes.runs import EAGER, Compile, FakeArm, write_run
from tests.servers.engine.test_runner import ENGINE, compiling, recorder, runner_for

__all__ = ["recorder"]

PADDED = ArmConfig(engine=ENGINE, compile=compiling(), shapes=ShapeConfig(kind="pad"))
BUCKETS = PADDED.replace(shapes=ShapeConfig(kind="buckets", length_ladder=(16, 44)))
COLD_BUCKETS = BUCKETS.replace(compile=compiling(warmup="minimal"))
EXACT = PADDED.replace(shapes=ShapeConfig(), compile=compiling(warmup="minimal", recompile_limit=1))


def warm_up_in_inference_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelRunner, "warm_up", torch.inference_mode()(ModelRunner.warm_up))


def number_each_step(patch: pytest.MonkeyPatch) -> None:
    """Have the model read a number that is another one in each step."""
    call, launch = steps._ModelStep.call, ModelRunner.launch

    def scaled(step: Any, *inputs: torch.Tensor) -> Any:
        logits, newest = call(step, *inputs)
        return logits * step.turn, newest

    def launch_next(runner: ModelRunner, *step: Any) -> Any:
        steps._ModelStep.turn += 1  # type: ignore[attr-defined]
        return launch(runner, *step)

    patch.setattr(steps._ModelStep, "turn", 1, raising=False)
    patch.setattr(steps._ModelStep, "call", scaled)
    patch.setattr(ModelRunner, "launch", launch_next)


def compile_kernels(patch: pytest.MonkeyPatch) -> None:
    """Have another compiler make a kernel for each number of requests in a step. The warm-up meets 2 and 4."""
    run, made = ModelRunner.run, set[int]()

    def run_kernel(runner: ModelRunner, step: Any, shape: Any) -> Any:
        if (count := len(step.jobs)) not in made:
            with jit_compile("attention", variant=f"SPLITS={count}"):
                made.add(count)
        return run(runner, step, shape)

    patch.setattr(ModelRunner, "run", run_kernel)


# The arm, what is planted, the lengths of prompts batch by batch, the gates that fail, and the reason of an event.
INCIDENTS: dict[str, tuple[ArmConfig, Any, list[list[int]], list[str], str]] = {
    "a new batch past the limit": (
        EXACT,
        None,
        [[5], [5, 5, 5]],
        ["recompiles", "eager steps"],
        "expected 1, actual 3",
    ),
    "a chat template into a warm bucket": (BUCKETS, None, [[9], [18]], [], ""),
    "a chat template into a cold bucket": (COLD_BUCKETS, None, [[9], [18]], ["recompiles"], "expected 16, actual 44"),
    "no_grad after inference_mode": (PADDED, warm_up_in_inference_mode, [[9]], ["recompiles"], "dispatch key set"),
    "a guard on a Python number": (PADDED, number_each_step, [[9]], ["recompiles"], "['turn'] == 1"),
    "a kernel of another compiler": (PADDED, compile_kernels, [[9]], ["recompiles"], "attention for SPLITS=1"),
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_incident_fails_the_run_for_its_cause_or_the_arm_holds(
    name: str, recorder: CompileRecorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arm, plant, batches, gates, cause = INCIDENTS[name]
    if plant is not None:
        plant(monkeypatch)
    runner = runner_for(arm, recorder)
    recorder.drain()
    answers = [ask(runner, requests_of([[7] * size for size in sizes], [2] * len(sizes))) for sizes in batches]
    events = [event for answer in answers for event in answer.events]
    compiled = [output.step.compiled for answer in answers for output in answer.outputs if output.step]
    stalls = [
        Compile(at_s=20 + 40 * number, seconds=0.4, kind=event.kind, shape=event.shape, reason=event.reason)
        for number, event in enumerate(events)
    ]
    fake = FakeArm(name="compiled", compiles=stalls, eager_steps=20 * compiled.count(False) // len(compiled))
    summary = analyze(write_run(tmp_path / "run", replace(QUIET, arms=(EAGER, fake))))
    assert [row["gate"] for row in summary["gates"] if row["verdict"] == "FAIL"] == gates
    assert summary["overall"] == ("FAIL" if gates else "PASS")
    assert any(cause in event.reason for event in events) == bool(cause)
