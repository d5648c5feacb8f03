"""Lost or wrong telemetry and stalls of unknown cause never make a PASS of the gates on compiles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tailgate.analysis.checks.table import checks_of_run
from tailgate.analysis.checks.telemetry import unknown_stalls
from tailgate.analysis.judging.comparisons import Comparisons
from tailgate.analysis.judging.gates.compiles import may_compile
from tailgate.analysis.records.schemas import COMPILE_EVENTS
from tailgate.analysis.run.client_stalls import PART, UNKNOWN, WORK, Stall, client_stalls
from tailgate.analysis.summary.summary import analyze
from tests.fakes.machines import tell
from tests.fakes.request_rows import change_rows
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, run_in, start_of, write_run

# Lenient in all but the number of recompiles.
GATES = {
    "max_stall_s": 1000,
    "max_stall_s_per_min": 60,
    "max_requests_hit_pct": 100,
    "metrics": ["e2e"],
    "quantile": 0.9,
    "min_blocks": 8,
}
QUIET = FakeRun(gates=GATES, duration_s=300, rate=2)
NAIVE = FakeArm(name="compiled", compiles=[Compile(at_s=20 + 60 * step, seconds=3) for step in range(3)])
STALLED = replace(QUIET, arms=(EAGER, NAIVE))


CHECK = unknown_stalls.name
BUDGET = {**GATES, "max_stall_s": 1.0}
SUM = {**BUDGET, "max_stall_s_per_min": 0.5}
REPORTED = ("recompiles", "longest compile stall", "compile stall per minute", "requests hit")


@pytest.fixture
def quiet(tmp_path):
    return write_run(tmp_path / "run", QUIET)


@pytest.fixture
def stalled(tmp_path):
    return write_run(tmp_path / "run", STALLED)


def gate(summary, name="recompiles"):
    return next(row for row in summary["gates"] if row["gate"] == name)


def failed(summary):
    """Return the reasons of the checks that failed, those of several arms together."""
    rows = [row for row in summary["validity"] if not row["ok"]]
    return {row["check"]: " ".join(one["reason"] for one in rows if one["check"] == row["check"]) for row in rows}


def rewrite(directory, change):
    """Write the compile events after `change` of their rows."""
    change_rows(directory / "trial-01" / "compile_events.arrow", change, COMPILE_EVENTS)


COUNTED = {"counters": {"compile_events": 1}}
NONE = {"counters": {"compile_events": 0}}
UNENDED = {"compiling": {"start_ns": 5, "seconds": 53.0, "shape": "2x64"}}


@pytest.mark.parametrize(
    ("final", "words"),
    [
        ({"eager-0": NONE, "compiled-0": {"counters": {"compile_events": 5}}}, ("compiled-0", "counted 5", "1 are")),
        ({"eager-0": NONE}, ("compiled-0 reported no counts",)),
        ({"eager-0": NONE, "compiled-0": COUNTED | UNENDED}, ("compiled-0", "53.0 s into a compile for 2x64")),
    ],
    ids=["fewer rows than were counted", "no count", "a compile that did not end"],
)
def test_compile_events_that_are_missing_open_the_gates_on_compiles(quiet, final, words):
    tell(quiet, final={"eager-0": NONE, "compiled-0": COUNTED})
    assert gate(analyze(quiet))["verdict"] == "PASS"
    tell(quiet, final=final)
    summary = analyze(quiet)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert [word for word in words if word not in failed(summary)["telemetry"]] == []


def test_numbers_missing_among_the_events_are_reported(quiet):
    rewrite(quiet, lambda rows: [row | {"event_id": "1-compiled-0-4"} for row in rows])
    assert "in trial 1 counted 5 compile events, and 1 are recorded" in failed(analyze(quiet))["telemetry"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "recompila"}, "kind ('recompila')"),
        ({"kind": None}, "kind (none)"),
        ({"phase": "serwing"}, "phase ('serwing')"),
        ({"arm": "compilee"}, "arm ('compilee')"),
        ({"arm": None}, "arm (none)"),
        ({"trial": 7}, "trial (7)"),
        ({"replica": "compiled-9"}, "replica ('compiled-9')"),
        ({"start_ns": None}, "missing or run backwards"),
        ({"end_ns": None}, "missing or run backwards"),
        ({"end_ns": 5}, "missing or run backwards"),
        ({"start_ns": 1}, "outside of the run"),
        ({"end_ns": 9 * 10**18}, "outside of the run"),
    ],
    ids=str,
)
def test_an_event_that_cannot_be_placed_is_reported(stalled, change, reason):
    rewrite(stalled, lambda rows: [row | (change if row["phase"] == "serving" else {}) for row in rows])
    run = run_in(stalled)
    checks, _ = checks_of_run(run, Comparisons(), client_stalls(run.requests, run.arms))
    (check,) = (check for check in checks if not check.ok and "3 compile events" in check.reason)
    assert check.check == "telemetry"
    assert reason in check.reason
    assert "recompile" in check.opens
    if "trial" in change:
        summary = analyze(stalled)
        assert gate(summary)["verdict"] == gate(summary, "longest compile stall")["verdict"] == "INCONCLUSIVE"


def edit(directory, change):
    """Write the requests of the run after `change` of each row, given its number."""
    change_rows(
        directory / "trial-01" / "requests-0.arrow",
        lambda rows: [change(number, row) for number, row in enumerate(rows)],
    )


def test_a_stall_longer_than_its_request_is_no_stall(quiet):
    """A flipped bit in one request's account once failed an arm."""
    edit(quiet, lambda number, row: row | ({"compile_stall_ns": 1 << 62} if number == 40 else {}))
    summary = analyze(quiet)
    assert gate(summary, "longest compile stall")["verdict"] == "INCONCLUSIVE"
    assert "1 request with times" in failed(summary)["complete"]


