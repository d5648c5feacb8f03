"""What is kept of a run: what its records show now, and every doubt of it."""

from __future__ import annotations

import copy
import json
import random
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.records.documents import write_document
from analysis.records.run_list import listed_runs, write_run_list
from analysis.records.run_records import read_run
from analysis.records.schemas import BED, COMPILE_EVENTS
from analysis.records.tables import RecordError, RecordWriter, read_table
from analysis.releases.comparison import arms_to_compare, compare_releases
from analysis.releases.conditions import departures
from analysis.releases.history import History, accept, before, by_time, days, read_history
from analysis.releases.release import Release, read_release, release_of
from analysis.releases.run_figures import ArmFigures, arm_figures
from analysis.report.release import release_html, release_junit, release_markdown, release_table
from analysis.run.run import Run
from analysis.settings.release_limits import ReleaseLimits
from analysis.summary.summary import analyze, write_summary
from tests.fakes.machines import FakeBed
from tests.fakes.request_rows import unstate
from tests.fakes.results import DAY_NS, Build, release
from tests.fakes.runs import DAYS_APART, EAGER, SECOND, Compile, FakeArm, FakeRun, start_of, write_run

RUN = FakeRun(arms=(EAGER, FakeArm(name="compiled")), trials=2, duration_s=60, rate=1, gates={"draws": 99})
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


ARMS = {"compiled": "compiled"}
COMMITTED = Build(environment={"machine": "0123456789ab", "git_commit": "4b1f0c6e", "versions": {"torch": "2.11"}})


def history(*releases: Release) -> History:
    return History(releases=by_time(releases))


def test_record_holds_all_that_a_comparison_reads(tmp_path: Path) -> None:
    build = Build(luck=None, cache={"hit": 2.0, "miss": 1.0}, doubts=("generator lag",), counts={"recompiles": [1, 0]})
    kept = release(build, day=3, seed=1)
    assert read_release(accept(kept, tmp_path / "new")) == kept


