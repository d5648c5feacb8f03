"""Validity: which gates a failed check opens, and what spoils or flatters a run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tailgate.analysis.checks.applied import apply_checks
from tailgate.analysis.checks.check import ALL_KINDS, ESTIMATES, PARITY
from tailgate.analysis.checks.machines import host
from tailgate.analysis.checks.table import checks_of_run
from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.judging.judgement import judge
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.analysis.run.client_stalls import client_stalls
from tailgate.analysis.run.run import Run
from tailgate.analysis.run.work import length_differences
from tests.fakes.machines import tell
from tests.fakes.request_rows import change_rows, columns_of
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, check, gate, run_in, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 9000}
QUICK = {}
PASSING = FakeRun(slo=SLO, gates=QUICK)
REQUESTS_FILE = "trial-01/requests-0.arrow"


class TestChecksOnGates:
    @pytest.mark.parametrize(
        ("kind", "failed", "stands"),
        [
            *((kind, check(), "") for kind in ("noninferiority", "slo", "goodput")),
            ("recompile", check(opens=ALL_KINDS), "FAIL"),
            ("error", check(opens=ALL_KINDS), "FAIL"),
            ("error", check(name="control errors", opens=(*ESTIMATES, "error")), ""),
            ("parity", check(opens=ALL_KINDS), "PASS FAIL"),
            ("parity", check(opens=(*ALL_KINDS, PARITY), name="answers"), ""),
            ("goodput", check(opens=("noninferiority", "goodput"), name="comparable"), ""),
            ("noninferiority", check(arm="compiled"), ""),
            ("noninferiority", check(arm="another"), "PASS FAIL"),
            ("noninferiority", check(ok=True), "PASS FAIL"),
            ("noninferiority", check(name="overload"), ""),
            ("slo", check(name="overload"), "FAIL"),
            ("slo", check(name="machine speed", shift=0.1), ""),
        ],
    )
    @pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
    def test_a_failed_check_opens_the_gates_that_it_affects(self, kind, failed, stands, verdict):
        decided = gate(kind, verdict)
        (result,) = apply_checks([decided], [failed])
        if verdict in stands:
            assert result == decided
        else:
            assert (result.verdict, result.blocked_by) == ("INCONCLUSIVE", (failed.check,))
            assert f"would be {verdict}" in result.reason

    def test_a_gate_names_each_check_once(self):
        (result,) = apply_checks([gate()], [check(), check(name="blocks"), check(name="blocks", arm="compiled")])
        assert result.blocked_by == ("load generator", "blocks")
        assert "was late" not in result.reason

    def test_a_known_shift_clears_nothing_when_another_check_fails(self):
        (result,) = apply_checks([gate(low=0.1, high=0.2)], [check(name="machine speed", shift=0.1), check()])
        assert (result.verdict, result.blocked_by) == ("INCONCLUSIVE", ("load generator",))

    def test_a_fail_stands_only_if_each_failed_check_keeps_it(self):
        (result,) = apply_checks([gate("slo", "FAIL")], [check(name="overload"), check()])
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
    def test_a_gate_stands_that_its_machine_cannot_have_changed(self, verdict, low, high, shift, stands):
        halves = [check(name=name, shift=shift / 2) for name in ("machine speed", "throttling")]
        (result,) = apply_checks([gate(verdict=verdict, low=low, high=high)], halves)
        assert (result.verdict == verdict) is stands
        assert ("machine speed, throttling" in result.reason and not result.blocked_by) is stands

    @pytest.mark.parametrize(("high", "stands"), [(300.0, True), (700.0, False), (None, False)])
    def test_an_objective_stands_that_its_slowest_request_would_meet_on_a_slower_machine(self, high, stands):
        objective = gate(kind="slo", verdict="PASS", limit=1000.0, high=high)
        (result,) = apply_checks([objective], [check(name="machine speed", shift=0.7)])
        assert (result.verdict == "PASS") is stands

    @pytest.mark.parametrize(
        ("verdict", "slows", "stands"), [("PASS", True, True), ("PASS", False, False), ("FAIL", True, False)]
    )
    def test_an_objective_stands_that_passed_although_its_machine_was_slowed(self, verdict, slows, stands):
        (result,) = apply_checks(
            [gate(kind="slo", verdict=verdict)], [replace(check(name="other work"), rule=replace(host, slows=slows))]
        )
        assert (result.verdict == verdict) is stands

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
    def test_the_spread_of_trials_includes_disturbances_of_some_of_them(self, verdict, lasting, stands):
        decided = replace(gate(verdict=verdict), lasting=lasting)
        (result,) = apply_checks([decided], [replace(check(name="machine speed"), among_trials=True)])
        assert (result.verdict == verdict) is stands
        assert bool(result.allowance) is stands
        assert result.reason.endswith(result.allowance)
        (result,) = apply_checks([decided], [replace(check(name="machine speed"), among_trials=True), check()])
        assert result.verdict == "INCONCLUSIVE"

    def test_a_gate_that_trials_leave_open_is_not_blocked_by_disturbed_trials(self):
        left = replace(gate(verdict="INCONCLUSIVE"), lasting=(0.8, 1.2))
        (result,) = apply_checks([left], [replace(check(name="machine speed"), among_trials=True)])
        assert result == left


def torn(directory):
    path = directory / REQUESTS_FILE
    change_rows(path, list, batch=50)
    path.write_bytes(path.read_bytes()[:-100])


def even(directory):
    """Give all arms one weight."""
    path = directory / "experiment.toml"
    path.write_text(path.read_text().replace("weight = 2", "weight = 1"))


def rows(edit):
    return lambda directory: change_rows(directory / REQUESTS_FILE, edit)


def without(name, arm=""):
    """Leave the column out of the arm's rows, or of all."""
    return rows(lambda found: [row | {name: None} if arm in ("", row["arm"]) else row for row in found])


