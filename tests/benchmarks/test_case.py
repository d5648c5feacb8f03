"""The gallery shows what the kept records say now."""

from __future__ import annotations

import html
import json
import os
import struct
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from analysis.records.run_records import read_run
from analysis.report.html import html_report
from benchmarks.case import archive_of, archives, deviations, keep, main, verdict_file, verdict_of
from benchmarks.gallery import GALLERY, HEIGHT, WIDTH, alone, entries, index, outcome, pictures, summary_of
from benchmarks.kept import pack, unpack
from benchmarks.planted_arm import planted_in
from loadtests.experiments.reading import load
from loadtests.experiments.writing import to_toml
from tests.fakes.runs import FakeRun, write_run

KEPT = archives()


@pytest.mark.parametrize("archive", KEPT, ids=lambda archive: verdict_file(archive).stem)
def test_a_kept_case_is_judged_as_before(archive: Path) -> None:
    kept = json.loads(verdict_file(archive).read_text(encoding="utf-8"))
    verdict = verdict_of(unpack(archive))
    for gate, before in zip(verdict["gates"], kept["gates"], strict=True):
        assert gate["value"] == (None if before["value"] is None else pytest.approx(before["value"], rel=1e-6))
        assert {**gate, "value": None} == {**before, "value": None}
    assert {**verdict, "gates": None} == {**kept, "gates": None}


@pytest.mark.parametrize(
    ("staged", "seen", "unseen"),
    [
        ("staged-foreign-work-and-busy-host", {"foreign work", "busy host"}, {"throttling", "slow bed"}),
        ("staged-heavy-neighbour", {"foreign work", "throttling", "bed apart", "slow bed"}, {"busy host"}),
    ],
)
def test_a_trouble_that_was_staged_on_a_card_is_named(staged: str, seen: set[str], unseen: set[str]) -> None:
    kept = json.loads(verdict_file(archive_of(staged)).read_text(encoding="utf-8"))
    checks = {check["check"] for check in kept["failed_checks"]}
    assert seen <= checks
    assert not unseen & checks


def test_runs_of_a_case_are_judged_together(tmp_path: Path) -> None:
    for number, day in ((1, "20260101T000000Z"), (2, "20260102T000000Z")):
        run = FakeRun(seed=number, duration_s=60.0, trials=1, stated=True, gates={"draws": 99})
        keep(tmp_path / "case", write_run(tmp_path / f"{day}-case", run))
    verdict = verdict_of(tmp_path / "case")
    assert verdict["trials"] == 2
    assert verdict["overall"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    "case", ["case-planted-decode", "case-planted-others", "case-planted-processors", "case-planted-turns"]
)
def test_each_arm_of_a_planted_case_is_what_its_name_says(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    seen: list[list[str]] = []
    monkeypatch.setattr("benchmarks.case.tailgate", lambda words, arm_command: seen.append(words) or 99)
    assert main(["plant", case, "--out", "runs", "--seed", "7"]) == 99
    assert seen == [["run", case, "--out", "runs", "--seed", "7"]]
    faults = {arm.name: planted_in(os.environ["PLANTED"], ["--replica", f"{arm.name}-0"]) for arm in load(case).arms}
    assert faults["eager"] == faults.get("eager-twin", {}) == {}
    assert sum(map(bool, faults.values())) == len(set(faults) - {"eager", "eager-twin"})


def written(folder: Path, *settings: str) -> Path:
    folder.mkdir(exist_ok=True)
    text = to_toml(load("case-aa", settings=["trials.count=5", *settings], seed=77))
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    return folder


def test_a_run_of_the_registered_experiment_may_have_its_own_seed_and_number_of_trials(tmp_path: Path) -> None:
    assert deviations(written(tmp_path / "run")) == []


def test_what_is_not_as_registered_is_said_with_both_values(tmp_path: Path) -> None:
    run = written(tmp_path / "run", "gates.margin=0.2")
    assert deviations(run) == ["gates.margin is 0.2, registered 0.1"]
    assert deviations(run, ["gates"]) == deviations(run, ["gates.margin"]) == []


def test_a_run_that_nobody_registered_is_refused_before_anything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.case.CASES", tmp_path / "cases")
    run = written(tmp_path / "run")
    path = run / "experiment.toml"
    path.write_text(path.read_text(encoding="utf-8").replace('"case-aa"', '"mine"'), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["keep", "aa", str(run)])
    assert 'name is "mine", which no registered experiment has' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["keep", "aa", str(tmp_path / "nowhere")])
    assert "nowhere holds no experiment.toml: give the directory of a run" in capsys.readouterr().err
    assert not (tmp_path / "cases").exists()