@pytest.mark.parametrize("change", [{"arm": "eagfr"}, {"trial": 9}, {"phase": "meazure"}], ids=str)
def test_requests_without_a_place_decide_nothing(quiet, change):
    edit(quiet, lambda number, row: row | (change if number == 0 else {}))
    summary = analyze(quiet)
    assert summary["overall"] == "INCONCLUSIVE"
    assert "1 request of an unknown" in failed(summary)["complete"]


BLIND = "torch 2.99.0 is not among the versions whose compiler is read"


@pytest.mark.parametrize(("run", "verdict"), [(QUIET, "INCONCLUSIVE"), (STALLED, "FAIL")])
def test_an_arm_that_cannot_see_its_compilers_never_passes_the_gates_on_compiles(tmp_path, run, verdict):
    directory = write_run(tmp_path / "run", run)
    warm = {"startup": {"compiled": {"items_ns": {}, "blind_spots": [BLIND]}, "eager": {"blind_spots": []}}}
    for facts in (warm, {"startup": {}, "final": {"compiled-0": {"blind_spots": [BLIND]}}}):
        tell(directory, **facts)
        summary = analyze(directory)
        assert gate(summary)["verdict"] == verdict
        assert BLIND in failed(summary)["telemetry"]


def stopped(directory, *at_s, seconds=3.0, control=(), gates=BUDGET, **changes):
    """Analyze a run whose treatment stalled `at_s`, and its control at `control`, without a compile event."""
    write_run(directory, replace(QUIET, rate=8, server_columns=False, gates=gates, **changes))

    def delay(number, row):
        for at in at_s if row["arm"] == "compiled" else control:
            stall(row, start_of(1) + int(at * SECOND), int(seconds * SECOND))
        return row

    edit(directory, delay)
    final = {f"{arm}-0": {"counters": {"compile_events": int(arm == "compiled")}} for arm in ("eager", "compiled")}
    tell(directory, final=final)
    return analyze(directory)


def stall(row, at_ns, length_ns):
    """Delay what the request would have received during the stall."""
    sent = row["sent_ns"]
    late = at_ns + length_ns - max(at_ns, sent)
    if late <= 0 or row["end_ns"] <= at_ns:
        return
    for name in ("first_token_ns", "end_ns"):
        row[name] += late if row[name] > at_ns else 0
    row["token_ns"] = [token + late if sent + token > at_ns else token for token in row["token_ns"]]


def without_compiles(rows):
    return [row for row in rows if row["phase"] != "serving"]


def in_the_background(rows):
    serving = [row for row in rows if row["phase"] == "serving"]
    span = {"start_ns": min(row["start_ns"] for row in serving), "end_ns": max(row["end_ns"] for row in serving)}
    return [*without_compiles(rows), {**serving[0], **span, "kind": "background_compile", "request_ids": []}]


def on_another_replica(rows):
    return [row | ({"replica": "compiled-1"} if row["phase"] == "serving" else {}) for row in rows]