def cut_at_the_end(found):
    end = max(row["end_ns"] for row in found)
    cut = {"status": "CANCELLED", "end_ns": end, "first_token_ns": None, "token_ns": None}
    return [row | (cut if int(row["pair_id"].split("-")[1]) % 50 == 0 else {}) for row in found]


OTHER_DTYPE = FakeArm(name="compiled", config={"model": {"id": "random:tiny", "dtype": "bfloat16"}})
DEATH = {"arm": "eager", "replica": "eager-0", "at_ns": 1, "exit_code": -9}
CAPTURES = FakeArm(
    name="compiled", compiles=[Compile(at_s=55 + 100 * step, seconds=4, kind="graph_capture") for step in range(7)]
)
LENIENT = QUICK | {"max_recompiles": 99, "max_stall_s": 9, "max_stall_s_per_min": 9, "max_requests_hit_pct": 50}
BROKEN_CONTROL = FakeArm(name="eager", enabled=False, error_share=0.05)
UNEVEN = (FakeArm(name="eager", enabled=False, weight=1), FakeArm(name="compiled", weight=2))
DISAGREEING = {
    "dtype": "float32",
    "replicas": [
        {"arm": "eager", "replica": f"eager-{number}", "error": None, "same": 2 - number, "of": 2}
        for number in range(2)
    ],
}
ALL = {"noninferiority", "slo", "recompile", "error"}
TAILS = {"noninferiority", "slo"}


def case(check, kinds, change=None, **run):
    """Describe what spoils a run that passes: the check that fails, the gates that it opens, and the fault."""
    return replace(PASSING, **run) if run else PASSING, change, check, kinds


