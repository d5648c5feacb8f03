import json
from dataclasses import replace

from analysis.judgement import judge
from analysis.records import COMPILE_EVENTS, REQUESTS, RecordWriter, read_run, read_table
from analysis.run import Run
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
NAIVE = FakeArm(name="naive", compiles=[Compile(at_s=5 + 10 * step, seconds=3 + step) for step in range(6)])
SHORT = FakeRun(duration_s=90, rate=2)


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
        judgement = judgement_of(tmp_path, FakeRun(slo=SLO))
        assert (judgement.overall, judgement.verdicts) == ("PASS", {"compiled": "PASS"})
        assert failed_checks(judgement) == set()
        assert judgement.headline.startswith("compiled may replace eager")

    def test_a_slower_arm_fails(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, FakeArm(name="compiled", ratio=1.4))))
        assert judgement.overall == "FAIL"
        assert gate(judgement, "noninferiority p99_e2e").verdict == "FAIL"

    def test_a_short_run_is_inconclusive_and_says_how_long_would_do(self, tmp_path):
        judgement = judgement_of(tmp_path, SHORT)
        assert judgement.overall == "INCONCLUSIVE"
        assert "blocks" in failed_checks(judgement)
        assert judgement.advice.needed_s >= 600
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
        judgement = judgement_of(tmp_path, FakeRun(arms=(EAGER, NAIVE)))
        assert gate(judgement, "noninferiority p99_e2e", "naive").verdict == "PASS"
        everything = [item for item in judgement.everything if item.metric == "ttft"]
        assert everything[0].ratio > 10

    def test_a_split_is_judged_without_pairs(self, tmp_path):
        arms = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=1))
        judgement = judgement_of(tmp_path, FakeRun(design="split", arms=arms, rate=8))
        assert judgement.steady[0].method == "unpaired block label swap"
        assert "sample ratio" in {check.check for check in judgement.checks}
        assert failed_checks(judgement) == set()

    def test_arms_that_take_turns_meet_in_blocks_that_hold_a_turn_of_each(self, tmp_path):
        first = judgement_of(tmp_path, FakeRun(design="switchback", duration_s=1440, drift=0.05)).steady[0]
        assert first.method == "unpaired block label swap"
        assert first.blocks == 23  # the cold start takes the first turn and so its block
        assert first.low < 1.0 < first.high

    def test_six_trials_are_judged_by_trial(self, tmp_path):
        judgement = judgement_of(tmp_path, FakeRun(trials=6, duration_s=150))
        assert {item.method for item in judgement.steady} == {"t-test over trials"}
        assert judgement.overall == "PASS"

    def test_a_dead_treatment_fails(self, tmp_path):
        def die(info):
            info["deaths"] = [{"arm": "compiled", "replica": "compiled-0", "at_ns": 1, "exit_code": -9}]

        judgement = judged(rewrite_info(write_run(tmp_path / "run", FakeRun()), die))
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


