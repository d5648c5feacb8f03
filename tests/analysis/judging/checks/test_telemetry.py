"""Telemetry that is lost, wrong or silent never makes a PASS of the gates on compiles, and a check says why."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from analysis.records.schemas import COMPILE_EVENTS, REQUESTS
from analysis.records.sums import sums_path
from analysis.records.tables import RecordWriter, read_table
from analysis.summary.summary import analyze
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

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
