from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.commands.calibrate import calibration_text
from loadtests.commands.main import main
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import FakeRun, write_run

GATES = {"draws": 99, "metrics": ["e2e"]}


def test_a_short_run_exits_as_an_undecided_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", FakeRun(duration_s=90, trials=2, gates=GATES))
    assert main(["calibrate", str(folder), "--splits", "20"]) == 3
    *words, last = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(last)
    assert (found["verdict"], found["exit_code"], found["splits"]) == ("too few data to say", 3, 20)
    text = "\n".join(words)
    for said in ("called slower", "× 1.1", "in turn", "between trials", "this tests the statistics, not restarts"):
        assert said in text
    assert words[-1].startswith("This run's verdicts: too few data to say: Halves share ")
    assert text == calibration_text(found)
    assert main(["calibrate", str(folder), "--splits", "20", "--json"]) == 3
    assert capsys.readouterr().out == last + "\n", "the same run and seed calibrate alike"


def test_a_doubted_run_exits_as_a_failed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", FakeRun(duration_s=60, lag_ms=400.0, gates=GATES))
    assert main(["calibrate", str(folder), "--splits", "20", "--json"]) == 99
    assert json.loads(capsys.readouterr().out)["verdict"] == "do not trust"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--splits", "3"], "'3' is no number of splits: give 20 to 10000"), (["--seed", "-1"], "'-1' is no seed")],
)
def test_bad_usage_is_one_line(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(tmp_path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_search_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_search(tmp_path / "run", {"eager": 9, "new": 17}, [[4, 8, 16]])
    assert main(["calibrate", str(folder)]) == 2
    assert "calibrate a run with one steady load" in capsys.readouterr().err
