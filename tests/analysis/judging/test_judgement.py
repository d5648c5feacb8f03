"""The judgement on whole runs: verdicts, parity and goodput."""

import json
import shutil
from dataclasses import replace

import pytest

from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.records.tables import read_table
from tests.fakes.machines import tell
from tests.fakes.request_rows import append_rows, change_rows
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, run_in, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 9000}
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)


def judged(directory):
    return judge(run_in(directory))


def judgement_of(path, run):
    return judged(write_run(path / "run", run))


def gate(judgement, name, arm="compiled"):
    return next(item for item in judgement.gates if (item.arm, item.gate) == (arm, name))


def failed_checks(judgement):
    return {check.check for check in judgement.checks if not check.ok}


def against(arm, **run):
    return FakeRun(**{"arms": (EAGER, arm), **run})


SLOWER = FakeArm(name="compiled", ratio=1.2)


@pytest.mark.parametrize(
    ("run", "verdicts"),
    [
        (against(FakeArm(name="compiled", ratio=1.4)), {"noninferiority p99_e2e": "FAIL"}),
        (
            against(SLOWER, gates={"margins": {"e2e": 0.5}}),
            {"noninferiority p99_e2e": "PASS", "noninferiority p99_ttft": "FAIL"},
        ),
    ],
    ids=["slower", "a margin a metric"],
)
def test_a_gate_is_decided_by_what_the_run_shows(tmp_path, run, verdicts):
    judgement = judgement_of(tmp_path, run)
    assert {name: gate(judgement, name).verdict for name in verdicts} == verdicts
    assert (judgement.overall == "FAIL") is ("FAIL" in verdicts.values())


class TestVerdicts:
    def test_a_short_run_is_inconclusive_and_has_the_length_that_would_do(self, tmp_path):
        judgement = judgement_of(tmp_path, replace(SHORT, slo=SLO))
        assert judgement.overall == "INCONCLUSIVE"
        assert "blocks" in failed_checks(judgement)
        assert judgement.advice.needed_s >= 18 * 30
        assert {item.arm for item in judgement.gates} == {"compiled"}, "the control is measured and not judged"
        assert {item.metric for item in judgement.compared.secondary} >= {"ttft", "e2e", "itl"}

    def test_a_recompiling_arm_fails_in_a_short_run(self, tmp_path):
        judgement = judgement_of(tmp_path, replace(SHORT, arms=(EAGER, FakeArm(name="padded"), NAIVE), slo=SLO))
        assert gate(judgement, "recompiles", "padded").verdict == "PASS"
        assert "6 recompiles" in gate(judgement, "recompiles", "naive").reason
        assert judgement.verdicts == {"padded": "INCONCLUSIVE", "naive": "FAIL"}
        assert judgement.overall == "FAIL"

    def test_stalls_weigh_on_all_traffic_and_not_on_steady(self, tmp_path):
        judgement = judgement_of(tmp_path, against(NAIVE))
        assert gate(judgement, "noninferiority p99_e2e", "naive").verdict == "PASS"
        assert gate(judgement, "longest compile stall", "naive").verdict == "FAIL"

    @pytest.mark.parametrize(("run", "units"), [(FakeRun(), 8), (FakeRun(trials=6, duration_s=150), 6)])
    def test_the_unit_is_a_group_of_blocks_and_from_six_on_the_trial(self, tmp_path, run, units):
        judgement = judgement_of(tmp_path, run)
        assert {item.groups for item in judgement.compared.gated} == {units}
        assert failed_checks(judgement) == set()

    def test_arms_that_take_turns_meet_in_blocks_with_a_turn_of_each(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(design="switchback", duration_s=1440, drift=0.05))
        first = judgement.compared.gated[0]
        assert (first.lasting, first.blocks) == (None, 23)  # the cold start takes the first block
        assert first.low < 1.0 < first.high
        assert "blocks" not in failed_checks(judgement)

    def test_a_trial_without_a_folder_leaves_nothing_that_passes(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun(trials=2))
        shutil.rmtree(directory / "trial-02")
        judgement = judged(directory)
        assert (judgement.overall, failed_checks(judgement)) == ("INCONCLUSIVE", {"complete"})

    def test_a_dead_treatment_fails(self, tmp_path):
        death = {"arm": "compiled", "replica": "compiled-0", "at_ns": 1, "exit_code": -9}
        judgement = judged(tell(write_run(tmp_path / "run", FakeRun()), deaths=[death]))
        assert judgement.overall == gate(judgement, "deaths").verdict == "FAIL"

    def test_a_run_with_one_arm_has_no_verdict(self, tmp_path):
        assert judgement_of(tmp_path, FakeRun(arms=(EAGER,), duration_s=60)).overall == "INCONCLUSIVE"

    def test_a_treatment_that_only_fails_does_not_pass(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun(duration_s=300))
        change_rows(
            directory / "trial-01" / "requests-0.arrow",
            lambda rows: [row | ({"status": "UNAVAILABLE"} if row["arm"] == "compiled" else {}) for row in rows],
        )
        judgement = judged(directory)
        assert (judgement.overall, gate(judgement, "errors").value) == ("FAIL", 100.0)

    def test_events_that_were_sent_twice_count_once(self, tmp_path):
        directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, NAIVE)))
        path = directory / "trial-01" / "compile_events.arrow"
        append_rows(path, COMPILE_EVENTS, read_table(path, COMPILE_EVENTS)[0].to_pylist())
        assert gate(judged(directory), "recompiles", "naive").value == 6


