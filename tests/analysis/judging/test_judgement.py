"""How figures read in reasons."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.judging.gates import Gate
from analysis.judging.judgement import judge
from analysis.judging.remedies import Evidence, Remedy, remedies
from analysis.judging.validity import ESTIMATES, Check
from analysis.judging.verdict import Advice, advise, combined, headline
from analysis.judging.wording import digits, duration_text, percent
from analysis.records.run_records import read_run
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.run.run import Run
from analysis.run.shape_map import shape_map
from analysis.run.time_parts import TimeParts
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, Startup, write_run

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


def gate_of_verdict(kind="noninferiority", verdict="PASS", arm="compiled", **more):
    return Gate(
        arm=arm, gate=kind, kind=kind, value=1.0, limit=1.1, unit="ratio", verdict=verdict, reason="It is so.", **more
    )


def check(ok=False, affects=ESTIMATES, name="generator lag", **more):
    return Check(check=name, ok=ok, reason="The generator was late.", affects=affects, **more)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["PASS", "PASS"], "PASS"),
        (["PASS", "INCONCLUSIVE"], "INCONCLUSIVE"),
        (["INCONCLUSIVE", "FAIL", "PASS"], "FAIL"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_one_failure_fails_and_only_passes_pass(verdicts, expected):
    assert combined(verdicts) == expected


class TestWords:
    def test_headline_names_the_failing_arm_and_why(self):
        gates = [gate_of_verdict(), gate_of_verdict("recompile", "FAIL")]
        text = headline({"compiled": "FAIL"}, gates, [], "eager")
        assert text == "compiled must not replace eager: It is so."

    def test_headline_leaves_what_a_failure_allows_for_to_its_gate(self):
        wrong = replace(gate_of_verdict("recompile", "FAIL"), reason="It is so. It may move.", allowance="It may move.")
        assert headline({"compiled": "FAIL"}, [wrong], [], "eager") == "compiled must not replace eager: It is so."

    @pytest.mark.parametrize(("lasting", "bound"), [(None, "0.90"), ((0.4, 0.95), "0.95")])
    def test_headline_of_a_pass_gives_what_latency_surely_does_not_exceed(self, lasting, bound):
        gates = [
            gate_of_verdict(low=0.5, high=0.9, lasting=lasting),
            gate_of_verdict(low=0.1, high=0.3),
            gate_of_verdict("recompile"),
        ]
        text = headline({"compiled": "PASS"}, gates, [], "eager")
        surely = f"latency at most {bound} times eager's, error bars included"
        assert text == f"compiled may replace eager: every gate passed ({surely})."

    def test_headline_prefers_a_fault_to_a_short_run(self):
        gates = [gate_of_verdict(verdict="INCONCLUSIVE", blocked_by=("blocks", "generator lag"))]
        short = Check(check="blocks", ok=False, reason="Too short.", affects=ESTIMATES)
        text = headline({"compiled": "INCONCLUSIVE"}, gates, [short, check()], "eager")
        assert text == "This run cannot decide whether compiled may replace eager. The generator was late."

    def test_what_leaves_several_arms_open_is_said_once(self):
        arms = dict.fromkeys(("a", "b", "c", "d"), "INCONCLUSIVE") | {"naive": "FAIL", "fine": "PASS"}
        gates = [
            replace(gate_of_verdict(arm=name, verdict="INCONCLUSIVE"), reason=f"Open {name == 'b'}.") for name in "abcd"
        ]
        gates += [gate_of_verdict("recompile", "FAIL", arm="naive"), gate_of_verdict("recompile", arm="fine")]
        assert headline(arms, gates, [], "eager") == (
            "naive must not replace eager: It is so. This run cannot decide whether a, b, c or d may replace eager. "
            "a, c, d: Open False. b: Open True. fine may replace eager: every gate passed."
        )

    def test_a_reason_that_begins_with_its_arm_stands_alone(self):
        arms = dict.fromkeys(("a", "b"), "INCONCLUSIVE")
        gates = [
            replace(gate_of_verdict(arm=name, verdict="INCONCLUSIVE"), reason=reason)
            for name, reason in zip("ab", ("a is open.", "Open."), strict=True)
        ]
        assert headline(arms, gates, [], "eager").endswith("may replace eager. a is open. b: Open.")

    @pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
    def test_an_overload_is_said_before_everything_else(self, verdict):
        gates = [
            gate_of_verdict(verdict=verdict),
            gate_of_verdict("slo", "INCONCLUSIVE", blocked_by=("blocks", "overload")),
        ]
        checks = [check(name="blocks"), check(name="overload", remedy="Lower the rate.")]
        text = headline({"compiled": verdict}, gates, checks, "eager")
        assert text.startswith("The generator was late. Lower the rate. ")
        assert text.count("Lower the rate") == 1
        assert text.endswith("It is so." if verdict == "FAIL" else "may replace eager. The generator was late.")

    def test_an_overload_of_other_arms_is_not_said_of_one_that_passed(self):
        other = check(name="overload", arm="compiled")
        assert "was late" not in headline({"bucketed": "PASS"}, [gate_of_verdict(arm="bucketed")], [other], "eager")

    def test_no_length_is_advised_for_a_gate_that_an_overload_keeps_open(self):
        gates = [gate_of_verdict(verdict="INCONCLUSIVE", needed_s=600.0, blocked_by=("overload",))]
        advice = advise(gates, [check(name="overload", remedy="Lower the rate.")])
        assert (advice.needed_s, advice.text) == (None, "Lower the rate.")

    def test_no_arm_is_no_pass(self):
        assert headline({}, [], [], "eager") == "There is no arm to judge against eager."

    def test_advice_gives_the_longest_run_that_is_needed(self):
        gates = [
            gate_of_verdict(verdict="INCONCLUSIVE", needed_s=600.0),
            gate_of_verdict("slo", "INCONCLUSIVE", needed_s=1260.0),
        ]
        advice = advise(gates, [])
        assert advice.needed_s == 1260.0
        assert "about 21 minutes" in advice.text

    def test_a_gate_that_would_take_days_does_not_hide_how_soon_the_others_are_decided(self):
        slo = replace(gate_of_verdict("slo", "INCONCLUSIVE", needed_s=283_500.0), gate="slo p99_ttft_ms")
        advice = advise([gate_of_verdict(verdict="INCONCLUSIVE", needed_s=1260.0), slo], [])
        assert advice.needed_s == 283_500.0
        assert "about 21 minutes would decide all other open gates" in advice.text
        assert 'About 78.8 hours would decide "SLO p99 TTFT" of compiled' in advice.text

    def test_of_many_gates_that_take_long_the_soonest_are_named(self):
        gates = [
            gate_of_verdict(arm=f"arm-{hours}", verdict="INCONCLUSIVE", needed_s=hours * 3600.0)
            for hours in (9, 5, 30, 6, 70)
        ]
        text = advise(gates, []).text
        assert [text.count(f"About {hours} hours") for hours in ("5.0", "6.0", "9.0", "30.0")] == [1, 1, 1, 0]
        assert "2 more gates of that sort would take up to 70.0 hours." in text

    def test_advice_knows_what_is_decided_soon_from_what_takes_long(self):
        gates = [gate_of_verdict(verdict="INCONCLUSIVE", needed_s=hours * 3600.0) for hours in (1, 2, 30)]
        advice = advise(gates, [])
        assert (advice.soon_s, advice.needed_s) == (7_200.0, 108_000.0)
        assert advise(gates[2:], []).soon_s == 108_000.0

    def test_advice_calls_a_gate_what_the_report_calls_it(self):
        stuck = replace(gate_of_verdict(verdict="INCONCLUSIVE"), gate="noninferiority p99_9_e2e")
        assert (
            advise([stuck], []).text == 'No run of up to a week would decide "non-inferiority p99.9 E2E" of compiled.'
        )

    @pytest.mark.parametrize(("blocks", "guess"), [(2.0, True), (12.0, False)])
    def test_advice_from_few_blocks_says_that_it_guesses(self, blocks, guess):
        gates = [
            gate_of_verdict(verdict="INCONCLUSIVE", needed_s=hours * 3600.0, blocked_by=("blocks",))
            for hours in (1, 9, 30)
        ]
        short = Check(
            check="blocks", ok=False, reason="Short.", affects=ESTIMATES, arm="compiled", value=blocks, limit=20.0
        )
        text = advise(gates, [short]).text
        assert ("would decide all open gates but 2, if" in text) is guess
        assert ("From 2 blocks that is a guess: 20 of them will tell it better." in text) is guess
        assert (
            "would decide all other open gates, if" in text and "About 30.0 hours would decide" in text
        ) is not guess
        assert advise(gates[1:], [short]).text.startswith("The open gates would take hours, if") is guess

    def test_advice_mends_what_no_length_mends(self):
        gates = [gate_of_verdict(verdict="INCONCLUSIVE", blocked_by=("generator lag",))]
        advice = advise(gates, [check(remedy="Use more workers.")])
        assert advice.needed_s is None
        assert advice.text == "Use more workers."

    def test_advice_does_not_promise_to_clear_a_failure(self):
        gates = [gate_of_verdict("recompile", "FAIL"), gate_of_verdict(verdict="INCONCLUSIVE", needed_s=9000.0)]
        assert advise(gates, []) == Advice(needed_s=None, text="A longer run will not clear compiled.")

    def test_advice_is_for_the_arms_that_have_not_failed(self):
        gates = [gate_of_verdict("recompile", "FAIL"), gate_of_verdict(verdict="INCONCLUSIVE", needed_s=9000.0)]
        other = gate_of_verdict(verdict="INCONCLUSIVE", needed_s=630.0, arm="padded")
        assert advise([*gates, other], []).needed_s == 630.0

    def test_advice_for_a_cold_start_is_more_trials_and_for_parity_no_traffic(self):
        cold = gate_of_verdict("cold", "INCONCLUSIVE")
        assert advise([cold], []).text == 'More trials would decide "cold" of compiled: each starts cold once.'
        assert advise([gate_of_verdict("parity", "INCONCLUSIVE")], []).text.startswith("Run `tailgate parity`")

    def test_other_answers_are_the_first_thing_to_say(self):
        wrong = replace(gate_of_verdict("parity", "FAIL"), reason="Other answers.")
        text = headline({"compiled": "FAIL"}, [gate_of_verdict("recompile", "FAIL"), wrong], [], "eager")
        assert text == "compiled must not replace eager: Other answers."


@pytest.mark.parametrize(
    ("value", "most", "shown"),
    [(119.3, 2, "119"), (99.4, 2, "99"), (99.6, 2, "100"), (4203.4, 3, "4,203"), (0.01234, 3, "0.0123"), (0.0, 3, "0")],
)
def test_large_numbers_are_no_powers_of_ten(value: float, most: int, shown: str) -> None:
    assert digits(value, most) == shown


def test_a_share_of_many_times_is_written_out() -> None:
    assert percent(123.456) == "12,346 %"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1, "1 second"), (90, "90 seconds"), (181, "4 minutes"), (12600, "3.5 hours")]
)
def test_a_length_of_time_is_in_the_unit_a_reader_thinks_in(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown


WARMED = "prefill batch 1 × length 64, context 64"
NEW = "extend batch 2 × length 128, context 256"
POLICY = {"shapes": {"kind": "exact"}, "compile": {"enabled": True, "warmup": "minimal"}}
ARM = FakeArm(name="compiled", config=POLICY, startup=Startup(warmed={WARMED: 2.0}))
GUARD = "1/2: tensor 'last' size mismatch at index 0. expected 1, actual 2\n1/1: another"
SHORT_REMEDIES = FakeRun(duration_s=60.0, rate=5.0)


def failed(name: str, kind: str, verdict: str = "FAIL") -> Gate:
    return Gate(
        arm="compiled", gate=name, kind=kind, value=3.0, limit=0.0, unit="count", verdict=verdict, reason="It is so."
    )


RECOMPILES = failed("recompiles", "recompile")


def evidence(folder: Path, arm: FakeArm = ARM, **more: object) -> Evidence:
    run = Run.of(read_run(write_run(folder / "run", replace(SHORT_REMEDIES, arms=(EAGER, arm)))))
    return Evidence(**{"run": run, "shapes": shape_map(run), "parts": {}, "slo": (), **more})  # type: ignore[arg-type]


def compiling(*shapes: str, **more: object) -> FakeArm:
    events = tuple(
        Compile(at_s=10.0 + place, seconds=0.5, shape=shape, reason=GUARD) for place, shape in enumerate(shapes)
    )
    return replace(ARM, compiles=events, **more)  # type: ignore[arg-type]


def text_of(found: tuple[Remedy, ...]) -> str:
    (remedy,) = found
    return remedy.text


class TestCompiles:
    def test_a_step_that_was_not_warmed_up_is_named_with_its_guard_and_command(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, NEW)), [RECOMPILES]))
        assert text.startswith("All 2 compiles while serving were for steps that its start had not warmed up.")
        assert "First failed guard: tensor 'last' size mismatch at index 0. expected 1, actual 2." in text
        assert 'compile.warmup = "shapes", not "minimal"' in text
        assert '`tailgate inspect experiment.toml --arm compiled --shapes "extend 2x128@256"`' in text

    def test_of_steps_that_were_warmed_up_no_warm_up_is_advised(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(WARMED)), [RECOMPILES]))
        assert "had run each step" in text
        assert "compile.warmup" not in text

    def test_a_step_that_was_captured_was_warmed_up(self, tmp_path: Path) -> None:
        captured = Startup(warmed={f"capture {NEW}": 1.0})
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, startup=captured)), [RECOMPILES]))
        assert "had run each step" in text

    def test_what_a_kernel_says_of_itself_is_no_guard(self, tmp_path: Path) -> None:
        kernel = replace(ARM, compiles=(Compile(at_s=10.0, seconds=0.5, kind="jit", shape=NEW),))
        assert "guard" not in text_of(remedies(evidence(tmp_path, kernel), [RECOMPILES]))

    def test_only_those_that_were_not_warmed_up_are_counted(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(WARMED, NEW)), [RECOMPILES]))
        assert text.startswith("1 of 2 compiles while serving were for steps")

    def test_without_a_record_of_the_warm_up_nothing_is_said_of_it(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, startup=None)), [RECOMPILES]))
        assert "warm" not in text.lower()
        assert '--shapes "extend 2x128@256"' in text

    def test_compiles_that_name_no_step_leave_the_shapes_of_requests(self, tmp_path: Path) -> None:
        other = Startup(warmed={"prefill batch 9 × length 9, context 9": 1.0})
        text = text_of(remedies(evidence(tmp_path, compiling("", startup=other)), [RECOMPILES]))
        assert "in which requests began had not been warmed up" in text
        assert "--shapes" not in text

    def test_marked_sizes_are_held_against_their_bounds(self, tmp_path: Path) -> None:
        marked = {
            "shapes": {"kind": "exact"},
            "compile": {"enabled": True, "mark_dynamic": True, "batch_bounds": [2, 4]},
        }
        text = text_of(remedies(evidence(tmp_path, compiling(NEW, config=marked)), [RECOMPILES]))
        assert "Hold its bounds (batch_bounds) against these steps." in text
        assert "preset" not in text

    def test_autotuning_alone_is_no_recompile(self, tmp_path: Path) -> None:
        tuned = replace(ARM, compiles=(Compile(at_s=10.0, seconds=2.0, kind="autotune"),))
        text = text_of(remedies(evidence(tmp_path, tuned), [failed("longest stall", "recompile")]))
        assert text.startswith("Nothing was recompiled; what held requests up was: autotune (1).")


class TestOrder:
    def test_compiles_come_before_the_errors_and_latency_that_they_explain(self, tmp_path: Path) -> None:
        gates = [
            failed("noninferiority p99_ttft", "noninferiority"),
            failed("errors", "error"),
            failed("longest stall", "recompile"),
            RECOMPILES,
        ]
        found = remedies(evidence(tmp_path, compiling(NEW)), gates)
        assert [item.gates for item in found] == [
            ("longest stall", "recompiles"),
            ("errors",),
            ("noninferiority p99_ttft",),
        ]

    @pytest.mark.parametrize("verdict", ["PASS", "INCONCLUSIVE"])
    def test_a_gate_that_did_not_fail_has_no_remedy(self, tmp_path: Path, verdict: str) -> None:
        assert remedies(evidence(tmp_path), [failed("recompiles", "recompile", verdict)]) == ()


class TestErrors:
    def test_a_failure_that_waited_for_no_compile_is_not_blamed_on_one(self, tmp_path: Path) -> None:
        text = text_of(remedies(evidence(tmp_path, replace(ARM, error_share=0.2)), [failed("errors", "error")]))
        assert "compile" not in text
        assert "`error`" in text

    def test_a_want_of_room_or_time_is_counted(self, tmp_path: Path) -> None:
        shed = replace(ARM, error_share=0.2, error_status="RESOURCE_EXHAUSTED")
        text = text_of(remedies(evidence(tmp_path, shed), [failed("errors", "error")]))
        assert "found no room or no time" in text
        assert "lower the rate" in text

    def test_a_death_says_how_and_where_its_last_lines_are(self, tmp_path: Path) -> None:
        death = {"arm": "compiled", "replica": "compiled-0", "exit_code": -9, "compiling": {"seconds": 12.0}}
        directory = write_run(tmp_path / "run", replace(SHORT_REMEDIES, arms=(EAGER, ARM)))
        path = directory / "trial-01" / "trial.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "deaths": [death]}))
        held = Evidence(run=Run.of(read_run(directory)), shapes=None, parts={}, slo=())
        text = text_of(remedies(held, [failed("deaths", "error")]))
        assert text.startswith("compiled-0 died first (exit code -9, 12.0 s into a compile): its last lines are under")


class TestLatency:
    SLOWER = failed("noninferiority p99_e2e", "noninferiority")

    @staticmethod
    def parts(**more: float) -> tuple[TimeParts, ...]:
        ms = {f"{part}_ms": 10.0 for part in ("queue", "prefill", "decode", "stall", "rest")} | more
        return (TimeParts(quantile=0.99, requests=5, e2e_ms=sum(ms.values()), **ms),)

    def test_the_part_that_grew_most_is_named(self, tmp_path: Path) -> None:
        parts = {"eager": self.parts(), "compiled": self.parts(queue_ms=40.0, decode_ms=20.0)}
        text = text_of(remedies(evidence(tmp_path, parts=parts), [self.SLOWER]))
        assert text.startswith("Around p99 E2E its requests took 40 ms longer than eager's, 30 ms of it in the queue.")

    @pytest.mark.parametrize(("compiled", "says"), [(True, "`tailgate inspect"), (False, "Nothing of it is compiled:")])
    def test_an_arm_that_compiles_nothing_is_not_searched_for_graph_breaks(
        self, tmp_path: Path, compiled: bool, says: str
    ) -> None:
        parts = {"eager": self.parts(), "compiled": self.parts(decode_ms=40.0)}
        arm = replace(ARM, config={"compile": {"enabled": compiled}})
        text = text_of(remedies(evidence(tmp_path, arm, parts=parts), [self.SLOWER]))
        assert f"30 ms of it in decode. {says}" in text

    @pytest.mark.parametrize("known", [("eager",), ("compiled",), ()])
    def test_where_no_server_says_its_times_no_part_is_blamed(self, tmp_path: Path, known: tuple[str, ...]) -> None:
        parts = {arm: self.parts() for arm in known}
        assert "do not show where" in text_of(remedies(evidence(tmp_path, parts=parts), [self.SLOWER]))

    def test_an_objective_that_the_control_misses_too_is_questioned_first(self, tmp_path: Path) -> None:
        missed = failed("slo p99_ttft_ms", "slo")
        text = text_of(remedies(evidence(tmp_path, slo=(replace(missed, arm="eager"),)), [missed]))
        assert text == "eager misses SLO p99 TTFT too: look at the objective and the load first."


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (failed("parity", "parity"), "`tailgate parity experiment.toml`"),
        (failed("refused", "error"), "Widen the arm's bounds or ladders"),
        (failed("eager steps", "recompile"), "shows which steps run eagerly"),
        (failed("memory ratio", "memory"), "fewer slots"),
        (failed("memory growth", "memory"), "tells a leak from a long warm-up"),
        (failed("cold slo p99_ttft_ms", "cold"), "`tailgate precompile`"),
        (failed("ramp", "ramp"), "The section on the ramp"),
    ],
)
def test_every_kind_of_gate_has_a_remedy(tmp_path: Path, gate: Gate, says: str) -> None:
    assert says in text_of(remedies(evidence(tmp_path), [gate]))


def test_the_summary_holds_the_remedies_of_what_failed(tmp_path: Path) -> None:
    summary = analyze(write_run(tmp_path / "run", replace(SHORT_REMEDIES, arms=(EAGER, compiling(NEW)))))
    (first, *_) = summary["advice"]["remedies"]
    assert first["arm"] == "compiled"
    assert "recompiles" in first["gates"]
    assert "--arm compiled" in first["text"]
