"""A run whose arms were not pressed as asked decides nothing by estimates, and its reports name the pressure."""

import json
from pathlib import Path
from typing import Any

from analysis.judging.checks.pressure import check_pressure
from analysis.report import write_reports
from analysis.summary.summary import analyze
from tests.fakes.runs import FakeRun, write_run

SENTENCE = "Under pressure: over the whole traffic a neighbour on each device held 30 % of the memory."


def pressed(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A run of two arms on two cards that asked for memory to be held on both."""
    directory = write_run(folder / "run", FakeRun(gates={"draws": 199}))
    experiment = directory / "experiment.toml"
    experiment.write_text(experiment.read_text() + "\n[pressure]\nmemory_share = 0.3\n")
    path = directory / "trial-01" / "trial.json"
    info = json.loads(path.read_text())
    info |= {"devices": {"eager": "cuda:0", "compiled": "cuda:1"}, "pressure": rows}
    path.write_text(json.dumps(info))
    return directory


def memory_on(device: str) -> dict[str, Any]:
    return {"kind": "memory", "device": device, "from_s": 0.0, "share": 0.3, "start_ns": 1, "end_ns": 2, "error": None}


def test_arms_that_were_pressed_alike_are_judged_and_the_reports_say_how(tmp_path: Path) -> None:
    directory = pressed(tmp_path, [memory_on("cuda:0"), memory_on("cuda:1")])
    summary = analyze(directory)
    assert [check["ok"] for check in summary["validity"] if check["check"] == "pressure"] == [True]
    assert summary["overall"] == "PASS"
    assert summary["design"]["pressure"] == SENTENCE
    write_reports(summary, directory)
    for name in ("report.html", "report.md"):
        assert SENTENCE in (directory / name).read_text()


def test_arms_that_were_not_pressed_alike_are_not_judged_by_their_latency(tmp_path: Path) -> None:
    summary = analyze(pressed(tmp_path, [memory_on("cuda:0")]))
    (check,) = [check for check in summary["validity"] if check["check"] == "pressure"]
    assert not check["ok"]
    assert "trial 1: memory from 0 s on was on 1 of 2 devices" in check["reason"]
    assert summary["overall"] == "INCONCLUSIVE"
    blocked = {gate["kind"] for gate in summary["gates"] if "pressure" in gate["blocked_by"]}
    assert "noninferiority" in blocked
    assert "recompile" not in blocked


def test_a_run_without_pressure_has_no_such_check(tmp_path: Path) -> None:
    summary = analyze(write_run(tmp_path / "run", FakeRun(duration_s=60)))
    assert "pressure" not in {check["check"] for check in summary["validity"]}
    assert "pressure" not in summary["design"]


def test_many_faults_are_counted_after_the_first() -> None:
    assert check_pressure([f"fault {number}" for number in range(5)]).reason.endswith("fault 2; and 2 more.")