INT8 = {"model": {"id": "random:tiny", "dtype": "float32", "quantisation": "int8-weight-only"}}
QUANTISED = {"arms": (EAGER, FakeArm(name="compiled", config=INT8))}
MEASURED = {verdict: {"name": "compiled", "verdict": verdict, "reasons": []} for verdict in ("PASS", "FAIL")}


def answering(same, dtype="float32", error=None):
    row = {"arm": "compiled", "replica": "compiled-0", "error": error, "same": same, "of": 2}
    return {"dtype": dtype, "replicas": [row]}


OTHER = answering(1)
GONE = answering(0, dtype="bfloat16", error="UNAVAILABLE: gone")


@pytest.mark.parametrize(
    ("run", "answers", "measured", "verdict", "words"),
    [
        ({}, None, None, None, ()),
        ({}, OTHER, None, "FAIL", ("1 of 2", "float32")),
        ({}, answering(0, "bfloat16"), None, None, ()),
        ({}, GONE, None, "INCONCLUSIVE", ("compiled-0", "UNAVAILABLE: gone")),
        ({}, None, MEASURED["FAIL"], "FAIL", ()),
        ({}, OTHER, MEASURED["PASS"], "FAIL", ()),
        (QUANTISED, OTHER, None, "INCONCLUSIVE", ("int8-weight-only", "not measured")),
        (QUANTISED | {"compare_models": True}, None, None, None, ()),
        ({"parity": {"full": True}}, None, None, "INCONCLUSIVE", ("not measured",)),
    ],
)
def test_parity_is_decided_by_answers_and_by_what_was_measured(tmp_path, run, answers, measured, verdict, words):
    directory = write_run(tmp_path / "run", replace(SHORT, duration_s=60, **run))
    if answers is not None:
        tell(directory, answers=answers)
    if measured is not None:
        (directory / "parity.json").write_text(json.dumps({"verdict": measured["verdict"], "arms": [measured]}))
    judgement = judged(directory)
    found = {item.gate: item for item in judgement.gates}.get("parity")
    assert (found and found.verdict) == verdict
    assert [word for word in words if word not in found.reason] == []
    if "arms" in run:
        assert next(item for item in judgement.checks if item.check == "comparable").ok