ANSWERS = {"count": 9, "mean": 2.0, "variance": 1.0, "up_to": [9] * 22, "near": [9] * 22}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "other"}, "no record"),
        ({"schema": 9}, "schema 9"),
        *(
            ({"arms": {"compiled": {"figures": {"p99_e2e_ms": rows}}}}, "p99_e2e_ms")
            for rows in ([[1, "fast", None, None]], [3.0], [[1, 300.0, 0.1, 0]], [[1, 300.0, 0.1, -3]])
        ),
        *(
            ({"arms": {"compiled": {"answers": ANSWERS | change}}}, "answers")
            for change in ({"up_to": [9]}, {"up_to": [*range(21), 10]}, {"near": [9] * 21 + [8]}, {"count": 1e300})
        ),
        ({"created_ns": 1e30}, "1e.30"),
        ({"created_ns": None}, "None"),
    ],
)
def test_a_document_that_is_no_record_is_refused_in_one_line(change, expected, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_document(path, release(Build(), day=0, seed=1).to_dict() | change)
    with pytest.raises(RecordError, match=expected) as refused:
        read_release(path)
    assert "\n" not in str(refused.value)
    path.write_text(json.dumps(release(Build(), day=0, seed=1).to_dict()))
    with pytest.raises(RecordError, match="no checksum"):
        read_release(path)


JUNK = (None, True, -1, 1e300, "", "x" * 300, [], [[]], {}, {"": None}, [[1, 2, 3, 4]], [["a", 1, None, None]])


def junked(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced by something else."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(JUNK)
    copied = copy.copy(value)
    place = rng.choice(list(copied) if isinstance(copied, dict) else range(len(copied)))
    copied[place] = junked(copied[place], rng)
    return copied


@pytest.mark.parametrize("seed", range(12))
def test_record_with_anything_in_it_is_compared_or_refused_in_words(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kept = json.loads(json.dumps(release(COMMITTED, day=0, seed=1).to_dict()))
    path = tmp_path / "record.json"
    for _ in range(2):
        key = rng.choice(["arms", "arms", "arms", "conditions", "environment", "run_id", "trials", "created_ns"])
        kept[key] = junked(kept[key], rng)
    write_document(path, kept)
    candidate = release(COMMITTED, day=1, seed=1)
    try:
        read = read_history(path)
        arms = arms_to_compare(read.newest, candidate)
        document = compare_releases(read, candidate, arms=arms, limits=ReleaseLimits())
    except RecordError:
        return
    json.dumps(document, allow_nan=False)
    for show in (release_html, release_markdown, release_table):
        assert show(document)
    ET.fromstring(release_junit(document))


def test_newest_before_the_candidate_is_the_baseline() -> None:
    runs = [release(Build(), day=day, seed=1) for day in (4, 0, 2, 9)]
    candidate = release(Build(), day=5, seed=1)
    earlier = before(history(*runs, candidate), candidate)
    assert [item.run_id for item in earlier.releases] == ["run-1-0", "run-1-2", "run-1-4"]


def test_runs_under_other_conditions_tell_nothing() -> None:
    other = replace(Build(), conditions={"traffic": {"rate": 8.0}, "slo": []})
    runs = history(release(other, day=0, seed=1), release(Build(), day=1, seed=1))
    candidate = release(Build(), day=2, seed=1)
    assert [item.run_id for item in runs.alike(candidate, ARMS)] == ["run-1-1"]
    document = compare_releases(runs, candidate, arms=ARMS, limits=ReleaseLimits())
    assert "1 earlier run had other arms, traffic, model or objectives" in " ".join(document["notes"])


def test_repeats_of_the_newest_build_share_out_its_spread() -> None:
    earlier = [release(COMMITTED, day=day, seed=1) for day in range(5)]
    spreads = []
    for runs in (earlier, earlier[-1:]):
        document = compare_releases(
            history(*runs), release(COMMITTED, day=5, seed=1), arms=ARMS, limits=ReleaseLimits()
        )
        assert len(document["baseline"]["runs"]) == len(runs)
        spreads += [row["spread"] for row in document["figures"] if row["figure"] == "process_peak_bytes"]
    assert spreads[0] < 0.8 * spreads[1]


def test_runs_at_one_time_on_one_machine_had_one_day() -> None:
    beside = [release(COMMITTED, day=0, seed=seed) for seed in (1, 2)]
    elsewhere = release(replace(COMMITTED, environment={"machine": "ba9876543210"}), day=0, seed=3)
    later = release(COMMITTED, day=1, seed=4)
    assert sorted(map(len, days([later, elsewhere, *beside]))) == [1, 1, 2]
    assert tuple(beside) in days([later, elsewhere, *beside])
    nothing_known = replace(beside[0], starts_ns=())
    assert days([nothing_known, beside[1]]) == [(nothing_known,), (beside[1],)]


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {**COMMITTED.environment, "git_commit": "ffffffff"}},
        {"environment": {**COMMITTED.environment, "versions": {"torch": "2.12"}}},
        {"config": {**COMMITTED.config, "engine": {"slots": 16}}},
        {"doubts": ("generator lag",)},
    ],
)
def test_another_build_or_a_doubtful_run_is_no_repeat(changes) -> None:
    runs = history(release(replace(COMMITTED, **changes), day=0, seed=1), release(COMMITTED, day=1, seed=1))
    candidate = release(COMMITTED, day=2, seed=1)
    assert [item.run_id for item in runs.repeats(ARMS, runs.alike(candidate, ARMS))] == ["run-1-1"]


def test_what_may_be_the_cause_is_listed() -> None:
    one = release(COMMITTED, day=0, seed=1)
    two = release(
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


def test_file_that_is_no_record_in_a_folder_is_named(tmp_path: Path) -> None:
    accept(release(Build(), day=0, seed=1), tmp_path)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "compare.toml").write_text("")
    read = read_history(tmp_path)
    assert len(read.releases) == 1
    assert len(read.unread) == 1
    assert "notes.json" in read.unread[0]


def test_copy_of_a_run_under_another_name_is_the_same_run(tmp_path: Path) -> None:
    one = release(Build(), day=1, seed=1)
    copied = replace(one, run_id="copy")
    part = replace(copied, starts_ns=one.starts_ns[1:], created_ns=one.created_ns + DAY_NS)
    for other in (copied, part):
        with pytest.raises(RecordError, match="run-1-1 and copy hold the same trial"):
            compare_releases(history(one), other, arms=ARMS, limits=ReleaseLimits())
    assert not before(history(one), copied).releases
    for name, item in (("one", one), ("copy", copied)):
        write_document(tmp_path / f"{name}.json", item.to_dict())
    assert len(read_history(tmp_path).releases) == 1


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
