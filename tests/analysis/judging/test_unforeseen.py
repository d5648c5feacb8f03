"""Steps that ran eagerly, requests that were refused, and arms that ran no compiled code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from analysis.judging.checks.compiled import check_compiled_code
from analysis.judging.judgement import Judgement, judge
from analysis.judging.unforeseen import eager_gate
from analysis.records.run_records import read_run
from analysis.run.compiled import CompiledSteps, most_eager
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


@pytest.mark.parametrize(("eager_steps", "limit", "verdict"), [(1, 10, "PASS"), (3, 10, "FAIL"), (1, 0, "FAIL")])
def test_steps_that_ran_eagerly_are_held_to_their_limit(
    eager_steps: int, limit: float, verdict: str, tmp_path: Path
) -> None:
    gates = gates_of(judged(tmp_path, arm(eager_steps=eager_steps), max_eager_steps_pct=limit))
    seen = {1: "1 of 10 decode steps ran eagerly (10 %)", 3: "2 of 10 decode steps ran eagerly (20 %)"}[eager_steps]
    reason = f"{seen}, limit {limit} %."
    assert gates == {"eager steps": (verdict, reason)}


def test_a_guarded_and_a_strict_arm_are_gated_where_nothing_came_of_it_too(tmp_path: Path) -> None:
    assert gates_of(judged(tmp_path / "guarded", arm(guarded=True))) == {
        "eager steps": ("PASS", "0 of 10 decode steps ran eagerly (0 %), limit 1 %.")
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


def test_an_arm_whose_every_prefill_ran_eagerly_is_known_by_its_prefills() -> None:
    counts = [
        CompiledSteps(trial=1, replica="a-0", kind="decode", compiled=12_800, steps=12_800),
        CompiledSteps(trial=1, replica="a-0", kind="prefill", compiled=0, steps=100),
    ]
    gate = eager_gate("a", most_eager(counts), 1.0)
    assert (gate.verdict, gate.value) == ("FAIL", 100.0)
    assert gate.reason == "100 of 100 prefill steps ran eagerly (100 %), limit 1 %."
    check = check_compiled_code("a", counts, control=False)
    assert (check.ok, check.reason) == (False, "a asks for compiling, and no prefill step ran compiled code.")


def test_without_steps_nothing_is_known_of_them() -> None:
    assert eager_gate("a", most_eager([]), 1.0).verdict == "INCONCLUSIVE"


def with_steps_lost(folder: Path, lost: Callable[[dict[str, Any]], bool], arm: FakeArm) -> Judgement:
    """The judgement where each replica counted 20 steps, and those that `lost` names are not recorded."""
    run = FakeRun(duration_s=120, rate=2, arms=(EAGER, arm), gates={"draws": 99})
    written = write_run(folder / "run", run)
    path = written / "trial-01" / "trial.json"
    facts = json.loads(path.read_text())
    counters = {"eager-0": {"compile_events": 0, "steps": 20}, "compiled-0": {"compile_events": 1, "steps": 20}}
    facts["final"] = {replica: {"counters": counts} for replica, counts in counters.items()}
    path.write_text(json.dumps(facts))
    records = read_run(written)
    kept = [not lost(row) for row in records.steps.to_pylist()]
    return judge(Run.of(replace(records, steps=records.steps.filter(pa.array(kept)))))


def test_lost_steps_leave_open_how_many_ran_eagerly(tmp_path: Path) -> None:
    judgement = with_steps_lost(
        tmp_path, lambda row: row["arm"] == "compiled" and not row["compiled"], arm(guarded=True, eager_steps=10)
    )
    gates = {gate.gate: gate for gate in judgement.gates}
    assert (gates["eager steps"].verdict, gates["eager steps"].blocked_by) == ("INCONCLUSIVE", ("step counts",))
    assert gates["recompiles"].verdict == "PASS", "compile events were counted apart"


def test_an_arm_of_which_no_step_is_left_is_not_known_to_run_compiled_code(tmp_path: Path) -> None:
    judgement = with_steps_lost(tmp_path, lambda row: row["arm"] == "compiled", arm())
    verdicts = {gate.gate: gate.verdict for gate in judgement.gates}
    assert verdicts["recompiles"] == "INCONCLUSIVE"
    assert "PASS" not in {gate.verdict for gate in judgement.gates if gate.kind in ("noninferiority", "recompile")}


def test_an_encoder_that_ran_no_compiled_code_is_found_as_well(tmp_path: Path) -> None:
    embedding = FakeRun(
        duration_s=120, rate=2, arms=(EAGER, arm(eager_steps=20)), gates={"draws": 99}, step_kinds=("encode",)
    )
    checks = judge(Run.of(read_run(write_run(tmp_path / "run", embedding)))).checks
    (check,) = [check for check in checks if check.check == "compiled code"]
    assert not check.ok


def test_one_replica_without_compiled_code_is_enough() -> None:
    counts = [
        CompiledSteps(trial=1, replica="a-0", kind="decode", compiled=30, steps=30),
        CompiledSteps(trial=1, replica="a-1", kind="decode", compiled=0, steps=30),
    ]
    check = check_compiled_code("a", counts, control=True)
    assert (check.ok, check.arm, check.value) == (False, None, 1.0)
    assert "of a-1 in trial 1" in check.reason
