import json
import shutil
from dataclasses import replace

import pytest

from analysis.judging.judgement import judge
from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.run import Run
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)
QUICK = {"draws": 99}
PASSING = FakeRun(slo=SLO, gates=QUICK)


def judged(directory):
    return judge(Run.of(read_run(directory)))


def judgement_of(path, run):
    return judged(write_run(path / "run", run))


def gate(judgement, name, arm="compiled"):
    return next(item for item in judgement.gates if (item.arm, item.gate) == (arm, name))


def failed_checks(judgement):
    return {check.check for check in judgement.checks if not check.ok}


def rewrite_info(directory, change):
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))
    return directory


class TestVerdicts:
    def test_equal_arms_pass(self, tmp_path):
        judgement = judgement_of(tmp_path, PASSING)
        assert (judgement.overall, judgement.verdicts) == ("PASS", {"compiled": "PASS"})
        assert failed_checks(judgement) == set()
        assert judgement.headline.startswith("compiled may replace eager")

    def test_a_slower_arm_fails(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.4)), gates=QUICK))
        assert judgement.overall == "FAIL"
        assert gate(judgement, "noninferiority p99_e2e").verdict == "FAIL"

    def test_a_short_run_is_inconclusive_and_says_how_long_would_do(self, tmp_path):
        judgement = judgement_of(tmp_path, SHORT)
        assert judgement.overall == "INCONCLUSIVE"
        assert "blocks" in failed_checks(judgement)
        assert judgement.advice.needed_s >= 18 * 30
        assert "minutes" in judgement.advice.text

    def test_a_recompiling_arm_fails_in_a_short_run(self, tmp_path):
        judgement = judgement_of(tmp_path, replace(SHORT, arms=(EAGER, FakeArm(name="padded"), NAIVE), slo=SLO))
        assert judgement.overall == "FAIL"
        first = gate(judgement, "recompiles", "naive")
        assert first.verdict == "FAIL"
        assert first.reason.startswith("6 recompiles while serving, longest 8.0 s, limit 0; ")
        assert first.reason in judgement.headline + "."
        assert gate(judgement, "recompiles", "padded").verdict == "PASS"
        assert judgement.verdicts == {"padded": "INCONCLUSIVE", "naive": "FAIL"}

    def test_stalls_weigh_on_all_traffic_and_not_on_steady(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, NAIVE), gates=QUICK))
        assert gate(judgement, "noninferiority p99_e2e", "naive").verdict == "PASS"
        asked = ("ttft", 0.99, "all")
        everything = [item for item in judgement.beside if (item.metric, item.quantile, item.phase) == asked]
        assert everything[0].ratio > 10

    def test_a_split_is_judged_without_pairs(self, tmp_path):
        arms = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=1))
        judgement = judgement_of(tmp_path, FakeRun(design="split", arms=arms, rate=8))
        assert judgement.steady[0].method == "unpaired typical block"
        assert "sample ratio" in {check.check for check in judgement.checks}
        assert failed_checks(judgement) == set()

    def test_arms_that_take_turns_meet_in_blocks_that_hold_a_turn_of_each(self, tmp_path):
        first = judgement_of(tmp_path, FakeRun(design="switchback", duration_s=1440, drift=0.05)).steady[0]
        assert first.method == "unpaired typical block"
        assert first.blocks == 23  # the cold start takes the first turn and so its block
        assert first.low < 1.0 < first.high

    def test_a_switchback_of_twenty_minutes_has_the_blocks_it_needs(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(design="switchback", duration_s=1200, rate=8))
        assert judgement.steady[0].blocks == 19
        assert "blocks" not in failed_checks(judgement)

    def test_the_question_of_the_whole_run_may_be_asked_instead(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(gates=QUICK | {"question": "run"}))
        assert {item.method for item in judgement.steady} == {"paired block label swap"}

    def test_six_trials_are_judged_by_trial(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(trials=6, duration_s=150))
        assert {item.method for item in judgement.steady} == {"t-test over trials"}
        assert judgement.overall == "PASS"

    def test_a_trial_whose_folder_is_gone_leaves_nothing_that_passes(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun(trials=2, gates=QUICK))
        assert judged(directory).overall == "PASS"
        shutil.rmtree(directory / "trial-02")
        judgement = judged(directory)
        assert judgement.overall == "INCONCLUSIVE"
        assert [check.reason for check in judgement.checks if not check.ok] == ["Trial 2 is missing."]

    def test_a_dead_treatment_fails(self, tmp_path):
        def die(info):
            info["deaths"] = [{"arm": "compiled", "replica": "compiled-0", "at_ns": 1, "exit_code": -9}]

        judgement = judged(rewrite_info(write_run(tmp_path / "run", FakeRun(gates=QUICK)), die))
        assert judgement.overall == "FAIL"
        assert "died once" in judgement.headline

    def test_a_treatment_that_fails_requests_fails(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", error_share=0.05))))
        assert gate(judgement, "errors").verdict == "FAIL"
        assert judgement.overall == "FAIL"

    def test_a_run_with_one_arm_has_nothing_to_judge(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER,), duration_s=60))
        assert judgement.overall == "INCONCLUSIVE"
        assert judgement.headline == "There is no arm to judge against eager."

    def test_the_control_is_measured_by_the_slos_and_not_judged(self, tmp_path):
        judgement = judgement_of(tmp_path, replace(SHORT, slo=SLO))
        assert [item.gate for item in judgement.slo["eager"]] == ["slo p99_ttft_ms", "slo p99_e2e_ms"]
        assert {item.arm for item in judgement.gates} == {"compiled"}