def test_a_run_that_cannot_be_judged_with_those_that_are_kept_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.case.CASES", tmp_path / "cases")
    monkeypatch.setattr("benchmarks.case.write_others", dict)
    monkeypatch.setattr("benchmarks.kept.UNPACKED", tmp_path / "unpacked")
    first = write_run(tmp_path / "1-mine", FakeRun(duration_s=30, rate=1))
    other = write_run(tmp_path / "2-mine", FakeRun(duration_s=30, rate=1, seed=9, day=1, gates={"margin": 0.2}))
    assert main(["keep", "mine", str(first), "--allow-different", "name"]) == 0
    with pytest.raises(SystemExit):
        main(["keep", "mine", str(other), "--allow-different", "name"])
    assert "differs from 1 in gates.margin 0.2 (there not given)" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "cases").iterdir()) == ["mine.json", "mine.tar.xz"]
    assert [path.name for path in unpack(tmp_path / "cases" / "mine.tar.xz").iterdir() if path.name == "2"] == []


def test_an_archive_returns_what_was_packed_with_token_times_to_100_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.kept.UNPACKED", tmp_path / "unpacked")
    run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=2, stated=True))
    keep(tmp_path / "case", run, token_gaps=True)
    pack(tmp_path / "case", tmp_path / "case.tar.xz")
    (before,) = (tmp_path / "case").rglob("requests*.parquet")
    (after,) = unpack(tmp_path / "case.tar.xz").rglob("requests*.parquet")
    old, new = pq.read_table(before), pq.read_table(after)
    assert new.drop(["token_ns"]) == old.drop(["token_ns"])
    assert new["token_ns"].null_count == old["token_ns"].null_count
    for was, now in zip(old["token_ns"].to_pylist(), new["token_ns"].to_pylist(), strict=True):
        assert len(now or ()) == len(was or ())
        assert all(0 <= exact - rounded < 100_000 for exact, rounded in zip(was or (), now or (), strict=True))
        assert (now or [0])[0] == (was or [0])[0]
    assert read_run(after.parent.parent).problems == ()


SHOWN = entries()
AGAIN = "run `make gallery` again"


def test_the_index_says_what_the_records_say() -> None:
    assert (GALLERY / "README.md").read_text(encoding="utf-8") == index(), AGAIN


def test_each_kind_of_report_is_shown() -> None:
    outcomes = {entry.name: outcome(entry)["overall"] for entry in SHOWN}
    failed = ("fail", "widening", "planted", "unexplained", "ramp-back")
    assert {outcomes[name] for name in failed} == {"FAIL"}
    assert outcomes["inconclusive"] == outcomes["turns"] == "INCONCLUSIVE"
    assert outcomes["ramp-on"] == outcomes["pass"] == "PASS"
    assert set(outcomes) == {*failed, "inconclusive", "turns", "ramp-on", "pass", "frontier"}


@pytest.mark.parametrize("name", ["fail", "ramp-back"])
def test_a_page_has_the_headline_of_its_records(name: str) -> None:
    entry = next(entry for entry in SHOWN if entry.name == name)
    text = html.unescape(html_report(summary_of(entry)))
    assert outcome(entry)["headline"] in " ".join(text.split())


@pytest.mark.parametrize("name", [name for entry in SHOWN for name in pictures(entry)])
def test_each_picture_is_a_screen_and_small(name: str) -> None:
    content = (GALLERY / name).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT)
    assert 20_000 < len(content) <= 200_000  # an empty screen has 5 kB


def test_nothing_else_is_in_the_gallery() -> None:
    shown = {name for entry in SHOWN for name in pictures(entry)}
    assert {path.name for path in GALLERY.iterdir() if path.suffix != ".html"} == {"README.md"} | shown


def test_a_part_of_a_page_is_shown_under_its_head() -> None:
    page = '<head>\n<meta http-equiv="Content-Security-Policy" content="default-src">\n</head>\n<body>'
    hidden = "main > section:not(#looks), footer { display: none }"
    assert alone(page, "looks") == f"<head>\n<style>{hidden}</style>\n</head>\n<body>"