SPOILED = {
    "few blocks": case("blocks", {"noninferiority"}, duration_s=450),
    "few blocks for an objective": case("blocks", {"slo"}, duration_s=450),
    "a missing arm": case("complete", ALL, rows(lambda found: [row for row in found if row["arm"] == "eager"])),
    "missing requests": case("complete", ALL, rows(lambda found: found[:-100])),
    "missing planned requests": case("complete", ALL, partial(tell, planned={"eager": 3120, "compiled": 3300})),
    "a sample-ratio mismatch": case(
        "sample ratio",
        TAILS | {"error"},
        even,
        design="split",
        arms=UNEVEN,
    ),
    "correlated blocks": case(
        "block autocorrelation", {"noninferiority"}, own_drift=0.4, own_rho=0.98, gates=QUICK | {"quantile": 0.5}
    ),
    "a late generator": case("load generator", TAILS, lag_ms=500.0),
    "a closed loop": case("open loop", TAILS, open_loop=False),
    "no schedule": case("open loop", TAILS, rows(lambda found: [row | {"scheduled_ns": None} for row in found])),
    "interference": case("interference", TAILS, arms=(EAGER, CAPTURES), gates=LENIENT, interference=1.6),
    "another model": case("comparable", {"noninferiority"}, arms=(EAGER, OTHER_DTYPE)),
    "a control that fails": case("control errors", TAILS | {"error"}, arms=(BROKEN_CONTROL, FakeArm(name="compiled"))),
    "truncated records": case("complete", ALL, torn),
    "rows that are there twice": case("complete", ALL, rows(lambda found: [*found, found[0]])),
    "no request_id": case("complete", ALL, without("request_id")),
    "no trial": case("complete", ALL, without("trial")),
    "no sent_ns": case("complete", ALL, without("sent_ns")),
    "no output_tokens": case("complete", ALL, without("output_tokens")),
    "no sent_ns of one arm": case("complete", ALL, without("sent_ns", arm="compiled")),
    "no pair_id": case("pairs", TAILS | {"error"}, without("pair_id")),
    "a stopped trial": case("complete", ALL, complete=False),
    "a dead control": case("alive", TAILS, partial(tell, deaths=[DEATH])),
    "a tail of three requests": case("tail", {"noninferiority"}, gates=QUICK | {"quantiles": [0.999]}),
    "a tail that the end cut off": case("cut requests", TAILS, rows(cut_at_the_end)),
    "a control that contradicts itself": case("answers", ALL, partial(tell, answers=DISAGREEING)),
}


def failed_checks(judgement):
    return {check.check for check in judgement.checks if not check.ok}


class TestSpoiledRuns:
    def test_the_run_that_is_spoiled_passes(self, tmp_path):
        judgement = judge(run_in(write_run(tmp_path / "run", PASSING)))
        assert {item.verdict for item in judgement.gates} == {"PASS"}
        assert {item.kind for item in judgement.gates} == ALL
        assert failed_checks(judgement) == set()

    @pytest.mark.parametrize("name", SPOILED)
    def test_a_check_that_fails_leaves_its_gates_open(self, name, tmp_path):
        run, change, check, kinds = SPOILED[name]
        directory = write_run(tmp_path / "run", run)
        if change is not None:
            change(directory)
        judgement = judge(run_in(directory))
        assert check in failed_checks(judgement)
        assert judgement.overall == "INCONCLUSIVE"
        for item in judgement.gates:
            if item.kind in kinds:
                assert (item.verdict, check in item.blocked_by) == ("INCONCLUSIVE", True), item.gate
        assert kinds <= {item.kind for item in judgement.gates}

    def test_without_telemetry_compiles_are_unknown_and_no_check_fails(self, tmp_path):
        directory = write_run(tmp_path / "run", replace(PASSING, telemetry=False))
        judgement = judge(run_in(directory))
        assert (judgement.overall, failed_checks(judgement)) == ("INCONCLUSIVE", set())


WIDE = {"margin": 0.2, "max_error_pct": 2.0}
HONEST = FakeRun(slo=SLO, gates=WIDE, own_drift=0.0)