@pytest.mark.parametrize("change", [without_compiles, in_the_background, on_another_replica])
def test_stalls_that_servers_report_and_events_do_not_explain_open_the_gates(stalled, change):
    tell(stalled, arms=[{"name": arm, "replicas": [f"{arm}-0", f"{arm}-1"]} for arm in ("eager", "compiled")])
    rewrite(stalled, change)
    summary = analyze(stalled)
    assert gate(summary)["verdict"] == ("FAIL" if change is on_another_replica else "INCONCLUSIVE")
    assert "server's account" in failed(summary)["telemetry"]


def test_stalls_that_only_show_at_the_client_open_the_gates(tmp_path):
    """Telemetry ended after the warm-up, and servers report no stalls."""
    compiles = [Compile(at_s=20 + 20 * step, seconds=3) for step in range(12)]
    arms = (EAGER, FakeArm(name="compiled", compiles=compiles))
    run = replace(QUIET, arms=arms, rate=8, server_columns=False)
    directory = write_run(tmp_path / "run", run)
    rewrite(directory, without_compiles)
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "no event covers" in failed(summary)["telemetry"]


@pytest.mark.parametrize(
    ("seconds", "cause", "may"),
    [(0.9, UNKNOWN, True), (0.3, UNKNOWN, False), (0.9, WORK, False), (0.9, PART, True)],
    ids=["as long as a compile", "a garbage collection", "a long prompt", "of some requests"],
)
def test_a_stall_that_nothing_explains_may_be_a_compile(seconds, cause, may):
    place = {"arm": "compiled", "trial": 1, "replica": "compiled-0", "start_ns": 0, "end_ns": int(seconds * SECOND)}
    assert may_compile(Stall(**place, cause=cause, requests=np.arange(4))) is may


@pytest.mark.parametrize(
    ("at_s", "more", "opened", "limit"),
    [
        ((100, 200), {}, "longest compile stall", "gates.max_stall_s"),
        ((50, 100, 150, 200), {"seconds": 0.8, "gates": SUM}, "compile stall per minute", "gates.max_stall_s_per_min"),
    ],
    ids=["one is too long", "too long in sum"],
)
def test_stalls_of_unknown_cause_open_the_gate_that_they_may_break_alone(tmp_path, at_s, more, opened, limit):
    summary = stopped(tmp_path / "run", *at_s, **more)
    verdicts = {name: gate(summary, name)["verdict"] for name in REPORTED}
    assert verdicts == {**dict.fromkeys(REPORTED, "PASS"), opened: "INCONCLUSIVE"}
    reason = failed(summary)[CHECK]
    assert all(words in reason for words in (f"{len(at_s)} times", "into trial 1"))
    assert summary["headline"].endswith(reason)
    assert f"raise {limit}. " in f"{summary['advice']['text']} "


@pytest.mark.parametrize(
    ("seconds", "control", "gates"),
    [(0.6, (), BUDGET), (3.0, (), QUIET.gates), (3.0, (100,), BUDGET)],
    ids=["shorter than the limit", "a higher limit", "of the host: the control stalled too"],
)
def test_stalls_that_are_allowed_or_of_the_host_open_nothing(tmp_path, seconds, control, gates):
    summary = stopped(tmp_path / "run", 100, seconds=seconds, control=control, gates=gates)
    assert CHECK not in failed(summary)
    assert gate(summary, "longest compile stall")["verdict"] == "PASS"


@pytest.mark.parametrize("cause", [WORK, UNKNOWN])
def test_a_stall_that_its_prompts_explain_is_not_of_unknown_cause(tmp_path, cause):
    run = run_in(write_run(tmp_path / "run", replace(QUIET, gates=BUDGET)))
    seen = client_stalls(run.requests, run.arms)["compiled"]
    start_ns = run.trials[0].first_ns + 50 * SECOND
    times = {"start_ns": start_ns, "end_ns": start_ns + 3 * SECOND}
    place = {"arm": "compiled", "trial": 1, "replica": "compiled-0", **times}
    stall = Stall(**place, cause=cause, requests=np.arange(1))
    assert not unknown_stalls.in_search, "a search drives arms past what they hold"
    stalls = {"compiled": replace(seen, stalls=(stall,))}
    (check,) = unknown_stalls.find(SimpleNamespace(run=run, stalls=stalls))
    assert (check.ok, check.gates) == ((True, ()) if cause == WORK else (False, ("longest compile stall",)))
