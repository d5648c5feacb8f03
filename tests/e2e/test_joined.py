"""Two runs that were really made, judged as one from the outside."""

import json
from pathlib import Path

from tests.fakes.whole_run import console_script, last_line, requests, with_fake_arms


def test_two_runs_of_one_experiment_are_judged_as_one(tmp_path: Path) -> None:
    settings = ["--set", "traffic.duration_s=5", "--set", "traffic.block_s=1", "--set", "trials.starting_at_once=3"]
    folders = []
    for seed, trials in (("7", "1"), ("8", "2")):
        arguments = ["run", "demo", *settings, "--set", f"trials.count={trials}", "--seed", seed, "--out", "out"]
        folders.append(tmp_path / str(last_line(with_fake_arms(arguments, tmp_path))["run_dir"]))
    done = console_script(["analyze", *map(str, reversed(folders)), "--out", "case"], tmp_path)
    line = last_line(done)
    assert (done.returncode, line["exit_code"], line["runs"]) == (99, 99, 2), done.stderr
    assert "2 runs, 3 trials, " in done.stdout
    summary = json.loads((tmp_path / "case" / "summary.json").read_text())
    assert [row["trials"] for row in summary["joined"]["runs"]] == [[1], [2, 3]]
    assert sum(arm["requests"] for arm in summary["arms"]) == sum(len(requests(folder)) for folder in folders)
    # What each run is short of by itself is length; joining them may break nothing else.
    alone = [json.loads((folder / "summary.json").read_text())["validity"] for folder in folders]
    broken = {check["check"] for checks in alone for check in checks if not check["ok"]}
    assert {check["check"] for check in summary["validity"] if not check["ok"]} <= broken | {"machines"}
    other = console_script(
        ["analyze", str(folders[0]), str(folders[1]), "--allow-different", "seed", "--json", "--out", "case"], tmp_path
    )
    assert json.loads(other.stdout)["joined"] == summary["joined"]
