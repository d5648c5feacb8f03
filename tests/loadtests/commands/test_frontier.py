"""What `tailgate frontier` refuses before it writes, and how it ends where nothing was learnt."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.commands import frontier
from loadtests.commands.main import main
from loadtests.experiments.writing import to_toml
from loadtests.trials.frontier import FrontierSearch
from loadtests.trials.run import RunOutcome
from tests.loadtests.trials.test_frontier import TWO_ARMS, experiment, made_up


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up(tmp_path_factory.mktemp("earlier"), budget_s=130.0)[1].run_dir


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(to_toml(experiment(seed=4)))
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["frontier", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_a_budget_too_short_to_go_on_with_writes_nothing(
    toml: Path, earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    said = refused(capsys, toml, "--after", earlier, "--budget", "0.001", "--out", out)
    assert "--budget is 0.001 minutes, but one start of one arm with 3 steps of 10 s takes 0.5 minutes" in said
    assert not out.exists()


@pytest.mark.parametrize("below", [".", "new/deeper"])
def test_the_new_search_is_not_written_into_an_earlier_one(
    toml: Path, earlier: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(earlier.rglob("*"))
    said = refused(capsys, toml, "--after", earlier, "--out", earlier / below)
    assert f"lies in the run {earlier.name}: give a folder of its own" in said
    assert sorted(earlier.rglob("*")) == before


def test_a_file_is_no_earlier_search(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, toml, "--after", toml)
    assert f'"{toml}" is a file: give a directory that `tailgate frontier` wrote' in said
    assert "does not exist: give a directory that `tailgate frontier` wrote" in refused(
        capsys, toml, "--after", f"{toml}-no"
    )


def test_another_experiment_is_named_by_its_arms_with_a_remedy(
    earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.toml"
    path.write_text(to_toml(experiment(seed=4, arms=TWO_ARMS)))
    said = refused(capsys, path, "--after", earlier)
    assert f"are no trials of one experiment: arms without dynamic, which {earlier.name} has" in said
    assert f"leave {earlier.name} out, or run the experiment that it ran" in said


def test_a_budget_that_no_arm_saw_load_in_is_said(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    def run(self: FrontierSearch) -> RunOutcome:
        given["spent_s"] = self.spent_s
        (tmp_path / "out" / "run").mkdir()
        return RunOutcome(run_dir=tmp_path / "out" / "run", complete=True)

    monkeypatch.setattr(FrontierSearch, "run", run)
    monkeypatch.setattr(FrontierSearch, "prepare", lambda self: (tmp_path / "out").mkdir())
    began = time.monotonic() - 100.0
    monkeypatch.setattr(frontier, "time", SimpleNamespace(monotonic=lambda: began))
    assert main(["frontier", str(toml), "--budget", "5", "--out", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert "--budget of 5 minutes was spent before an arm took any load: give more" in err
    line = json.loads(out.splitlines()[-1])
    assert (line["verdict"], line["complete"]) == (None, False)
    assert 100.0 <= given["spent_s"] < 160.0, "counted from the command's begin"