@cache
def recorded(design="mirrored", ignore_eos=False, metrics=("ttft", "e2e")):
    """Return the records of a run that passes, and its requests as rows."""
    with tempfile.TemporaryDirectory() as folder:
        gates = WIDE | {"metrics": list(metrics)}
        run = replace(HONEST, design=design, ignore_eos=ignore_eos, gates=gates)
        directory = write_run(Path(folder, "run"), run)
        rows = [read_table(path, REQUESTS)[0] for path in sorted(directory.glob("trial-*/requests-*.arrow"))]
        return read_run(directory), pa.concat_tables(rows).to_pylist()


def run_with(change, arm="compiled", **run):
    """Return the run after `change` of each row of the arm, given its number, into one row or a list of rows."""
    records, rows = recorded(**run)
    changed = []
    for row in rows:
        if row["arm"] == arm:
            found = change(int(row["request_id"].split("-")[1]), dict(row))
            changed += found if isinstance(found, list) else [found]
        else:
            changed.append(row)
    return Run.of(replace(records, requests=columns_of(changed)))


def failing(run):
    """Return the checks that fail, without those on the comparisons and on telemetry."""
    checks, _ = checks_of_run(run, Comparisons(), client_stalls(run.requests, run.arms))
    return {
        check.check: check for check in checks if not check.ok and check.check not in ("blocks", "tail", "telemetry")
    }


def cut_to(row, tokens):
    """Keep the first tokens of an answer and end it with the last of them."""
    times = row["token_ns"][:tokens]
    return row | {"output_tokens": tokens, "token_ns": times, "end_ns": row["sent_ns"] + times[-1]}


def every(step, changes):
    """Change every `step`-th row."""
    return lambda number, row: row | changes if number % step == 0 else row


def empty(number, row, **more):
    nothing = {"output_tokens": 0, "token_ns": None, "first_token_ns": None, "end_ns": row["sent_ns"] + 5_000_000}
    return row | nothing | more if number % 5 == 0 else row


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_honest_records_pass(ignore_eos):
    judgement = judge(run_with(lambda number, row: row, ignore_eos=ignore_eos))
    assert (judgement.overall, failed_checks(judgement)) == ("PASS", set())


@pytest.mark.parametrize(
    "change",
    [empty, partial(empty, error="boom"), every(5, {"error": "out of memory"}), every(5, {"output_tokens": 0})],
    ids=["a fifth empty", "empty with an error", "an error", "no token but a first time"],
)
def test_an_answer_with_nothing_in_it_is_a_failure(change):
    judgement = judge(run_with(change))
    errors = next(gate for gate in judgement.gates if gate.gate == "errors")
    assert errors.value == pytest.approx(20.0, abs=0.1)
    assert judgement.overall == "FAIL"


