"""summary.json's key `bed`: a verdict on the machines, what it rests on, and series of a bounded size."""

from __future__ import annotations

import pytest

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


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return summary_of(tmp_path_factory.mktemp("quiet"), FakeBed())


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    return summary_of(tmp_path_factory.mktemp("unwatched"), None)


def test_quiet_machines_change_no_verdict(quiet, unwatched):
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
        Trouble(what="slow", size=0.8, trials=(1,)),
    ],
    ids=lambda trouble: trouble.what,
)
def test_disturbed_machines_leave_a_pass_open_and_say_why(tmp_path, trouble):
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


def test_recompiles_on_disturbed_machines_still_fail(tmp_path):
    arms = (EAGER, FakeArm(name="naive", compiles=(Compile(at_s=100.0, seconds=9.0),)))
    summary = summary_of(tmp_path, FakeBed(troubles=(Trouble(what="foreign", place="cuda:0"),)), arms=arms)
    assert summary["overall"] == "FAIL"
    gates = {gate["gate"]: gate for gate in summary["gates"]}
    assert gates["recompiles"]["verdict"] == "FAIL"
    assert gates["noninferiority p99_ttft"]["verdict"] == "INCONCLUSIVE"
