"""Weights that somebody changes while a run is judged, by the real command: recorded, and no fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from analysis.records.weight_journal import BY_HAND, read_weights
from tests.e2e.test_run import last_line
from tests.fakes.patience import wait_for
from tests.fakes.whole_run import command, ended, environment, requests, summary_of, tailgate
from tests.loadtests.test_chat import free_port

EXPERIMENT = """
name = "two"
seed = 7
[[arms]]
name = "eager"
preset = "eager"
control = true
[[arms]]
name = "compiled-padded"
preset = "compiled-padded"
[traffic]
design = "split"
duration_s = 12
rate = 20
length_scale = 0.05
block_s = 2
[trials]
starting_at_once = 2
[bed]
reference_s = 0
[splitter]
admin_port = {port}
"""


def test_weights_set_by_hand_during_a_run_are_recorded_and_judged_as_they_were(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "two.toml").write_text(EXPERIMENT.format(port=port))
    process = subprocess.Popen(
        tailgate("run", "two.toml", "--out", "out"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(process):
        wait_for(lambda: any(len(requests(run)) >= 80 for run in tmp_path.glob("out/*-two")), every_s=0.2)
        split = ["-m", "loadtests.commands.main", "split", "--admin", f"127.0.0.1:{port}"]
        done = command([sys.executable, *split, "--set-weights", "eager=9,compiled-padded=1"], tmp_path)
        assert done.returncode == 0, done.stderr
        out, errors = process.communicate(timeout=200)
    line = last_line(subprocess.CompletedProcess([], process.returncode, out, errors))
    assert line["complete"], errors
    run_dir = tmp_path / line["run_dir"]
    start, change = read_weights(run_dir)
    assert (dict(start.weights), start.action) == ({"eager": 1, "compiled-padded": 1}, "start")
    assert (dict(change.weights), change.action) == ({"eager": 9, "compiled-padded": 1}, BY_HAND)
    assert change.done_ns is not None
    after = [row for row in requests(run_dir) if row["sent_ns"] > change.done_ns]
    assert sum(row["arm"] == "compiled-padded" for row in after) < 0.3 * len(after)
    summary = summary_of(run_dir)
    (ratio,) = [check for check in summary["validity"] if check["check"] == "sample ratio"]
    assert ratio["ok"], ratio["reason"]
    assert "2 stretches" in ratio["reason"]
    assert [row["action"] for row in summary["weights"]["changes"]] == ["start", "set by hand"]
    for name in ("report.md", "report.html"):
        assert "eager=9, compiled-padded=1 (it was eager=1, compiled-padded=1)" in (run_dir / name).read_text()