def info(**change):
    return lambda directory: rewrite_info(directory, lambda told: told.update(change))


COLD_SLO = {"p95_ttft_ms": 2000, "cold": {"p95_ttft_ms": 5000}}


class TestCold:
    EARLY = FakeArm(name="compiled", compiles=[Compile(at_s=5, seconds=3)])

    def test_the_cold_start_is_judged_by_targets_of_its_own(self, tmp_path):
        run = FakeRun(trials=3, duration_s=300, slo=COLD_SLO, arms=(EAGER, self.EARLY), rate=3, gates=QUICK)
        judgement = judgement_of(tmp_path, run)
        cold = gate(judgement, "cold slo p95_ttft_ms")
        assert (cold.kind, cold.verdict) == ("cold", "PASS")
        assert cold.reason.startswith("0 of ")
        assert "cold requests took longer than 5000 ms" in cold.reason
        assert gate(judgement, "slo p95_ttft_ms").value < cold.value  # of all traffic

    def test_a_slow_cold_start_fails_its_target_alone(self, tmp_path):
        slow = FakeArm(name="compiled", compiles=[Compile(at_s=3, seconds=20)])
        run = FakeRun(
            trials=3, duration_s=300, slo={"cold": {"p90_ttft_ms": 5000}}, arms=(EAGER, slow), rate=3, gates=QUICK
        )
        judgement = judgement_of(tmp_path, run)
        assert gate(judgement, "cold slo p90_ttft_ms").verdict == "FAIL"
        assert gate(judgement, "noninferiority p99_ttft").verdict == "PASS"

    def test_one_cold_start_decides_nothing(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(slo={"cold": {"p99_ttft_ms": 9000}}, gates=QUICK))
        cold = gate(judgement, "cold slo p99_ttft_ms")
        assert (cold.verdict, cold.blocked_by) == ("INCONCLUSIVE", ("cold starts",))
        assert judgement.overall == "INCONCLUSIVE"
        assert "Set trials.count to 3 or more" in judgement.advice.text

    def test_recompiles_of_the_two_are_counted_apart(self, tmp_path):
        naive = FakeArm(name="naive", compiles=[Compile(at_s=at, seconds=1) for at in (4, 12, 60)])
        judgement = judgement_of(tmp_path, replace(SHORT, arms=(EAGER, naive)))
        parts = judgement.facts["naive"]
        assert (parts["cold"].recompiles, parts["steady"].recompiles) == (2, 1)
        assert parts[""].recompiles == 3
        assert parts["cold"].stall_s_per_min == pytest.approx(4.0)  # 2 s of 30
        assert parts["steady"].stall_s_per_min == pytest.approx(1.0)  # 1 s of 60

    def test_the_cold_start_may_have_a_budget_of_its_own(self, tmp_path):
        allowed = {"max_recompiles": 1, "max_stall_s": 9, "max_stall_s_per_min": 9, "max_requests_hit_pct": 90}
        run = replace(SHORT, arms=(EAGER, self.EARLY))
        assert gate(judgement_of(tmp_path / "one", run), "recompiles").verdict == "FAIL"
        apart = judgement_of(tmp_path / "apart", replace(run, gates={"cold": allowed}))
        assert gate(apart, "recompiles").verdict == "PASS"
        assert gate(apart, "recompiles").reason == "0 recompiles past the cold start, limit 0."
        assert gate(apart, "cold recompiles").verdict == "PASS"
        assert gate(apart, "cold longest stall").value > 2.0

    def test_cold_ratios_are_there_and_gate_nothing(self, tmp_path):
        judgement = judgement_of(tmp_path, SHORT)
        assert {item.metric for item in judgement.beside if item.phase == "cold"} == {
            *("ttft", "e2e", "tpot", "itl", "max_itl")
        }
        assert not any("cold" in item.gate for item in judgement.gates)


