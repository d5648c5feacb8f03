"""What is kept of a run: what its records show now, and every doubt of it."""

import shutil
from dataclasses import replace
from pathlib import Path

from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import RecordWriter, read_table
from analysis.releases.release import read_release
from analysis.summary.summary import analyze, write_summary
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run

RUN = FakeRun(arms=(EAGER, FakeArm(name="compiled")), trials=2, duration_s=120, gates={"draws": 99})


def without_events(path: Path, arm: str) -> None:
    """The table of events holds none of the arm, and nothing says how many there were."""
    rows = [row for row in read_table(path, COMPILE_EVENTS)[0].to_pylist() if row["arm"] != arm]
    path.unlink()
    with RecordWriter(path, COMPILE_EVENTS) as writer:
        for row in rows:
            writer.append(row)
    for sums in path.parent.glob("*.sums"):
        sums.unlink()


def test_run_is_judged_as_its_records_are_now_whatever_its_summary_said(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", RUN)
    write_summary(analyze(directory), directory / "summary.json")
    assert "complete" not in read_release(directory).arms["compiled"].doubts
    shutil.rmtree(directory / "trial-02")
    release = read_release(directory)
    assert "complete" in release.arms["compiled"].doubts
    assert "complete" in release.arms["compiled"].compile_doubts


def test_compiling_arm_without_any_event_says_nothing_of_compiles(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", RUN)
    for trial in (1, 2):
        without_events(directory / f"trial-{trial:02}" / "compile_events.arrow", "compiled")
    arms = read_release(directory).arms
    assert not {"recompiles", "warmup_compiles", "compile_s"} & set(arms["compiled"].figures.values)
    assert arms["eager"].figures.values["recompiles"][1][0] == 0.0


def test_trial_whose_events_are_lost_leaves_the_counts_of_the_others_open(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", RUN)
    without_events(directory / "trial-02" / "compile_events.arrow", "compiled")
    arm = read_release(directory).arms["compiled"]
    assert set(arm.figures.values["recompiles"]) == {1}
    assert "compile events of each trial" in arm.compile_doubts
    assert "compile events of each trial" not in arm.doubts


def test_events_that_are_cut_off_leave_counts_open(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", replace(RUN, stated=True))
    path = directory / "trial-01" / "compile_events.arrow"
    path.write_bytes(path.read_bytes()[: int(0.7 * path.stat().st_size)])
    arm = read_release(directory).arms["compiled"]
    assert "records" in arm.compile_doubts
