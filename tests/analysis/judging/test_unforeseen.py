"""Steps that ran eagerly, requests that were refused, and arms that ran no compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.judging.checks.compiled import check_compiled_code
from analysis.judging.judgement import Judgement, judge
from analysis.records.run_records import read_run
from analysis.run.compiled import CompiledSteps
from analysis.run.run import Run
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run


def judged(path: Path, *arms: FakeArm, **gates: Any) -> Judgement:
    run = FakeRun(duration_s=120, rate=2, arms=(EAGER, *arms), gates={"draws": 99, **gates})
    return judge(Run.of(read_run(write_run(path / "run", run))))


def gates_of(judgement: Judgement) -> dict[str, tuple[str, str]]:
    return {
        gate.gate: (gate.verdict, gate.reason) for gate in judgement.gates if gate.gate in ("eager steps", "refused")
    }


def arm(**more: Any) -> FakeArm:
    policy = {"enabled": True, **{key: more.pop(key) for key in ("guarded", "strict") if key in more}}
    return FakeArm(name="compiled", config={"compile": policy}, **more)


def test_an_arm_that_ran_compiled_code_alone_has_no_such_gate(tmp_path: Path) -> None:
    judgement = judged(tmp_path, arm())
    assert gates_of(judgement) == {}
    checks = [check for check in judgement.checks if check.check == "compiled code"]
    assert [(check.ok, check.reason) for check in checks] == [(True, "20 of 20 steps of compiled ran compiled code.")]


@pytest.mark.parametrize(("eager_steps", "limit", "verdict"), [(1, 5, "PASS"), (2, 5, "FAIL"), (1, 0, "FAIL")])
def test_steps_that_ran_eagerly_are_held_to_their_limit(
    eager_steps: int, limit: float, verdict: str, tmp_path: Path
) -> None:
    gates = gates_of(judged(tmp_path, arm(eager_steps=eager_steps), max_eager_steps_pct=limit))
    share = {1: "5 %", 2: "10 %"}[eager_steps]
    reason = f"{eager_steps} of 20 steps ran eagerly ({share}), limit {limit} %."
    assert gates == {"eager steps": (verdict, reason)}


def test_a_guarded_and_a_strict_arm_are_gated_where_nothing_came_of_it_too(tmp_path: Path) -> None:
    assert gates_of(judged(tmp_path / "guarded", arm(guarded=True))) == {
        "eager steps": ("PASS", "0 of 20 steps ran eagerly (0 %), limit 1 %.")
    }
    name, (verdict, reason) = next(iter(gates_of(judged(tmp_path / "strict", arm(strict=True))).items()))
    assert (name, verdict) == ("refused", "PASS")
    assert reason.startswith("0 of ")


def test_refused_requests_are_counted_apart_from_other_errors(tmp_path: Path) -> None:
    refusing = arm(error_share=0.1, error_status="FAILED_PRECONDITION")
    verdict, reason = gates_of(judged(tmp_path / "refused", refusing))["refused"]
    assert verdict == "FAIL"
    assert "requests were refused, since no graph fitted their step" in reason
    assert gates_of(judged(tmp_path / "allowed", refusing, max_refused_pct=50))["refused"][0] == "PASS"
    assert gates_of(judged(tmp_path / "failed", arm(error_share=0.1))) == {}


def test_an_arm_that_ran_no_compiled_code_passes_nothing_as_a_compiled_one(tmp_path: Path) -> None:
    judgement = judged(tmp_path, arm(eager_steps=20))
    failed = next(check for check in judgement.checks if check.check == "compiled code")
    assert (failed.ok, failed.arm) == (False, "compiled")
    assert failed.reason == "compiled asks for compiling, and no step ran compiled code of compiled-0 in trial 1."
    kinds = {gate.kind: gate for gate in judgement.gates if gate.verdict == "PASS"}
    assert "recompile" not in kinds, "nothing recompiles where nothing compiles"
    assert "noninferiority" not in kinds


def test_one_replica_without_compiled_code_is_enough() -> None:
    counts = [
        CompiledSteps(trial=1, replica="a-0", compiled=30, steps=30),
        CompiledSteps(trial=1, replica="a-1", compiled=0, steps=30),
    ]
    check = check_compiled_code("a", counts, control=True)
    assert (check.ok, check.arm, check.value) == (False, None, 1.0)
    assert "of a-1 in trial 1" in check.reason