class TestParity:
    def answering(self, same, departs=None, dtype="float32", error=None):
        row = {"arm": "compiled", "replica": "compiled-0", "error": error, "same": same, "of": 2, "departs": departs}
        return info(answers={"dtype": dtype, "prompts": [4, 9], "replicas": [row]})

    def parity_of(self, path, *changes, measured=None, **run):
        directory = write_run(path / "run", replace(SHORT, **run))
        for change in changes:
            change(directory)
        if measured is not None:
            (directory / "parity.json").write_text(json.dumps({"verdict": measured["verdict"], "arms": [measured]}))
        return {item.gate: item for item in judged(directory).gates}.get("parity")

    def test_nobody_asked_and_nothing_was_measured(self, tmp_path):
        assert self.parity_of(tmp_path) is None

    def test_equal_answers_in_float32_pass(self, tmp_path):
        found = self.parity_of(tmp_path, self.answering(2))
        assert (found.verdict, found.value, found.limit) == ("PASS", 0.0, 0.0)

    def test_another_answer_in_float32_fails_the_arm(self, tmp_path):
        found = self.parity_of(tmp_path, self.answering(1, [1, 2]))
        assert (found.verdict, found.value) == ("FAIL", 1.0)
        assert "first other at token 3 after a prompt of 9 tokens: in float32 they must be equal." in found.reason

    def test_answers_in_lower_precision_alone_judge_nothing(self, tmp_path):
        assert self.parity_of(tmp_path, self.answering(0, [0, 0], "bfloat16")) is None

    def test_a_replica_that_did_not_answer_leaves_it_open(self, tmp_path):
        found = self.parity_of(tmp_path, self.answering(0, dtype="bfloat16", error="UNAVAILABLE: gone"))
        assert found.verdict == "INCONCLUSIVE"
        assert "compiled-0 did not answer after the traffic: UNAVAILABLE: gone." in found.reason

    @pytest.mark.parametrize("verdict", ["PASS", "FAIL", "INCONCLUSIVE"])
    def test_what_was_measured_before_the_traffic_decides(self, verdict, tmp_path):
        found = self.parity_of(tmp_path, measured={"name": "compiled", "verdict": verdict, "reasons": ["It is so."]})
        assert found.verdict == verdict

    def test_a_pass_before_the_traffic_does_not_outweigh_other_answers_after_it(self, tmp_path):
        measured = {"name": "compiled", "verdict": "PASS", "reasons": []}
        assert self.parity_of(tmp_path, self.answering(1, [1, 2]), measured=measured).verdict == "FAIL"

    def test_quantised_weights_without_a_measured_accuracy_leave_it_open(self, tmp_path):
        arms = [EAGER, FakeArm(name="compiled", config=QUANTISED)]
        found = self.parity_of(tmp_path, self.answering(1, [1, 2]), arms=arms)
        assert found.verdict == "INCONCLUSIVE"
        assert (
            "held as int8-weight-only (control: none), and what that costs in accuracy was not measured" in found.reason
        )
        measured = {"name": "compiled", "verdict": "PASS", "reasons": []}
        assert (
            self.parity_of(tmp_path / "measured", self.answering(1, [1, 2]), measured=measured, arms=arms).verdict
            == "PASS"
        )

    def test_quantised_weights_are_a_treatment_and_no_obstacle(self, tmp_path):
        directory = write_run(
            tmp_path / "run", replace(SHORT, arms=[EAGER, FakeArm(name="compiled", config=QUANTISED)])
        )
        check = next(item for item in judged(directory).checks if item.check == "comparable")
        assert check.ok
        assert "in its policy and its weights, held as int8-weight-only (control: none), alone." in check.reason

    def test_whole_servers_are_not_asked_for_the_accuracy_of_their_weights(self, tmp_path):
        arms = [EAGER, FakeArm(name="compiled", config=QUANTISED)]
        assert self.parity_of(tmp_path, arms=arms, compare_models=True) is None

    def test_parity_that_was_asked_for_and_not_measured_stays_open(self, tmp_path):
        found = self.parity_of(tmp_path, parity={"full": True})
        assert found.verdict == "INCONCLUSIVE"
        assert "it was not measured" in found.reason


