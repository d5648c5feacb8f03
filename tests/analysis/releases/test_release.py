"""What is kept of a run: what its records show now, and every doubt of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.run_list import listed_runs, write_run_list
from analysis.records.schemas import COMPILE_EVENTS
from analysis.records.tables import RecordWriter, read_table
from analysis.releases.release import ReleaseArm, read_release, release_of
from analysis.releases.run_figures import ArmFigures
from analysis.settings.release_limits import ReleaseLimits
from analysis.summary.summary import analyze, write_summary
from tests.fakes.beds import FakeBed
from tests.fakes.runs import DAYS_APART, EAGER, FakeArm, FakeRun, write_run

RUN = FakeRun(arms=(EAGER, FakeArm(name="compiled")), trials=2, duration_s=60, rate=1, gates={"draws": 99})
SHORT = replace(RUN, trials=1)


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


@pytest.mark.parametrize("arm", ["compiled"])
def test_counts_of_a_server_that_died_are_open(tmp_path: Path, arm: str) -> None:
    directory = write_run(tmp_path / "run", RUN)
    path = directory / "trial-02" / "trial.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["deaths"] = [{"arm": arm, "replica": f"{arm}-0", "exit_code": -9, "at_ns": facts["start_ns"]}]
    facts.pop("crc32", None)
    path.write_text(json.dumps(facts), encoding="utf-8")
    arms = read_release(directory).arms
    assert {name for name in arms if "alive" in arms[name].compile_doubts} == {arm}


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
    assert "matmul_tflops" in read_release(write_run(tmp_path / "whole", watched)).arms["compiled"].references
    arms = read_release(edited(write_run(tmp_path / "run", watched), failed)).arms
    assert "matmul_tflops" in arms["eager"].references
    assert arms["compiled"].references == {}


def test_arm_on_any_card_has_the_references_of_the_card_it_got(tmp_path: Path) -> None:
    def automatic(info):
        info["devices"] = {"eager": "cuda", "compiled": "auto"}
        info["bed"]["arms"] = {"eager": "cuda:1", "compiled": "cuda:0"}
        for item in info["references"]:
            item["matmul_tflops"] = {"cuda:0": 100.0, "cuda:1": 200.0}[item["device"]]

    arms = read_release(edited(write_run(tmp_path / "run", replace(RUN, bed=FakeBed())), automatic)).arms
    assert [arms[name].references["matmul_tflops"] for name in ("eager", "compiled")] == [200.0, 100.0]


def test_a_run_is_identified_by_the_start_of_each_trial_and_its_seed(tmp_path: Path) -> None:
    one = read_release(write_run(tmp_path / "one", RUN))
    assert one.is_same_run(read_release(Path(shutil.copytree(tmp_path / "one", tmp_path / "copy"))))
    assert len(one.starts_ns) == 2
    assert not one.is_same_run(read_release(write_run(tmp_path / "other", replace(RUN, day=1))))


@pytest.mark.parametrize(("other", "kept"), [("aaaa", "aaaa"), ("bbbb", None)])
def test_runs_that_were_joined_over_machines_are_of_none_of_them(tmp_path: Path, other: str, kept: str | None) -> None:
    directories = [
        write_run(
            tmp_path / f"run-{day}", replace(SHORT, seed=day, day=day * DAYS_APART, environment={"machine": machine})
        )
        for day, machine in enumerate(("aaaa", other))
    ]
    write_run_list(tmp_path / "joined", listed_runs(directories))
    assert release_of(tmp_path / "joined").machine == kept


@pytest.mark.parametrize(
    ("device", "policy", "spread"),
    [
        ("cuda", {"enabled": True, "mode": "max-autotune"}, 0.05),
        ("cuda", {"enabled": True, "mode": "max-autotune", "artifact": "arm.compiled"}, 0.03),
        ("cuda", {"enabled": True, "mode": "reduce-overhead"}, 0.03),
        ("cpu", {"enabled": True, "mode": "max-autotune"}, 0.03),
    ],
)
def test_arms_that_search_for_kernels_on_a_gpu_are_allowed_more_variance(
    device: str, policy: dict[str, object], spread: float
) -> None:
    config = {"model": {"device": device}, "compile": policy}
    arm = ReleaseArm(figures=ArmFigures(values={}, sources={}), config=config, references={}, cache={})
    assert arm.start_spread(ReleaseLimits(restart_spread=0.03, tuning_spread=0.04)) == pytest.approx(spread)
