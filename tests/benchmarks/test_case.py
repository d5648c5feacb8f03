"""The gallery shows what the kept records say now."""

from __future__ import annotations

import html
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from benchmarks.case import (
    EXPERIMENTS,
    OTHERS,
    archives,
    deviations,
    judged_cases,
    keep,
    main,
    verdict_file,
    verdict_of,
)
from benchmarks.gallery import GALLERY, HEIGHT, PAGES, WIDTH, alone, kept, pictures, summary_of
from benchmarks.kept import pack, unpack
from benchmarks.other_rules import (
    FAIL,
    PASS,
    Answers,
    kayenta,
    markdown,
    other_verdicts,
    p99_interval,
    shift_interval,
    threshold,
)
from benchmarks.planted_arm import planted_in
from tailgate.analysis.arrays import Floats
from tailgate.analysis.records.run_records import read_run
from tailgate.analysis.report.html import html_report
from tailgate.loadtests.experiments.reading import load, to_toml
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


def test_runs_of_a_case_are_judged_together(tmp_path: Path) -> None:
    for number, day in ((1, "20260101T000000Z"), (2, "20260102T000000Z")):
        run = FakeRun(seed=number, day=number, duration_s=60.0, trials=1, checksums=True)
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
    assert main(["plant", case, "--out", "runs", "--set", "seed=7"]) == 99
    path = EXPERIMENTS / f"{case}.toml"
    assert seen == [["run", str(path), "--out", "runs", "--set", "seed=7"]]
    faults = {arm.name: planted_in(os.environ["PLANTED"], ["--replica", f"{arm.name}-0"]) for arm in load(path).arms}
    assert faults["eager"] == faults.get("eager-twin", {}) == {}
    assert sum(map(bool, faults.values())) == len(set(faults) - {"eager", "eager-twin"})


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_registered_experiment_is_valid_and_has_the_name_of_its_file(path: Path) -> None:
    assert load(path).name == path.stem


def written(folder: Path, *settings: str) -> Path:
    folder.mkdir(exist_ok=True)
    text = to_toml(load(EXPERIMENTS / "case-aa.toml", settings=["trials.count=5", "seed=77", *settings]))
    (folder / "experiment.toml").write_text(text, encoding="utf-8")
    return folder


def test_what_is_not_as_registered_but_the_seed_and_the_trials_is_said_with_both_values(tmp_path: Path) -> None:
    assert deviations(written(tmp_path / "same")) == []
    run = written(tmp_path / "run", "gates.margin=0.2")
    assert deviations(run) == ["gates.margin is 0.2, registered 0.1"]
    assert deviations(run, ["gates"]) == deviations(run, ["gates.margin"]) == []


def test_an_unregistered_run_is_refused_before_anything_is_kept(
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
    monkeypatch.setattr("benchmarks.case.write_others", list)
    monkeypatch.setattr("benchmarks.kept.UNPACKED", tmp_path / "unpacked")
    first = write_run(tmp_path / "1-mine", FakeRun(duration_s=30, rate=1))
    other = write_run(tmp_path / "2-mine", FakeRun(duration_s=30, rate=1, seed=9, day=1, gates={"margin": 0.2}))
    assert main(["keep", "mine", str(first), "--allow-different", "name"]) == 0
    with pytest.raises(SystemExit):
        main(["keep", "mine", str(other), "--allow-different", "name"])
    assert "gates.margin 0.2 (in 1 not given)" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "cases").iterdir()) == ["mine.json", "mine.tar.xz"]
    assert [path.name for path in unpack(tmp_path / "cases" / "mine.tar.xz").iterdir() if path.name == "2"] == []


def test_an_archive_returns_what_was_packed_with_token_times_to_100_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.kept.UNPACKED", tmp_path / "unpacked")
    run = write_run(tmp_path / "run", FakeRun(duration_s=30, rate=2, checksums=True))
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


def test_the_gallery_has_the_verdict_and_the_pictures_of_each_page_and_nothing_else() -> None:
    text, shown = (GALLERY / "README.md").read_text(encoding="utf-8"), {"README.md"}
    for name in PAGES:
        files = pictures(name)
        assert f"\n`{name}`: **{kept(name)['overall']}**. " in text
        for file in files:
            assert f"]({file})" in text
            content = (GALLERY / file).read_bytes()
            assert content[:8] == b"\x89PNG\r\n\x1a\n"
            assert struct.unpack(">II", content[16:24]) == (WIDTH, HEIGHT), file
            assert 20_000 < len(content) <= 200_000, file  # an empty screen has 5 kB
        shown |= {*files}
    assert {path.name for path in GALLERY.iterdir() if path.suffix != ".html"} == shown


@pytest.mark.parametrize("name", ["fail", "ramp-back"])
def test_a_page_has_the_headline_of_its_records(name: str) -> None:
    text = html.unescape(html_report(summary_of(name)))
    assert kept(name)["headline"] in " ".join(text.split())


