"""Stalls that look like compiles, or that are longer than one may be, open gates where no compile event has them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from analysis.blackbox.stalls import UNKNOWN, Stall
from analysis.judging.checks.stalls import check_unknown
from analysis.judging.checks.telemetry import check_telemetry
from analysis.judging.run_gates import seen_outside
from analysis.records.schemas import REQUESTS
from analysis.records.tables import read_table
from analysis.releases.release import read_release
from analysis.run.run import Run
from analysis.summary.summary import analyze, read_run
from tests.analysis.judging.checks.test_telemetry import QUIET, STALLED, count, failed, gate, rewrite, write
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, write_run

CHECK = "stalls of unknown cause"
BUDGET = {**QUIET.gates, "max_stall_s": 1.0}


def stopped(directory, *at_s, seconds=3.0, control=(), gates=BUDGET, **changes):
    """The summary of a run whose treatment stood still at these times, and the control at those, though no compile
    event says so."""
    write_run(directory, replace(QUIET, rate=8, server_columns=False, gates=gates, **changes))
    path = directory / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    start_ns = rows[0]["scheduled_ns"]
    for row in rows:
        for at in at_s if row["arm"] == "compiled" else control:
            stand_still(row, start_ns + int(at * SECOND), int(seconds * SECOND))
    write(path, rows)
    count(directory, eager=0, compiled=1)
    return analyze(directory)


def stand_still(row, at_ns, length_ns):
    """What the request would have got while its server stood still it gets after that."""
    sent = row["sent_ns"]
    late = at_ns + length_ns - max(at_ns, sent)
    if late <= 0 or row["end_ns"] <= at_ns:
        return
    for name in ("first_token_ns", "end_ns"):
        row[name] += late if row[name] > at_ns else 0
    row["token_ns"] = [token + late if sent + token > at_ns else token for token in row["token_ns"]]


def test_stalls_that_servers_report_and_events_do_not_open_the_gates(tmp_path):
    directory = write_run(tmp_path / "run", STALLED)
    assert gate(analyze(directory))["verdict"] == "FAIL"
    rewrite(directory, lambda rows: [row for row in rows if row["phase"] != "serving"])
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "by its server's account" in failed(summary)["stalls explained"]


def test_stalls_that_only_show_from_outside_open_the_gates(tmp_path):
    """Telemetry stopped after the warm-up, and nothing reports what held requests up."""
    compiles = [Compile(at_s=20 + 20 * step, seconds=3) for step in range(12)]
    arms = (EAGER, FakeArm(name="compiled", compiles=compiles))
    run = replace(QUIET, arms=arms, rate=8, server_columns=False)
    directory = write_run(tmp_path / "run", run)
    path = directory / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    # What begins a compile is a length that none had before.
    new = 1000
    for row in rows:
        offset = (row["scheduled_ns"] - rows[0]["scheduled_ns"]) / SECOND
        if row["arm"] == "compiled" and any(item.at_s <= offset < item.at_s + 0.5 for item in compiles):
            new += 1
            row["prompt_tokens"] = new
    write(path, rows)
    rewrite(directory, lambda events: [row for row in events if row["phase"] != "serving"])
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "from outside and in no compile event" in failed(summary)["stalls explained"]


def test_a_background_compile_explains_no_stall(tmp_path):
    """It holds nobody up, however long it lasts, so a lost compile does not hide behind it."""
    directory = write_run(tmp_path / "run", STALLED)

    def hidden(rows):
        serving = [row for row in rows if row["phase"] == "serving"]
        span = {"start_ns": min(row["start_ns"] for row in serving), "end_ns": max(row["end_ns"] for row in serving)}
        background = {**serving[0], **span, "kind": "background_compile", "request_ids": []}
        return [*(row for row in rows if row["phase"] != "serving"), background]

    rewrite(directory, hidden)
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "by its server's account" in failed(summary)["stalls explained"]


def test_a_stall_of_unknown_cause_opens_the_gate_on_the_longest_alone(tmp_path):
    summary = stopped(tmp_path / "run", 100, 200)
    assert gate(summary, "longest stall")["verdict"] == "INCONCLUSIVE"
    assert {gate(summary, name)["verdict"] for name in ("recompiles", "stall per minute", "requests hit")} == {"PASS"}
    reason = failed(summary)[CHECK]
    assert reason.startswith("compiled stood still 2 times (100 s into trial 1, 200 s into trial 1), up to 3")
    assert reason.endswith(" requests waited, and no compile event tells why.")
    assert summary["headline"].endswith(reason)
    assert "raise gates.max_stall_s" in summary["advice"]["text"]


def test_many_of_them_are_counted(tmp_path):
    reason = failed(stopped(tmp_path / "run", 80, 100, 160, 200, 240))[CHECK]
    assert "5 times (80 s into trial 1, 100 s into trial 1, 160 s into trial 1, 2 more), up to" in reason


@pytest.mark.parametrize(
    ("seconds", "control", "gates"),
    [(0.6, (), BUDGET), (3.0, (), QUIET.gates), (3.0, (100,), BUDGET)],
    ids=["shorter than the limit", "a higher limit", "the host's, as the control bore it too"],
)
def test_what_is_allowed_or_the_hosts_opens_nothing(tmp_path, seconds, control, gates):
    summary = stopped(tmp_path / "run", 100, seconds=seconds, control=control, gates=gates)
    assert CHECK not in failed(summary)
    assert gate(summary, "longest stall")["verdict"] == "PASS"


def test_what_an_event_explains_is_no_stall_of_unknown_cause(tmp_path):
    summary = analyze(write_run(tmp_path / "run", replace(STALLED, gates=BUDGET)))
    assert CHECK not in failed(summary)
    assert gate(summary, "longest stall")["verdict"] == "FAIL"


@pytest.mark.parametrize(("at_s", "opened"), [(20, "cold longest stall"), (200, "longest stall")])
def test_a_stall_is_held_to_the_budget_of_its_part(tmp_path, at_s, opened):
    gates = {**BUDGET, "cold_s": 60, "cold": {"max_stall_s": 2.0}}
    summary = stopped(tmp_path / "run", at_s, gates=gates)
    verdicts = {name: gate(summary, name)["verdict"] for name in ("cold longest stall", "longest stall")}
    assert [name for name, verdict in verdicts.items() if verdict == "INCONCLUSIVE"] == [opened]


@pytest.mark.parametrize(
    ("begun", "work_s", "ok"),
    [(True, 0.1, False), (True, 9.0, True), (True, math.inf, True), (False, math.inf, False)],
    ids=["beyond its prompts", "within them", "nobody knows what they take", "no prompt came"],
)
def test_what_its_prompts_may_have_taken_is_no_stall_of_unknown_cause(tmp_path, begun, work_s, ok):
    run = Run.of(read_run(write_run(tmp_path / "run", replace(QUIET, gates=BUDGET))))
    seen = seen_outside(run)["compiled"]
    start_ns = run.trials[0].first_ns + 50 * SECOND
    stall = Stall(
        arm="compiled",
        trial=1,
        replica="compiled-0",
        start_ns=start_ns,
        end_ns=start_ns + 3 * SECOND,
        cause=UNKNOWN,
        requests=np.arange(4),
        begun=begun,
        work_s=work_s,
    )
    check = check_unknown(run, replace(seen, stalls=(stall,)))
    assert (check.ok, check.gates) == (ok, () if ok else ("longest stall",))


def test_a_search_for_load_does_not_ask(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    stopped(directory, 100)
    run = Run.of(read_run(directory))
    for searched in (False, True):
        monkeypatch.setattr("analysis.judging.checks.telemetry.is_search", lambda run, searched=searched: searched)
        asked = {check.check for check in check_telemetry(run, seen_outside(run))}
        assert (CHECK in asked) is not searched


def test_a_release_that_stood_still_is_not_doubted_for_it(tmp_path):
    directory = tmp_path / "run"
    assert CHECK in failed(stopped(directory, 100))
    arm = read_release(directory).arms["compiled"]
    assert CHECK not in (*arm.doubts, *arm.compile_doubts)