@pytest.mark.parametrize(
    "run", [{}, {"ignore_eos": True}, {"design": "split"}, {"design": "switchback"}], ids=lambda run: str(run)
)
@pytest.mark.parametrize(
    "change",
    [
        lambda number, row: cut_to(row, 1) if number % 10 else row,
        lambda number, row: cut_to(row, 1) if number % 10 == 0 else row,
        lambda number, row: cut_to(row, max(1, row["output_tokens"] * 9 // 10)),
        lambda number, row: row | {"output_tokens": 2 * row["output_tokens"]},
    ],
    ids=["nine tenths of one token", "a tenth of one token", "a tenth shorter", "twice as long"],
)
def test_an_arm_that_answers_less_or_more_does_other_work(run, change):
    assert {"noninferiority", "slo"} <= set(failing(run_with(change, **run))["equal work"].opens)


@pytest.mark.parametrize(
    ("change", "arm", "ignore_eos"),
    [
        (lambda number, row: row | {"output_tokens": 1 if number % 2 else 2 * row["output_tokens"] - 1}, "compiled", 0),
        (lambda number, row: cut_to(row, 1) if number == 700 else row, "compiled", 1),
        (lambda number, row: row | {"output_tokens": row["output_tokens"] + 1}, "eager", 1),
    ],
    ids=["the mean agrees", "one short answer of forced length", "the control"],
)
def test_other_lengths_that_hide_are_other_work(change, arm, ignore_eos):
    assert set(failing(run_with(change, arm, ignore_eos=bool(ignore_eos)))) == {"equal work"}


def test_lengths_that_differ_by_chance_are_equal_work():
    rng = np.random.default_rng(1)

    def lengths():
        return np.rint(rng.lognormal(5.0, 0.86, 2400)).astype(np.int64)

    assert sum(bool(length_differences("a", "b", lengths(), lengths())) for _ in range(300)) <= 3
    one, more = (np.full(2400, tokens) for tokens in (512, 513))
    assert not length_differences("a", "b", one, more), "a server may count the token that ends an answer"


def test_a_first_token_without_a_time_came_with_the_last():
    run = run_with(every(5, {"first_token_ns": None, "token_ns": None}))
    gates = {gate.gate: gate for gate in judge(run).gates}
    assert gates["errors"].value == 0
    assert gates["noninferiority p99_ttft"].verdict == "FAIL"


def test_a_replica_that_is_gone_after_the_traffic_does_not_pass(tmp_path):
    directory = write_run(tmp_path / "run", HONEST)
    tell(directory, final={"eager-0": {}})
    judgement = judge(run_in(directory))
    assert (judgement.overall, failed_checks(judgement)) == ("INCONCLUSIVE", {"alive", "telemetry"})
    assert any("compiled-0" in check.reason for check in judgement.checks if check.check == "alive")


@pytest.mark.parametrize(("asked", "overall"), [(True, "INCONCLUSIVE"), (False, "PASS")])
def test_answers_that_were_asked_for_and_not_recorded_do_not_pass(tmp_path, asked, overall):
    directory = write_run(tmp_path / "run", replace(HONEST, parity={"served": asked}))
    assert judge(run_in(directory)).overall == overall


def shifted(ms, *names):
    return lambda number, row: row | {name: row[name] + int(ms * 1e6) for name in names}


ALL_TIMES = ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns")


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (shifted(400, *ALL_TIMES), "pairs"),
        (shifted(-20, *ALL_TIMES), "pairs"),
        (shifted(25, "sent_ns"), "load generator"),
        (lambda number, row: row | {"prompt_tokens": row["prompt_tokens"] - 1}, "pairs"),
        (lambda number, row: row | {"max_tokens": 100}, "pairs"),
        (lambda number, row: row | ({"pair_id": f"1-{number + 1}"} if number == 9 else {}), "pairs"),
        (lambda number, row: row | ({"trial": 2} if number == 9 else {}), "pairs"),
        (lambda number, row: [row, row | {"request_id": row["request_id"] + "b"}] if number % 3 == 0 else row, "pairs"),
        (lambda number, row: [] if number % 50 == 0 else row, "pairs"),
        (lambda number, row: row | ({"pair_id": f"1-{10**6 + number}"} if number % 50 == 0 else {}), "pairs"),
        (every(50, {"pair_id": None}), "pairs"),
        (lambda number, row: row | {"end_ns": row["first_token_ns"] + 10**6} if number % 2 else row, "complete"),
    ],
)
def test_copies_that_differ_from_their_originals_fail_a_check(change, check):
    assert "noninferiority" in failing(run_with(change))[check].opens


@pytest.mark.parametrize(("metrics", "ok"), [(("ttft", "e2e"), True), (("ttft", "tpot"), False)])
def test_a_server_that_does_not_stream_is_not_judged_by_its_gaps(metrics, ok):
    def at_once(number, row):
        first = row["first_token_ns"] - row["sent_ns"]
        return row | {"token_ns": [first] * row["output_tokens"], "end_ns": row["first_token_ns"]}

    assert ("token stream" not in failing(run_with(at_once, metrics=metrics))) is ok


@pytest.mark.parametrize(
    "change",
    [every(1, {"token_ns": None}), every(50, {"sent_ns": None, "request_id": None})],
    ids=["no times of tokens", "some requests with gaps"],
)
def test_records_that_lack_what_is_not_needed_pass(change):
    assert judge(run_with(change)).overall == "PASS"
