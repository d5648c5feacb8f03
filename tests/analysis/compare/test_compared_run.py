"""What a comparison reads of a run: what its records show now, and every doubt of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.compare.compared_run import compared_run_of, read_compared
from analysis.compare.comparison import compare_runs
from analysis.compare.conditions import departures
from analysis.compare.run_figures import ArmFigures, arm_figures
from analysis.records.joining import listed_runs, write_run_list
from analysis.records.run_records import read_run
from analysis.records.schemas import BED, COMPILE_EVENTS
from analysis.records.tables import RecordError, RecordWriter, read_table
from analysis.run.run import Run
from analysis.settings.compare_limits import CompareLimits
from analysis.summary.summary import analyze, write_summary
from tests.fakes.machines import FakeBed
from tests.fakes.request_rows import unstate
from tests.fakes.results import DAY_NS, Build, run_of
from tests.fakes.runs import DAYS_APART, EAGER, SECOND, Compile, FakeArm, FakeRun, start_of, write_run

RUN = FakeRun(arms=(EAGER, FakeArm(name="compiled")), trials=2, duration_s=60, rate=1)
SHORT = replace(RUN, trials=1)


def without_events(path: Path, arm: str) -> None:
    """The table of events holds none of the arm, and nothing says how many there were."""
    rows = [row for row in read_table(path, COMPILE_EVENTS)[0].to_pylist() if row["arm"] != arm]
    path.unlink()
    with RecordWriter(path, COMPILE_EVENTS) as writer:
        for row in rows:
            writer.append(row)
    unstate(path)


def test_run_is_judged_as_its_records_are_now_whatever_its_summary_said(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", RUN)
    write_summary(analyze(directory), directory / "summary.json")
    assert "complete" not in read_compared(directory).arms["compiled"].doubts
    shutil.rmtree(directory / "trial-02")
    run = read_compared(directory)
    assert "complete" in run.arms["compiled"].doubts
    assert "complete" in run.arms["compiled"].compile_doubts


def test_compiling_arm_without_any_event_says_nothing_of_compiles(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", RUN)
    for trial in (1, 2):
        without_events(directory / f"trial-{trial:02}" / "compile_events.arrow", "compiled")
    arms = read_compared(directory).arms
    assert not {"recompiles", "warmup_compiles", "compile_s"} & set(arms["compiled"].figures.values)
    assert arms["eager"].figures.values["recompiles"][1][0] == 0.0


@pytest.mark.parametrize("arm", ["compiled"])
def test_counts_of_a_server_that_died_are_open(tmp_path: Path, arm: str) -> None:
    directory = write_run(tmp_path / "run", RUN)
    path = directory / "trial-02" / "trial.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["deaths"] = [{"arm": arm, "replica": f"{arm}-0", "exit_code": -9, "at_ns": facts["start_ns"]}]
    facts.pop("crc32", None)
    path.write_text(json.dumps(facts), encoding="utf-8")
    arms = read_compared(directory).arms
    assert {name for name in arms if "alive" in arms[name].compile_doubts} == {arm}


def test_trial_whose_events_are_lost_leaves_the_counts_of_the_others_open(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", RUN)
    without_events(directory / "trial-02" / "compile_events.arrow", "compiled")
    arm = read_compared(directory).arms["compiled"]
    assert set(arm.figures.values["recompiles"]) == {1}
    assert "compile events of each trial" in arm.compile_doubts
    assert "compile events of each trial" not in arm.doubts


def test_events_that_are_cut_off_leave_counts_open(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", replace(RUN, stated=True))
    path = directory / "trial-01" / "compile_events.arrow"
    path.write_bytes(path.read_bytes()[: int(0.7 * path.stat().st_size)])
    arm = read_compared(directory).arms["compiled"]
    assert "records" in arm.compile_doubts


def edited(directory: Path, edit) -> Path:
    """Each trial.json of the run, as `edit` leaves it."""
    for path in directory.glob("trial-*/trial.json"):
        info = json.loads(path.read_text())
        edit(info)
        path.write_text(json.dumps(info))
    return directory


def test_card_without_references_is_not_known_by_those_of_another_card(tmp_path: Path) -> None:
    def failed(info):
        for item in info["references"]:
            if item["device"] == "cuda:1":
                item |= {"error": "CUDA out of memory", "matmul_tflops": None}

    watched = replace(RUN, bed=FakeBed(swap=False))
    assert "matmul_tflops" in read_compared(write_run(tmp_path / "whole", watched)).arms["compiled"].references
    arms = read_compared(edited(write_run(tmp_path / "run", watched), failed)).arms
    assert "matmul_tflops" in arms["eager"].references
    assert arms["compiled"].references == {}


def test_a_run_is_identified_by_the_start_of_each_trial_and_its_seed(tmp_path: Path) -> None:
    one = read_compared(write_run(tmp_path / "one", RUN))
    assert one.is_same_run(read_compared(Path(shutil.copytree(tmp_path / "one", tmp_path / "copy"))))
    assert len(one.starts_ns) == 2
    assert not one.is_same_run(read_compared(write_run(tmp_path / "other", replace(RUN, day=1))))


@pytest.mark.parametrize(("other", "kept"), [("aaaa", "aaaa"), ("bbbb", None)])
def test_runs_that_were_joined_over_machines_are_of_none_of_them(tmp_path: Path, other: str, kept: str | None) -> None:
    directories = [
        write_run(
            tmp_path / f"run-{day}", replace(SHORT, seed=day, day=day * DAYS_APART, environment={"machine": machine})
        )
        for day, machine in enumerate(("aaaa", other))
    ]
    write_run_list(tmp_path / "joined", listed_runs(directories))
    assert compared_run_of(tmp_path / "joined").machine == kept


ARMS = {"compiled": "compiled"}
COMMITTED = Build(environment={"machine": "0123456789ab", "git_commit": "4b1f0c6e", "versions": {"torch": "2.11"}})


def test_what_may_be_the_cause_is_listed() -> None:
    one = run_of(COMMITTED, day=0, seed=1)
    two = run_of(
        replace(
            COMMITTED,
            trials=6,
            environment={**COMMITTED.environment, "machine": "ba9876543210"},
            config={**COMMITTED.config, "compile": {"mode": "max-autotune"}},
        ),
        day=1,
        seed=1,
    )
    assert [item.text for item in departures(one, two, ARMS)] == [
        "machine 0123456789ab → ba9876543210",
        "compiled.compile.mode none → max-autotune",
        "trials 4 → 6",
    ]


def test_copy_of_a_run_under_another_name_is_the_same_run() -> None:
    one = run_of(Build(), day=1, seed=1)
    copied = replace(one, run_id="copy")
    part = replace(copied, starts_ns=one.starts_ns[1:], created_ns=one.created_ns + DAY_NS)
    for other in (copied, part):
        with pytest.raises(RecordError, match="run-1-1 and copy hold the same trial"):
            compare_runs(one, other, arms=ARMS, limits=CompareLimits())


@pytest.mark.parametrize(
    ("conditions", "text"),
    [
        ({"traffic": {"rate": 8.0}, "slo": []}, "traffic.rate 4 → 8"),
        ({"traffic": {"rate": 4.0, "trace": "day.csv"}, "slo": []}, "traffic.trace none → day.csv"),
        ({"traffic": {}, "slo": []}, "traffic.rate 4 → none"),
    ],
)
def test_other_traffic_is_refused_also_where_one_run_lacks_a_setting(conditions: dict[str, Any], text: str) -> None:
    one, other = run_of(Build(), day=0, seed=1), run_of(replace(Build(), conditions=conditions), day=1, seed=1)
    with pytest.raises(RecordError, match=text):
        compare_runs(one, other, arms=ARMS, limits=CompareLimits())


NAIVE = FakeArm(name="naive", compiles=(Compile(at_s=60.0, seconds=4.0), Compile(at_s=90.0, seconds=2.0)))
NAIVE_RUN = FakeRun(arms=(EAGER, NAIVE), trials=2, duration_s=180, slo={"p99_e2e_ms": 5000})
PROCESS = {"kind": "process", "name": "naive-0", "arm": "naive"}


def figures(directory: Path, arm: str = "naive") -> ArmFigures:
    return arm_figures(Run.of(read_run(directory)), arm)


def bed(directory: Path, trial: int, rows: list[dict]) -> None:
    with RecordWriter(directory / f"trial-{trial:02}" / "bed.arrow", BED) as writer:
        for row in rows:
            writer.append({"trial": trial, "host": "run", **row})


def watched(row: dict, column: str, *levels: float | None, trial: int = 1) -> list[dict]:
    """The row again and again through the traffic of a minute, with these levels of the column."""
    step = 58 * SECOND // max(1, len(levels) - 1)
    return [row | {"at_ns": start_of(trial) + SECOND + at * step, column: level} for at, level in enumerate(levels)]


def test_every_trial_has_latencies_with_their_spread_and_compiles(tmp_path: Path) -> None:
    own = figures(write_run(tmp_path / "run", NAIVE_RUN)).values
    for key in ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_e2e_ms", "p50_itl_ms"):
        assert set(own[key]) == {1, 2}
    value, luck = own["p50_tpot_ms"][1]
    assert value > 0
    assert luck.spread is not None
    assert 0.005 < luck.spread < 0.3
    assert luck.degrees == 2.0
    good, good_luck = own["good_pct"][1]
    assert 50 < good <= 100
    assert good_luck.spread is not None
    counted = ("warmup_compiles", "recompiles", "serving_compile_s", "compile_s", "startup_s")
    assert [own[key][1][0] for key in counted] == pytest.approx([1.0, 2.0, 6.0, 5.0, 3.0])


def test_memory_is_that_of_samples_where_every_trial_has_them(tmp_path: Path) -> None:
    arm = FakeArm(name="naive", memory_bytes={"process_peak": 600, "device_peak": 50})
    directory = write_run(tmp_path / "run", FakeRun(arms=(EAGER, arm), trials=2, duration_s=60, rate=1))
    for trial, peak, source in ((0, 600.0, "replicas"), (1, 600.0, "replicas"), (2, 905.0, "process samples")):
        if trial:
            early = PROCESS | {"at_ns": start_of(trial) - SECOND, "memory_bytes": 2000}  # before the traffic
            bed(directory, trial, [early, *watched(PROCESS, "memory_bytes", 901, 905, 903, trial=trial)])
        own = figures(directory)
        assert [value for value, _ in own.values["process_peak_bytes"].values()] == [peak, peak]
        assert own.sources == {"process_peak_bytes": source, "device_peak_bytes": "replicas"}


def test_a_share_of_errors_has_the_spread_of_its_requests(tmp_path: Path) -> None:
    faulty = FakeRun(arms=(EAGER, FakeArm(name="naive", error_share=0.2)), duration_s=180)
    directory = write_run(tmp_path / "run", faulty)
    value, luck = figures(directory).values["error_pct"][1]
    assert 10.0 < value < 30.0
    assert luck.spread is not None
    assert 0.01 < luck.spread < 0.3
    none, unsure = figures(directory, "eager").values["error_pct"][1]
    assert (none, unsure.spread is not None and unsure.spread > 1.0) == (0.0, True)
