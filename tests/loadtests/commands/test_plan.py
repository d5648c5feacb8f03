from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.foresight.plan import Goal
from analysis.foresight.plan_from_pilot import plan_from_run
from loadtests.commands.main import main
from loadtests.commands.plan import plan_text
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.plans import GATES, pilot, row
from tests.fakes.runs import EAGER, FakeArm, FakeRun, write_run

__all__ = ["pilot"]  # a fixture


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the words and the JSON of the last line."""
    code = main(arguments)
    *words, last = capsys.readouterr().out.splitlines()
    return code, "\n".join(words), json.loads(last)


def test_the_pilots_faults_are_to_be_mended_first(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", FakeRun(duration_s=60, gates=GATES, lag_ms=400.0))
    plan = plan_from_run(folder, Goal())
    assert any("were sent 400.0 ms late" in text for text in plan["mend_first"])
    assert "Mend first: " in plan_text(plan)


@pytest.mark.parametrize(
    "run",
    [
        FakeRun(duration_s=20, gates=GATES),
        FakeRun(duration_s=60, gates=GATES, arms=(EAGER, FakeArm(name="compiled", error_share=1.0))),
        FakeRun(duration_s=60, gates=GATES, design="split", arms=(EAGER, FakeArm(name="compiled", weight=0.0))),
        FakeRun(duration_s=60, gates=GATES, rate=0.02),
    ],
)
def test_a_pilot_that_shows_nothing_is_told_in_words(tmp_path: Path, run: FakeRun) -> None:
    plan = plan_from_run(write_run(tmp_path / "run", run), Goal(duration_s=600))
    text = plan_text(plan)
    assert "nan" not in text
    assert json.dumps(plan, allow_nan=False)
    if plan["needed_s"] is None:
        assert "No run of up to a week decides" in text


def test_what_is_assumed_without_a_pilot_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, words, plan = told(capsys, "plan", "--rate", "4", "--duration", "1200")
    assert code == 0
    assert "No pilot: spreads are those of made-up servers" in words
    assert "margin in 20 minutes" in words
    assert words.splitlines()[-1].startswith("Run for 26 minutes")
    assert row(plan, "p99")["margin"] == pytest.approx(0.11, abs=0.02)


def test_the_command_plans_from_a_pilot(pilot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, words, plan = told(capsys, "plan", str(pilot), "--margin", "0.05", "--ratio", "0.9")
    assert (code, plan["source"]["from"], plan["wanted"]["ratio"]) == (0, "pilot", 0.9)
    assert "if as seen" in words
    assert "no gate: compiled" in words
    main(["plan", str(pilot), "--margin", "0.05", "--ratio", "0.9", "--json"])
    assert json.loads(capsys.readouterr().out) == plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give RUN_DIR, or --rate R"),
        (["none"], 'run directory "none" does not exist'),
        (["--rate", "0"], "--rate is 0: give requests/s"),
        (["--rate", "4", "--power", "1"], "--power is 1: give a share from 0.5 to 0.999"),
        (["--rate", "4", "--margin", "0"], "--margin is 0: give a share above 0"),
        (["--rate", "4", "--ratio", "0"], "--ratio is 0"),
        (["--rate", "4", "--alpha", "0.9"], "--alpha is 0.9"),
        (["--rate", "4", "--duration", "-1"], "--duration is -1: give seconds above 0"),
        (["--rate", "4", "--trials", "0"], "--trials is 0: give 1 to 1000"),
        (["--rate", "4", "--slo", "fast"], "--slo"),
        ([".", "--rate", "4"], "--rate is for a plan without a pilot"),
        ([".", "--searching"], "--searching is for a plan without a pilot"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_search_and_an_empty_directory_are_no_pilots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = write_search(tmp_path / "search", {"eager": 9, "new": 17}, [[4, 8, 16]])
    assert main(["plan", str(search)]) == 2
    assert "plan from a run with one steady load" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for command in ("plan", "calibrate", "breakeven"):
        assert main([command, str(tmp_path / "empty")]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
