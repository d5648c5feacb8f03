"""`tailgate analyze` of several runs, by its command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.commands.main import main
from tests.analysis.judging.test_load_steps import write_search
from tests.fakes.runs import DAYS_APART, FakeRun, write_run

RUN = FakeRun(name="canary", duration_s=60, rate=2, trials=2, environment={"machine": "aaaaaaaaaaaa"})


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three runs of one experiment, the last on another machine."""
    machines = ("aaaaaaaaaaaa", "aaaaaaaaaaaa", "bbbbbbbbbbbb")
    return [
        write_run(
            tmp_path / f"run-{day}",
            replace(RUN, seed=day + 1, day=day * DAYS_APART, environment={"machine": machine}),
        )
        for day, machine in enumerate(machines)
    ]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code = main(["analyze", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("tailgate: ")
    assert err.count("\n") == 1
    return err


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    main(["analyze", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    line: dict[str, object] = json.loads(out.splitlines()[-1])
    return line


def test_runs_are_judged_as_one_in_a_folder_beside_the_first(runs, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")}
    line = outcome(capsys, *runs)
    folder = Path(str(line["run_dir"]))
    assert folder.parent == tmp_path
    assert folder.name.startswith("joined-")
    assert {path.name for path in folder.iterdir()} == {
        *("runs.json", "summary.json", "report.html", "report.md", "junit.xml")
    }
    assert line["runs"] == 3
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*")} == before, "no run is touched"
    again = outcome(capsys, *reversed(runs))
    assert again["run_dir"] == line["run_dir"], "the same runs have the same folder"


def test_the_joined_folder_is_judged_again_and_joined_with_more(runs, tmp_path, capsys):
    folder = tmp_path / "case"
    first = outcome(capsys, *runs[:2], "--out", folder)
    assert first["run_dir"] == str(folder)
    summary = (folder / "summary.json").read_text()
    outcome(capsys, folder)
    assert (folder / "summary.json").read_text() == summary
    more = outcome(capsys, folder, runs[2])
    assert more["runs"] == 3
    assert more["run_dir"] != str(folder)
    assert outcome(capsys, folder, runs[2], "--out", folder)["runs"] == 3
    assert json.loads((folder / "runs.json").read_text())["runs"] == ["../run-0", "../run-1", "../run-2"]


def test_the_outcome_of_one_run_goes_to_a_folder_of_its_own_on_demand(runs, tmp_path, capsys):
    held = {path.name for path in runs[0].iterdir()}
    apart = outcome(capsys, runs[0], "--out", tmp_path / "apart")
    assert (apart["run_dir"], apart["runs"]) == (str(tmp_path / "apart"), 1)
    assert {path.name for path in runs[0].iterdir()} == held
    beside = outcome(capsys, runs[0])
    assert (beside["verdict"], beside["headline"]) == (apart["verdict"], apart["headline"])


def test_a_run_that_cannot_be_written_is_refused_before_it_is_judged(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("loadtests.commands.analyze.judge_run", lambda *_, **__: pytest.fail("it was judged"))
    assert f'--out "{runs[0]}" is not writable: give a folder that is' in refusal(capsys, runs[0])


def test_json_prints_the_whole_summary(runs, capsys):
    line = outcome(capsys, *runs, "--json")
    assert line["design"]["trials"] == 6  # type: ignore[index]


def test_what_differs_is_refused_and_can_be_accepted_by_its_key(runs, tmp_path, capsys):
    other = write_run(tmp_path / "other", replace(RUN, seed=9, gates={"margin": 0.2}, day=9 * DAYS_APART))
    folder = tmp_path / "case"
    said = refusal(capsys, *runs, other, "--out", folder)
    assert "other differs from run-0 in gates.margin 0.2 (there not given)" in said
    assert not folder.exists(), "nothing is written"
    assert outcome(capsys, *runs, other, "--out", folder, "--allow-different", "gates.margin")["runs"] == 4
    assert outcome(capsys, folder)["runs"] == 4, "what was accepted is kept with the runs"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", "--allow-different holds an empty key"),
        (",", "--allow-different holds an empty key"),
        ("gates.margin,", "--allow-different holds an empty key"),
        ("gates.magrin", 'no run has a setting "gates.magrin"'),
    ],
)
def test_key_that_no_run_has_is_refused_and_the_joined_folder_stays(keys, expected, runs, tmp_path, capsys):
    folder = tmp_path / "case"
    outcome(capsys, *runs[:2], "--out", folder)
    listed = (folder / "runs.json").read_text()
    assert expected in refusal(capsys, folder, runs[2], "--out", folder, "--allow-different", keys)
    assert (folder / "runs.json").read_text() == listed
    assert "--out is empty" in refusal(capsys, *runs, "--out", "")


def test_the_outcome_never_goes_into_a_run_nor_over_other_files(runs, tmp_path, capsys):
    assert "lies in the run run-1" in refusal(capsys, *runs, "--out", runs[1] / "joined")
    assert "lies in the run run-1" in refusal(capsys, *runs[:2], "--out", runs[1])
    assert "holds other files" in refusal(capsys, *runs[:2], "--out", runs[2])
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(capsys, *runs, "--out", tmp_path / "file")


def test_bad_runs_are_refused_in_a_line(runs, tmp_path, capsys):
    assert 'run directory "nowhere" does not exist' in refusal(capsys, runs[0], "nowhere")
    assert "the run run-0 is given twice (twice as" in refusal(capsys, runs[0], runs[0])
    assert "--allow-different is for several runs" in refusal(capsys, runs[0], "--allow-different", "gates")
    (tmp_path / "empty").mkdir()
    assert "empty holds no requests*.arrow" in refusal(capsys, runs[0], tmp_path / "empty")
    alone = refusal(capsys, tmp_path / "empty", "--out", tmp_path / "x")
    assert "empty holds no requests*.arrow, .parquet or .jsonl: give another run" in alone
    assert not (tmp_path / "x").exists()


def test_other_commands_take_a_joined_folder_for_a_run_or_say_what_to_give(runs, tmp_path, capsys):
    folder = tmp_path / "case"
    outcome(capsys, *runs, "--out", folder)
    for command in ("plan", "breakeven", "calibrate"):
        assert main([command, str(folder), "--json", *(["--splits", "20"] if command == "calibrate" else [])]) in (
            0,
            3,
            99,
        )
        assert json.loads(capsys.readouterr().out.splitlines()[-1])
    code = main(["export", str(folder), "--format", "parquet"])
    assert (code, "joins runs and holds no records itself: export each" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(("gated", "verdict", "code"), [(False, None, 0), (True, "INCONCLUSIVE", 3)])
def test_a_search_is_answered_again_as_it_was(gated, verdict, code, tmp_path, capsys):
    """As `tailgate frontier` said it: with a verdict where one was asked for alone."""
    run = write_search(tmp_path / "run", {"eager": 17.0, "new": 33.0}, [[4, 16, 32, 64], [8, 18, 30, 40]])
    search = {"gated": gated, "stop": "nothing is open", "left": [], "dropped": []}
    (run / "frontier.json").write_text(json.dumps(search))
    assert main(["analyze", str(run)]) == code
    *words, line = capsys.readouterr().out.splitlines()
    outcome = json.loads(line)
    assert (outcome["verdict"], outcome["exit_code"]) == (verdict, code)
    assert outcome["answer"][0].startswith("Up to ")
    assert "nothing is gained in load by compiling" in " ".join(words)
    assert main(["analyze", str(run), "--json"]) == code
