import json
import shutil
from dataclasses import replace

import pytest

from analysis.judging.checks.traffic import check_control_errors
from analysis.judging.gates import Gate
from analysis.judging.validity import ALL_KINDS, ESTIMATES, PARITY, Check, apply_checks, faults_to_mend
from analysis.records.schemas import REQUESTS
from analysis.records.tables import RecordWriter, read_table
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
QUICK = {"draws": 99}
PASSING = FakeRun(slo=SLO, gates=QUICK)


def gate(kind="noninferiority", verdict="PASS", arm="compiled", **more):
    return Gate(
        arm=arm, gate=kind, kind=kind, value=1.0, limit=1.1, unit="ratio", verdict=verdict, reason="It is so.", **more
    )


def check(ok=False, affects=ESTIMATES, name="generator lag", **more):
    return Check(check=name, ok=ok, reason="The generator was late.", affects=affects, **more)


class TestChecksOnGates:
    @pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
    @pytest.mark.parametrize("kind", ["noninferiority", "slo", "cold", "goodput"])
    def test_a_failed_check_leaves_no_estimate_standing(self, kind, verdict):
        (result,) = apply_checks([gate(kind, verdict)], [check()])
        assert result.verdict == "INCONCLUSIVE"
        assert result.blocked_by == ("generator lag",)
        assert result.reason == f"It is so. That would be a {verdict}, but for the check that failed: generator lag."

    def test_a_gate_names_the_checks_and_leaves_their_reasons_to_them(self):
        (result,) = apply_checks([gate()], [check(), check(name="blocks"), check(name="blocks", arm="compiled")])
        assert result.reason.endswith("but for the checks that failed: generator lag, blocks.")
        assert "was late" not in result.reason

    @pytest.mark.parametrize(
        ("kind", "verdict", "stands"),
        [("slo", "FAIL", True), ("slo", "PASS", False), ("noninferiority", "FAIL", False)],
    )
    def test_under_an_overload_only_an_objective_that_is_missed_stands(self, kind, verdict, stands):
        (result,) = apply_checks([gate(kind, verdict)], [check(name="overload")])
        assert (result.verdict == verdict) is stands
        (result,) = apply_checks([gate(kind, verdict)], [check(name="overload"), check()])
        assert result.verdict == "INCONCLUSIVE"

    @pytest.mark.parametrize(
        ("verdict", "low", "high", "shift", "stands"),
        [
            ("PASS", 0.3, 0.5, 0.75, True),
            ("PASS", 0.3, 0.5, 0.80, False),
            ("PASS", 0.98, 1.02, 0.15, False),
            ("FAIL", 1.5, 2.0, 0.30, True),
            ("FAIL", 1.5, 2.0, 0.35, False),
        ],
    )
    def test_a_gate_stands_that_a_machine_cannot_have_turned(self, verdict, low, high, shift, stands):
        halves = [check(name=name, shift=shift / 2) for name in ("bed drift", "bed apart")]
        (result,) = apply_checks([gate(verdict=verdict, low=low, high=high)], halves)
        assert (result.verdict == verdict) is stands
        assert ("What bed drift, bed apart saw can have moved it by" in result.reason) is stands

    @pytest.mark.parametrize(
        ("verdict", "lasting", "stands"),
        [
            ("PASS", (0.9, 1.05), True),
            ("PASS", (0.8, 1.15), False),
            ("FAIL", (1.2, 1.6), True),
            ("FAIL", (1.0, 1.8), False),
            ("PASS", None, False),
        ],
    )
    def test_what_falls_on_some_trials_is_in_what_they_differ_by(self, verdict, lasting, stands):
        decided = replace(gate(verdict=verdict), lasting=lasting)
        (result,) = apply_checks([decided], [replace(check(name="bed drift"), among_trials=True)])
        assert (result.verdict == verdict) is stands
        assert ("Its trials differ by what bed drift saw, too" in result.reason) is stands
        assert bool(result.allowance) is stands
        assert result.reason.endswith(result.allowance)
        (result,) = apply_checks([decided], [replace(check(name="bed drift"), among_trials=True), check()])
        assert result.verdict == "INCONCLUSIVE"

    def test_a_gate_that_trials_leave_open_is_not_open_for_what_falls_on_some(self):
        left = replace(gate(verdict="INCONCLUSIVE"), lasting=(0.8, 1.2))
        (result,) = apply_checks([left], [replace(check(name="bed drift"), among_trials=True)])
        assert result == left

    @pytest.mark.parametrize(
        ("trials", "blocked_by", "arm", "is_fault"),
        [
            (5, (), "compiled", True),
            (6, (), "compiled", False),
            (6, ("bed drift",), "compiled", True),
            (6, ("bed drift",), "another", False),
            (6, ("bed apart",), "compiled", False),
        ],
    )
    def test_what_falls_on_some_trials_is_to_mend_where_a_gate_is_open_by_it(self, trials, blocked_by, arm, is_fault):
        drift = replace(check(name="bed drift"), among_trials=True, arm="compiled")
        sound, short = replace(drift, check="bed apart", ok=True), replace(drift, check="blocks", among_trials=False)
        own = replace(gate(verdict="INCONCLUSIVE"), arm=arm, blocked_by=blocked_by)
        assert faults_to_mend([sound, drift, short], [own], trials) == ([drift] if is_fault else [])
        lasting = replace(drift, among_trials=False)
        assert faults_to_mend([lasting], [own], trials) == [lasting]

    def test_a_gate_without_limits_stands_no_shift(self):
        (result,) = apply_checks([gate("slo")], [check(name="bed drift", shift=0.1)])
        assert result.verdict == "INCONCLUSIVE"

    def test_beside_a_check_of_unknown_weight_a_shift_clears_nothing(self):
        (result,) = apply_checks([gate(low=0.1, high=0.2)], [check(name="bed drift", shift=0.1), check()])
        assert (result.verdict, result.blocked_by) == ("INCONCLUSIVE", ("generator lag",))

    def test_a_recompile_failure_stands(self):
        (result,) = apply_checks([gate("recompile", "FAIL")], [check(affects=ALL_KINDS)])
        assert result.verdict == "FAIL"

    def test_a_recompile_pass_does_not_survive_lost_records(self):
        (result,) = apply_checks([gate("recompile", "PASS")], [check(affects=ALL_KINDS)])
        assert result.verdict == "INCONCLUSIVE"

    def test_an_error_failure_stands_unless_the_control_failed_too(self):
        (result,) = apply_checks([gate("error", "FAIL")], [check(affects=ALL_KINDS)])
        assert result.verdict == "FAIL"
        broken = check_control_errors("eager", 50, 100, 0.5)
        (result,) = apply_checks([gate("error", "FAIL")], [broken])
        assert result.verdict == "INCONCLUSIVE"

    def test_a_check_of_one_arm_leaves_the_others_alone(self):
        first, second = apply_checks([gate(arm="a"), gate(arm="b")], [check(arm="a")])
        assert (first.verdict, second.verdict) == ("INCONCLUSIVE", "PASS")

    def test_checks_that_hold_change_nothing(self):
        assert apply_checks([gate()], [check(ok=True)]) == [gate()]

    def test_lost_records_say_nothing_of_answers_that_were_asked_apart(self):
        assert apply_checks([gate("parity")], [check(affects=ALL_KINDS)]) == [gate("parity")]

    @pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
    def test_a_control_that_contradicts_itself_leaves_parity_open(self, verdict):
        (result,) = apply_checks([gate("parity", verdict)], [check(affects=(*ALL_KINDS, PARITY), name="answers")])
        assert result.verdict == "INCONCLUSIVE"

    def test_goodput_is_open_where_arms_are_not_comparable(self):
        (result,) = apply_checks([gate("goodput")], [check(affects=("noninferiority", "goodput"), name="comparable")])
        assert result.verdict == "INCONCLUSIVE"