class TestValidity:
    """Each spoils an otherwise passing run."""

    def spoiled(self, path, run=None, *, change=None):
        directory = write_run(path / "run", run or FakeRun())
        if change is not None:
            rewrite_info(directory, change)
        judgement = judged(directory)
        assert judgement.overall == "INCONCLUSIVE"
        return failed_checks(judgement)

    def test_generator_lag(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(lag_ms=500.0)) == {"generator lag"}

    def test_closed_loop(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(open_loop=False)) == {"open loop"}

    def test_an_interrupted_trial(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(complete=False)) == {"complete"}

    def test_arms_with_another_model(self, tmp_path):
        other = FakeArm(name="compiled", config={"model": {"id": "random:tiny", "dtype": "bfloat16"}})
        assert self.spoiled(tmp_path, FakeRun(arms=(EAGER, other))) == {"comparable"}

    def test_another_model_is_no_fault_where_it_is_the_question(self, tmp_path):
        other = FakeArm(name="compiled", config={"model": {"id": "random:tiny", "dtype": "bfloat16"}})
        intended = FakeRun(arms=(EAGER, other), compare_models=True)
        assert judged(write_run(tmp_path / "run", intended)).overall == "PASS"

    def test_a_dead_control(self, tmp_path):
        def die(info):
            info["deaths"] = [{"arm": "eager", "replica": "eager-0", "at_ns": 1, "exit_code": -9}]

        assert self.spoiled(tmp_path, change=die) == {"alive"}

    def test_requests_that_were_planned_and_never_seen(self, tmp_path):
        def plan_more(info):
            info["planned"]["compiled"] += 100

        assert self.spoiled(tmp_path, change=plan_more) == {"arms"}

    def test_a_failing_control(self, tmp_path):
        broken = FakeArm(name="eager", enabled=False, error_share=0.05)
        assert "control errors" in self.spoiled(tmp_path, FakeRun(arms=(broken, FakeArm(name="compiled"))))

    def test_no_telemetry(self, tmp_path):
        assert self.spoiled(tmp_path, FakeRun(telemetry=False)) == set()

    def test_a_torn_file(self, tmp_path):
        directory = write_run(tmp_path / "run", FakeRun())
        path = directory / "trial-01" / "requests-0.arrow"
        table, _ = read_table(path, REQUESTS)
        rows = table.to_pylist()
        path.unlink()
        with RecordWriter(path, REQUESTS) as writer:
            for start in range(0, len(rows), 50):
                for row in rows[start : start + 50]:
                    writer.append(row)
                writer.flush()
        path.write_bytes(path.read_bytes()[:-100])
        judgement = judged(directory)
        assert judgement.overall == "INCONCLUSIVE"
        assert "records" in failed_checks(judgement)

    def test_a_split_that_is_not_the_split_asked_for(self, tmp_path):
        arms = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=2))

        def claim(info):
            info["weights"] = {"eager": 1, "compiled": 1}

        assert "sample ratio" in self.spoiled(tmp_path, FakeRun(design="split", arms=arms, rate=8), change=claim)

    def test_interference(self, tmp_path):
        often = FakeArm(
            name="compiled",
            compiles=[Compile(at_s=55 + 100 * step, seconds=4, kind="graph_capture") for step in range(7)],
        )
        gates = {"max_recompiles": 99, "max_stall_s": 9, "max_stall_s_per_min": 9, "max_requests_hit_pct": 50}
        found = self.spoiled(tmp_path, FakeRun(arms=(EAGER, often), gates=gates, interference=1.6))
        assert "interference" in found


def test_events_that_were_sent_twice_count_once(tmp_path):
    directory = write_run(tmp_path / "run", replace(SHORT, arms=(EAGER, NAIVE)))
    path = directory / "trial-01" / "compile_events.arrow"
    rows = read_table(path, COMPILE_EVENTS)[0].to_pylist()
    with RecordWriter(path, COMPILE_EVENTS) as writer:
        for row in rows:
            writer.append(row)
    assert gate(judged(directory), "recompiles", "naive").value == 6


def test_a_treatment_that_only_fails_does_not_pass(tmp_path):
    directory = write_run(tmp_path / "run", FakeRun())
    path = directory / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row | ({"status": "UNAVAILABLE"} if row["arm"] == "compiled" else {}))
    judgement = judged(directory)
    assert judgement.overall == "FAIL"
    assert "100 %" in gate(judgement, "errors").reason


def test_another_seed_changes_draws_and_not_the_facts(tmp_path):
    records = read_run(write_run(tmp_path / "run", FakeRun()))
    first, second = judge(Run.of(records, 1)), judge(Run.of(records, 2))
    assert first.steady[0].p_noninferior != second.steady[0].p_noninferior
    assert (first.facts, first.slo) == (second.facts, second.slo)
    assert judge(Run.of(records, 1)) == first
