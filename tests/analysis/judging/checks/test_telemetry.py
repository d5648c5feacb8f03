"""Telemetry that is lost, wrong or silent never makes a PASS of the gates on compiles, and a check says why."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from analysis.blackbox.stalls import UNKNOWN, Stall
from analysis.judging.checks.stalls import check_unknown
from analysis.judging.checks.telemetry import check_telemetry
from analysis.judging.run_gates import seen_outside
from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.sums import sums_path
from analysis.records.tables import RecordWriter, read_table
from analysis.releases.release import read_release
from analysis.run.run import Run
from analysis.summary.summary import analyze, read_run
from tests.fakes.runs import EAGER, SECOND, Compile, FakeArm, FakeRun, write_run

# Lenient in all but the number of recompiles.
GATES = {
    "max_stall_s": 1000,
    "max_stall_s_per_min": 60,
    "max_requests_hit_pct": 100,
    "metrics": ["e2e"],
    "quantile": 0.9,
    "min_blocks": 8,
    "draws": 99,
}
QUIET = FakeRun(gates=GATES, duration_s=300, rate=2)
NAIVE = FakeArm(name="compiled", compiles=[Compile(at_s=20 + 60 * step, seconds=3) for step in range(3)])
STALLED = replace(QUIET, arms=(EAGER, NAIVE))


def gate(summary, name="recompiles"):
    return next(row for row in summary["gates"] if row["gate"] == name)


def failed(summary):
    return {row["check"]: row["reason"] for row in summary["validity"] if not row["ok"]}


def rewrite(directory, change):
    """The compile events are what `change` makes of their rows."""
    path = directory / "trial-01" / "compile_events.arrow"
    rows = change(read_table(path, COMPILE_EVENTS)[0].to_pylist())
    with path.open("wb") as file, pa.ipc.new_stream(file, COMPILE_EVENTS) as stream:
        stream.write_table(pa.Table.from_pylist(rows, schema=COMPILE_EVENTS))


def count(directory, **events):
    """trial.json tells how many compile events each replica counted."""
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    info["final"] = {f"{arm}-0": {"counters": {"compile_events": number}} for arm, number in events.items()}
    path.write_text(json.dumps(info))


def test_telemetry_that_is_whole_passes(tmp_path):
    directory = write_run(tmp_path / "run", QUIET)
    count(directory, eager=0, compiled=1)
    assert gate(analyze(directory))["verdict"] == "PASS"


def test_fewer_rows_than_were_counted_open_the_gates_on_compiles(tmp_path):
    directory = write_run(tmp_path / "run", QUIET)
    count(directory, eager=0, compiled=5)
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "compiled-0 counted 5 in trial 1 and 1 are recorded" in failed(summary)["event counts"]


def test_a_replica_that_lived_and_told_no_count_opens_them(tmp_path):
    directory = write_run(tmp_path / "run", QUIET)
    count(directory, eager=0)
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "compiled-0 did not tell its counts" in failed(summary)["event counts"]


def test_a_compile_that_went_on_at_the_end_opens_them(tmp_path):
    directory = write_run(tmp_path / "run", QUIET)
    count(directory, eager=0, compiled=1)
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    info["final"]["compiled-0"]["compiling"] = {"start_ns": 5, "seconds": 53.0, "shape": "prefill 2x64"}
    path.write_text(json.dumps(info))
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "INCONCLUSIVE"
    assert "was 53.0 s into a compile for prefill 2x64 when the records" in failed(summary)["event counts"]


def test_missing_steps_are_told_and_open_no_gate(tmp_path):
    directory = write_run(tmp_path / "run", QUIET)
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    info["final"] = {f"{arm}-0": {"counters": {"compile_events": 1, "steps": 21}} for arm in ("eager", "compiled")}
    info["final"]["eager-0"]["counters"] = {"compile_events": 0, "steps": 20}
    path.write_text(json.dumps(info))
    summary = analyze(directory)
    assert failed(summary)["step counts"] == (
        "Engine steps are missing: compiled-0 counted 21 in trial 1 and 20 are recorded."
    )
    assert gate(summary)["verdict"] == "PASS"


def test_numbers_missing_among_the_events_open_them(tmp_path):
    directory = write_run(tmp_path / "run", QUIET)
    rewrite(directory, lambda rows: [row | {"event_id": "1-compiled-0-4"} for row in rows])
    assert "counted 5 in trial 1 and 1 are recorded" in failed(analyze(directory))["event counts"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "recompila"}, "of an unknown kind ('recompila')"),
        ({"kind": None}, "of an unknown kind (none)"),
        ({"phase": "serwing"}, "of an unknown phase ('serwing')"),
        ({"arm": "compilee"}, "of an unknown arm ('compilee')"),
        ({"arm": None}, "of an unknown arm (none)"),
        ({"trial": 7}, "of an unknown trial (7)"),
        ({"replica": "compiled-9"}, "of an unknown replica ('compiled-9')"),
        ({"start_ns": None}, "with times that are missing or run backwards"),
        ({"end_ns": None}, "with times that are missing or run backwards"),
        ({"end_ns": 5}, "with times that are missing or run backwards"),
        ({"start_ns": 1}, "with times outside of the run"),
        ({"end_ns": 9 * 10**18}, "with times outside of the run"),
    ],
    ids=str,
)
def test_an_event_without_a_place_opens_the_gates_and_fails_none(tmp_path, change, reason):
    directory = write_run(tmp_path / "run", STALLED)
    rewrite(directory, lambda rows: [row | (change if row["phase"] == "serving" else {}) for row in rows])
    summary = analyze(directory)
    assert gate(summary)["verdict"] == gate(summary, "longest stall")["verdict"] == "INCONCLUSIVE"
    assert f"3 compile events {reason}" in failed(summary)["placed compile events"]


def test_a_kernel_that_is_first_met_under_traffic_fails_the_gate_on_recompiles(tmp_path):
    kernel = Compile(at_s=100, seconds=0.4, kind="jit", reason="triton compiled _decode for SPLITS=8")
    directory = write_run(tmp_path / "run", replace(QUIET, arms=(EAGER, FakeArm(name="compiled", compiles=[kernel]))))
    summary = analyze(directory)
    assert gate(summary)["verdict"] == "FAIL"
    assert gate(summary)["reason"].startswith("1 recompile while serving (1 of them JIT compiles of kernels), longest")
    assert [arm["compile"]["jit_compiles"] for arm in summary["arms"]] == [0, 1]


def write(path, rows):
    path.unlink()
    with RecordWriter(path, REQUESTS) as writer:
        for row in rows:
            writer.append(row)
    sums_path(path).unlink()


def test_a_stall_longer_than_its_request_is_no_stall(tmp_path):
    """A flipped bit in one request's account once failed an arm: "held up one request for 7.2e+09 s"."""
    directory = write_run(tmp_path / "run", QUIET)
    path = directory / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    rows[-1]["compile_stall_ns"] = 1 << 62
    write(path, rows)
    summary = analyze(directory)
    assert gate(summary, "longest stall")["verdict"] == "INCONCLUSIVE"
    assert "1 request has times" in failed(summary)["records"]