def rows_of(directory):
    return read_table(directory / "trial-01" / "requests-0.arrow", REQUESTS)[0].to_pylist()


def rewrite_rows(directory, edit, batch=10**9):
    """The run's requests after `edit`, which takes and gives a list of rows."""
    path = directory / "trial-01" / "requests-0.arrow"
    rows = edit(rows_of(directory))
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for start in range(0, len(rows), batch):
            for row in rows[start : start + batch]:
                writer.append(row)
            writer.flush()
    return directory


def torn(directory):
    path = rewrite_rows(directory, list, batch=50) / "trial-01" / "requests-0.arrow"
    path.write_bytes(path.read_bytes()[:-100])


def rows(edit):
    return lambda directory: rewrite_rows(directory, edit)


def info(**change):
    def tell(directory):
        path = directory / "trial-01" / "trial.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return tell


def cut_at_the_end(found):
    """Two of a hundred requests were still under way when the trial ended."""
    end = max(row["end_ns"] for row in found)
    cut = {"status": "CANCELLED", "end_ns": end, "first_token_ns": None, "token_ns": None}
    return [row | (cut if int(row["pair_id"].split("-")[1]) % 50 == 0 else {}) for row in found]


OTHER_DTYPE = {"model": {"id": "random:tiny", "dtype": "bfloat16"}}
CAPTURES = FakeArm(
    name="compiled", compiles=[Compile(at_s=55 + 100 * step, seconds=4, kind="graph_capture") for step in range(7)]
)
LENIENT = QUICK | {"max_recompiles": 99, "max_stall_s": 9, "max_stall_s_per_min": 9, "max_requests_hit_pct": 50}
BROKEN_CONTROL = FakeArm(name="eager", enabled=False, error_share=0.05)
UNEVEN = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=2))
DISAGREEING = {
    "dtype": "float32",
    "prompts": [4, 9],
    "replicas": [
        {"arm": "eager", "replica": f"eager-{number}", "error": None, "same": 2 - number, "of": 2, "departs": departs}
        for number, departs in ((0, None), (1, [1, 2]))
    ],
}
ALL = {"noninferiority", "slo", "recompile", "error"}
TAILS = {"noninferiority", "slo"}