def test_a_part_of_a_page_is_shown_under_its_head() -> None:
    page = '<head>\n<meta http-equiv="Content-Security-Policy" content="default-src">\n</head>\n<body>'
    folded = '<details class="section" id="interim"'
    hidden = "main > :not(#interim), footer { display: none }"
    assert alone(f"{page}{folded}>", "interim") == f"<head>\n<style>{hidden}</style>\n</head>\n<body>{folded} open>"


def of(latency_ms: Floats, *, window_s: float = 600.0) -> Answers:
    """One trial with these latencies, which end one a second."""
    return Answers(
        latency_ms=latency_ms,
        trial=np.ones(latency_ms.size, dtype=np.int64),
        ended_s=np.arange(latency_ms.size, dtype=np.float64),
        window_s={1: window_s},
    )


BASE = np.linspace(100.0, 101.0, 2000)


@pytest.mark.parametrize(
    ("values", "others", "said"),
    [
        (BASE + 0.5, BASE, "FAIL"),  # a shift of any size that is known well
        (0.5 * BASE, BASE, "PASS (Low)"),
        # Among equals that happens one time in twenty; the interval of 98 % ends at the least difference.
        (np.array([210.0, 220.0, 230.0]), np.array([100.0, 101.0, 102.0]), "FAIL (3 points)"),
        (np.full(5, 2.0), np.full(5, 1.0), "cannot say (5 points)"),
        (np.full(5, 1.0), np.full(5, 1.0), "PASS (5 points)"),
    ],
)
def test_kayenta_classifies_as_its_judge_does(values: Floats, others: Floats, said: str) -> None:
    assert str(kayenta(of(values), of(others))) == said


def test_a_minute_in_which_nothing_ended_is_no_point() -> None:
    """A stalled server gives a monitor nothing to see; what ends after the window is not seen either."""
    stalled = Answers(
        latency_ms=np.array([10.0, 20.0, 100_000.0, 100_000.0]),
        trial=np.ones(4, dtype=np.int64),
        ended_s=np.array([1.0, 2.0, 181.0, 182.0]),
        window_s={1: 180.0},
    )
    assert stalled.series(60.0) == pytest.approx([19.9])
    steady = of(np.linspace(50.0, 60.0, 180), window_s=180.0)
    assert kayenta(stalled, steady, width_s=60.0).verdict == PASS
    assert threshold(stalled, steady).verdict == FAIL


def test_the_shift_is_the_median_difference_of_all_pairs() -> None:
    rng = np.random.default_rng(7)
    values, others = rng.lognormal(5.0, 0.4, 101), rng.lognormal(5.1, 0.4, 83)
    differences = np.subtract.outer(values, others)
    low, shift, high = shift_interval(values, others, confidence=0.98)
    assert shift == pytest.approx(np.median(differences), abs=0.2)
    assert low < shift < high
    assert [-one for one in shift_interval(others, values, confidence=0.98)] == pytest.approx(
        [high, shift, low], abs=0.2
    )


@pytest.mark.parametrize("step", [0.0, 20.0])
def test_the_interval_of_the_shift_holds_what_the_test_does_not_reject(step: float) -> None:
    rng = np.random.default_rng(7)
    values, others = rng.lognormal(5.0, 0.4, 60), rng.lognormal(5.1, 0.4, 50)
    if step:  # so that many are tied
        values, others = (np.round(one / step) * step for one in (values, others))

    def p(shift: float) -> float:
        return float(stats.mannwhitneyu(values - shift, others, method="asymptotic").pvalue)

    low, _, high = shift_interval(values, others, confidence=0.98)
    assert p(low - 0.01) < 0.02 < p(low + 0.01)
    assert p(high + 0.01) < 0.02 < p(high - 0.01)


def test_the_bootstrap_of_order_statistics_is_that_of_whole_resamples() -> None:
    values = np.random.default_rng(8).lognormal(5.0, 0.5, 250)
    draws = np.random.default_rng(9).choice(values, (9_999, values.size))
    expected = np.quantile(np.quantile(draws, 0.99, axis=1), (0.025, 0.975))
    assert p99_interval(values, rng=np.random.default_rng(10)) == pytest.approx(expected, rel=0.01)
    assert p99_interval(values[:1], rng=np.random.default_rng(10)) == (values[0], values[0])


def test_what_other_rules_say_is_what_was_kept_and_they_see_neither_the_requests_that_failed_nor_why() -> None:
    kept_verdicts: list[dict[str, Any]] = json.loads(OTHERS.read_text(encoding="utf-8"))
    assert other_verdicts(judged_cases()) == kept_verdicts
    assert len(markdown(kept_verdicts).splitlines()) == len(kept_verdicts) + 2
    for row in (row for row in kept_verdicts if row["case"] == "naive"):
        assert (row["sent"], row["seen"], row["overall"]) == (251, 179, "FAIL")
        # nothing ended in the other two minutes
        assert row["rules"]["Kayenta, p99 a minute"] == "PASS (Low, 1 point)"