@pytest.mark.parametrize("change", [{"arm": "eagfr"}, {"trial": 9}, {"phase": "meazure"}], ids=str)
def test_requests_without_a_place_decide_nothing(tmp_path, change):
    directory = write_run(tmp_path / "run", QUIET)
    path = directory / "trial-01" / "requests-0.arrow"
    rows = read_table(path, REQUESTS)[0].to_pylist()
    write(path, [rows[0] | change, *rows[1:]])
    summary = analyze(directory)
    assert summary["overall"] == "INCONCLUSIVE"
    assert "1 request of an unknown" in failed(summary)["placed requests"]


BLIND = "torch 2.99.0 is not among the versions whose compiler is read"


@pytest.mark.parametrize(("run", "verdict"), [(QUIET, "INCONCLUSIVE"), (STALLED, "FAIL")])
def test_an_arm_that_cannot_see_its_compilers_never_passes_the_gates_on_compiles(tmp_path, run, verdict):
    directory = write_run(tmp_path / "run", run)
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    info["startup"] = {"compiled": {"items_ns": {}, "blind_spots": [BLIND]}, "eager": {"blind_spots": []}}
    path.write_text(json.dumps(info))
    summary = analyze(directory)
    assert gate(summary)["verdict"] == verdict
    assert BLIND in failed(summary)["compilers seen"]
    assert [arm["compile"]["blind_spots"] for arm in summary["arms"]] == [[], [BLIND]]


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