QUANTISED = {"model": {"id": "random:tiny", "dtype": "float32", "quantisation": "int8-weight-only"}}
ASKED = {"min_goodput_ratio": 0.95, **QUICK}


class TestGoodput:
    def test_an_arm_that_makes_as_much_of_the_load_passes(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(slo=SLO, gates=ASKED))
        found = gate(judgement, "goodput ratio")
        assert (found.kind, found.verdict, found.value) == ("goodput", "PASS", 1.0)

    def test_stalls_that_cost_goodput_fail(self, tmp_path):
        stalls = FakeArm(name="compiled", compiles=[Compile(at_s=40 + 60 * step, seconds=20) for step in range(12)])
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, stalls), slo=SLO, gates=ASKED))
        found = gate(judgement, "goodput ratio")
        assert found.verdict == "FAIL"
        assert "times that of eager (between 0." in found.reason

    def test_without_being_asked_for_it_gates_nothing(self, tmp_path):
        judgement = judgement_of(tmp_path, replace(SHORT, slo=SLO))
        assert "goodput ratio" not in {item.gate for item in judgement.gates}
        assert {item.rate for item in judgement.rates} == {"goodput", "requests", "output tokens"}

    def test_a_short_run_leaves_it_open(self, tmp_path):
        found = gate(judgement_of(tmp_path, replace(SHORT, slo=SLO, gates=ASKED)), "goodput ratio")
        assert found.verdict == "INCONCLUSIVE"
        assert found.blocked_by == ("run length",)


def test_each_metric_is_held_to_its_own_margin(tmp_path):
    slower = FakeArm(name="compiled", ratio=1.2)
    gates = {**QUICK, "margins": {"e2e": 0.5}}
    judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, slower), gates=gates))
    assert gate(judgement, "noninferiority p99_e2e").verdict == "PASS"
    assert gate(judgement, "noninferiority p99_ttft").verdict == "FAIL"


def test_an_itl_target_is_judged_over_gaps(tmp_path):
    judgement = judgement_of(tmp_path, FakeRun(slo={"targets": ["p50_itl_ms < 40"]}, gates=QUICK))
    found = gate(judgement, "slo p50_itl_ms")
    assert found.verdict == "PASS"
    assert "token gaps took 40 ms or longer; p50 ITL below 40 ms allows 50 %" in found.reason


def test_events_that_were_sent_twice_count_once(tmp_path):
    directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, NAIVE)))
    path = directory / "trial-01" / "compile_events.arrow"
    events = read_table(path, COMPILE_EVENTS)[0].to_pylist()
    with RecordWriter(path, COMPILE_EVENTS) as writer:
        for row in events:
            writer.append(row)
    assert gate(judged(directory), "recompiles", "naive").value == 6


def test_a_treatment_that_only_fails_does_not_pass(tmp_path):
    directory = write_run(tmp_path / "run", FakeRun(gates=QUICK))
    gone = {"status": "UNAVAILABLE"}
    path = directory / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row | (gone if row["arm"] == "compiled" else {}))
    judgement = judged(directory)
    assert judgement.overall == "FAIL"
    assert "100 %" in gate(judgement, "errors").reason


def test_another_seed_changes_draws_and_not_the_facts(tmp_path):
    records = read_run(write_run(tmp_path / "run", FakeRun(gates=QUICK)))
    first, second = judge(Run.of(records, 1)), judge(Run.of(records, 2))
    drawn = [[item.low for item in found.beside if item.phase == "all"] for found in (first, second)]
    assert drawn[0] != drawn[1]
    assert [item.ratio for item in first.steady] == [item.ratio for item in second.steady]
    assert (first.facts, first.slo) == (second.facts, second.slo)
    assert judge(Run.of(records, 1)) == first
