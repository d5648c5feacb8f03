"""summary.json's key `bed`: a verdict on the machines, what it rests on, and series of a bounded size."""

from __future__ import annotations

import json

import pytest

from analysis.summary.bed import MOST_POINTS
from analysis.summary.summary import analyze
from tests.fakes.beds import FakeBed, Trouble
from tests.fakes.runs import EAGER, Compile, FakeArm, FakeRun, write_run

SLO = {"p99_ttft_ms": 2000, "p99_e2e_ms": 6000}
FASTER = (EAGER, FakeArm(name="compiled", ratio=0.8))


def summary_of(folder, bed, **more):
    fake = {
        "trials": 2,
        "duration_s": 420.0,
        "rate": 2.0,
        "seed": 7,
        "slo": SLO,
        "gates": {"draws": 99},
        "arms": FASTER,
    }
    return analyze(write_run(folder / "run", FakeRun(bed=bed, **{**fake, **more})))


def test_a_quiet_bed_changes_no_verdict(tmp_path):
    quiet, unwatched = summary_of(tmp_path / "a", FakeBed()), summary_of(tmp_path / "b", None)
    assert (quiet["bed"]["verdict"], unwatched["bed"]["verdict"]) == ("quiet", "not watched")
    assert quiet["gates"] == unwatched["gates"]
    assert quiet["overall"] == unwatched["overall"] == "PASS"
    assert set(unwatched["bed"]) == {"verdict", "line", "variation"}
    names = {check["check"] for check in unwatched["validity"]}
    assert {check["check"] for check in quiet["validity"]} - names == {
        *("foreign work", "throttling", "device settings", "steal", "busy host", "bed drift", "bed apart", "slow bed")
    }


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(what="foreign"),
        Trouble(what="throttle", share=0.3),
        Trouble(what="steal", place="host", size=0.05),
        Trouble(what="busy", place="host", size=0.4),
        Trouble(what="slow", size=0.8, trials=(1,)),
    ],
    ids=lambda trouble: trouble.what,
)
def test_a_disturbed_bed_leaves_a_pass_open_and_says_why(tmp_path, trouble):
    summary = summary_of(tmp_path, FakeBed(troubles=(trouble,)))
    assert (summary["overall"], summary["bed"]["verdict"]) == ("INCONCLUSIVE", "disturbed")
    first = summary["bed"]["disturbances"][0]
    assert first["check"] in {check["check"] for check in summary["validity"] if not check["ok"]}
    estimates = [gate for gate in summary["gates"] if gate["kind"] in ("noninferiority", "slo")]
    assert estimates
    assert all(first["check"] in gate["blocked_by"] for gate in estimates)
    assert "would be a PASS, but for the check" in estimates[0]["reason"]


def test_a_slow_card_that_changing_places_balances_keeps_the_pass(tmp_path):
    summary = summary_of(tmp_path, FakeBed(troubles=(Trouble(what="slow", size=0.85),)))
    assert (summary["overall"], summary["bed"]["verdict"]) == ("PASS", "disturbed")
    assert "which the arms' changing places balances" in summary["bed"]["line"]


def test_recompiles_that_happened_on_a_disturbed_bed_still_fail(tmp_path):
    arms = (EAGER, FakeArm(name="naive", compiles=(Compile(at_s=100.0, seconds=9.0),)))
    summary = summary_of(tmp_path, FakeBed(troubles=(Trouble(what="foreign", place="cuda:0"),)), arms=arms)
    assert summary["overall"] == "FAIL"
    gates = {gate["gate"]: gate for gate in summary["gates"]}
    assert gates["recompiles"]["verdict"] == "FAIL"
    assert gates["noninferiority p99_ttft"]["verdict"] == "INCONCLUSIVE"


def test_a_wider_limit_lets_a_drift_pass(tmp_path):
    bed = FakeBed(troubles=(Trouble(what="slow", size=0.9, trials=(1,)),))
    assert summary_of(tmp_path / "a", bed)["overall"] == "INCONCLUSIVE"
    wide = summary_of(tmp_path / "b", bed, gates={"draws": 99, "max_bed_drift": 0.2})
    assert (wide["overall"], wide["bed"]["verdict"]) == ("PASS", "quiet")


def test_series_are_bounded_and_on_the_time_of_the_traffic(tmp_path):
    series = summary_of(tmp_path, FakeBed(), duration_s=1500.0, trials=1, rate=0.5)["bed"]["series"]
    assert {row["kind"] for row in series["rows"]} == {"arm", "device", "host"}
    for row in series["rows"]:
        assert len(row["t_s"]) <= MOST_POINTS + 1
        assert 0 <= row["t_s"][0] <= row["t_s"][-1] <= 1500
        assert all(len(column) == len(row["t_s"]) for column in row.values() if isinstance(column, list))


def test_a_trouble_of_seconds_shows_in_the_series_however_long_the_run(tmp_path):
    troubles = (Trouble(what="throttle", share=0.002), Trouble(what="foreign", share=0.002))
    rows = summary_of(tmp_path, FakeBed(troubles=troubles), duration_s=1500.0, trials=1, rate=0.5)["bed"]["series"][
        "rows"
    ]
    (card,) = (row for row in rows if row["name"] == "cuda:1")
    assert min(card["sm_mhz"]) < 1980
    assert max(card["throttled"]) > 0
    assert max(card["foreign"]) == 1


def test_the_same_bed_gives_the_same_bytes_and_plain_json(tmp_path):
    bed = FakeBed(troubles=(Trouble(what="unreadable", place="cuda:0", column="throttle"),))
    first, second = (summary_of(tmp_path / name, bed, duration_s=60.0)["bed"] for name in "ab")
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    assert first["unreadable"] == [{"host": "run", "name": "cuda:0", "what": "throttle", "why": "Not Supported"}]
