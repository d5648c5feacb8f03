from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from analysis.summary.summary import analyze
from loadtests.trials.frontier import (
    FrontierSearch,
)
from loadtests.trials.progress import Status
from tests.loadtests.trials.test_frontier import (
    cards,
    document,
    experiment,
    made_up,
)

FAKE_ARM = Path(__file__).resolve().parents[1] / "fakes" / "arm.py"


def test_a_real_search_records_one_arm_a_trial_and_compares_their_answers(tmp_path: Path) -> None:
    what = experiment(
        arms=[
            {"name": "eager", "preset": "eager", "control": True},
            {"name": "dynamic", "preset": "compiled-dynamic"},
        ],
        traffic={"rates": [4, 16], "duration_s": 6, "step_s": 2, "settle_s": 0.5},
        parity={"served": True},
    )
    status = Status()
    command = [sys.executable, str(FAKE_ARM), "--token", "dynamic-0=7"]
    searching = FrontierSearch(what, out=tmp_path, budget_s=600.0, status=status, arm_command=command)
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set() and not (status.trial == 3 and status.load.arms):
            ended.wait(0.02)
        searching.interrupt()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcome = searching.run()
    finally:
        ended.set()
        watcher.join()
    assert outcome.interrupted, outcome.error
    summary = analyze(outcome.run_dir)
    assert [turn["arms"] for turn in document(outcome)["turns"]] == [["eager"], ["dynamic"], ["eager"]]
    answers = {arm["name"]: arm["answers"] for arm in summary["parity"]["arms"]}
    assert all(row["same"] == row["of"] > 0 for row in answers["eager"])
    (gate,) = [gate for gate in summary["gates"] if gate["kind"] == "parity"]
    assert (gate["arm"], gate["verdict"]) == ("dynamic", "FAIL")
    # Nobody asked for verdicts, and an arm with other answers is not one to ship all the same.
    assert summary["frontier"]["search"]["gated"] is False
    assert summary["frontier"]["failed"] == ["dynamic"]
    assert any("dynamic is FAIL by its gates" in line for line in summary["frontier"]["answer"])
    assert {item["pick"] for item in summary["frontier"]["ranges"]} <= {"eager", None}
    assert "dynamic" in summary["headline"]


def test_arms_that_run_at_once_share_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.trials.run.check_experiment", lambda _: None)
    search, outcome = made_up(tmp_path, what=cards())
    assert outcome.complete, outcome.error
    turns = [turn["arms"] for turn in document(outcome)["turns"]]
    assert turns[0] == ["eager", "padded"]
    assert turns[1] == ["dynamic"]
    assert search.spent_s <= 1500.0
    assert analyze(outcome.run_dir)["frontier"]["blocked_by"] == []