# What spoils an otherwise passing run: the run, a change to what it wrote, the check that sees it, the gates it opens.
SPOILED = {
    "fewer than 20 blocks": (replace(PASSING, duration_s=450), None, "blocks", {"noninferiority"}),
    "fewer than 20 blocks for an objective": (replace(PASSING, duration_s=450), None, "run length", {"slo"}),
    "a missing arm": (PASSING, rows(lambda found: [row for row in found if row["arm"] == "eager"]), "arms", ALL),
    "an unequal arm": (PASSING, rows(lambda found: found[:-100]), "arms", ALL),
    "requests that were planned and never seen": (
        PASSING,
        info(planned={"eager": 3120, "compiled": 3300}),
        "arms",
        ALL,
    ),
    "a sample-ratio mismatch": (
        replace(PASSING, design="split", arms=UNEVEN),
        info(weights={"eager": 1, "compiled": 1}),
        "sample ratio",
        TAILS | {"error"},
    ),
    "blocks that look alike": (
        replace(PASSING, own_drift=0.4, own_rho=0.98, gates=QUICK | {"quantile": 0.5}),
        None,
        "block autocorrelation",
        {"noninferiority"},
    ),
    "generator lag": (replace(PASSING, lag_ms=500.0), None, "generator lag", TAILS),
    "a closed loop": (replace(PASSING, open_loop=False), None, "open loop", TAILS),
    "no schedule": (PASSING, rows(lambda found: [row | {"scheduled_ns": None} for row in found]), "open loop", TAILS),
    "interference": (
        replace(PASSING, arms=(EAGER, CAPTURES), gates=LENIENT, interference=1.6),
        None,
        "interference",
        TAILS,
    ),
    "another model": (
        replace(PASSING, arms=(EAGER, FakeArm(name="compiled", config=OTHER_DTYPE))),
        None,
        "comparable",
        {"noninferiority"},
    ),
    "a control that fails": (
        replace(PASSING, arms=(BROKEN_CONTROL, FakeArm(name="compiled"))),
        None,
        "control errors",
        TAILS | {"error"},
    ),
    "truncated records": (PASSING, torn, "records", ALL),
    "a clock that goes back": (
        PASSING,
        rows(lambda found: [row | ({"end_ns": row["sent_ns"] - 1} if row is found[7] else {}) for row in found]),
        "records",
        ALL,
    ),
    "rows that are there twice": (PASSING, rows(lambda found: [*found, found[0]]), "records", ALL),
    "a stopped trial": (replace(PASSING, complete=False), None, "complete", ALL),
    "a dead control": (
        PASSING,
        info(deaths=[{"arm": "eager", "replica": "eager-0", "at_ns": 1, "exit_code": -9}]),
        "alive",
        TAILS,
    ),
    "a tail of three requests": (replace(PASSING, gates=QUICK | {"quantile": 0.999}), None, "tail", {"noninferiority"}),
    "a tail that the end cut off": (PASSING, rows(cut_at_the_end), "cut requests", TAILS),
    "a control that contradicts itself": (PASSING, info(answers=DISAGREEING), "answers", ALL),
}


class TestValidity:
    """Each spoils an otherwise passing run, seen from the summary."""

    @pytest.fixture(scope="class")
    def passing(self, tmp_path_factory):
        return write_run(tmp_path_factory.mktemp("passing") / "run", PASSING)

    def test_the_run_that_is_spoiled_passes(self, passing):
        summary = analyze(passing)
        assert {item["verdict"] for item in summary["gates"]} == {"PASS"}
        assert {item["kind"] for item in summary["gates"]} == ALL
        assert all(check["ok"] for check in summary["validity"])

    @pytest.mark.parametrize("name", SPOILED)
    def test_a_check_that_fails_leaves_its_gates_open(self, name, passing, tmp_path):
        run, change, check, kinds = SPOILED[name]
        directory = tmp_path / "run"
        if run is PASSING:
            shutil.copytree(passing, directory)
        else:
            write_run(directory, run)
        if change is not None:
            change(directory)
        summary = analyze(directory)
        failed = {item["check"]: item for item in summary["validity"] if not item["ok"]}
        assert check in failed
        assert summary["overall"] == "INCONCLUSIVE"
        for item in summary["gates"]:
            if item["kind"] in kinds:
                assert (item["verdict"], check in item["blocked_by"]) == ("INCONCLUSIVE", True), item["gate"]
        assert kinds <= {item["kind"] for item in summary["gates"]}
        assert failed[check]["reason"].endswith(".")

    def test_another_model_is_no_fault_where_it_is_the_question(self, tmp_path):
        other = FakeArm(name="compiled", config=OTHER_DTYPE)
        intended = replace(PASSING, arms=(EAGER, other), compare_models=True)
        assert analyze(write_run(tmp_path / "run", intended))["overall"] == "PASS"

    def test_no_telemetry_leaves_compiles_unknown_and_is_no_fault_of_the_run(self, tmp_path):
        summary = analyze(write_run(tmp_path / "run", replace(PASSING, telemetry=False)))
        assert summary["overall"] == "INCONCLUSIVE"
        assert all(check["ok"] for check in summary["validity"])
