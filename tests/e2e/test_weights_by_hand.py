"""Weights that somebody changes while a run is judged, by the real command: recorded, and no fault."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from analysis.records.weight_journal import BY_HAND, WeightChange, read_weights
from tests.fakes.patience import wait_for
from tests.fakes.whole_run import FAKE_ARM, ROOT, last_line, requests, run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_traffic(folder: Path, requests_sent: int) -> Path:
    """The run's directory, once so many requests were answered."""

    def answered() -> Path | None:
        runs = [path.parents[1] for path in folder.glob("out/*/trial-01/requests-0.arrow")]
        return next((run for run in runs if len(requests(run)) >= requests_sent), None)

    return cast("Path", wait_for(answered, every_s=0.2))


def changed_by_hand(
    folder: Path, command: str, *settings: str, weights: str, after: int = 30
) -> tuple[dict[str, Any], Path, tuple[WeightChange, ...]]:
    """The run's last line, its directory and its journal: `weights` were set once `after` requests were answered."""
    port = free_port()
    common = {"splitter.admin_port": port, "bed.reference_s": 0, "gates.block_s": 2, "trials.starting_at_once": 2}
    arguments = [command, str(experiment(folder)), "--out", "out", "--seed", "7"]
    for setting in (*(f"{key}={value}" for key, value in common.items()), *settings):
        arguments += ["--set", setting]
    code = (
        "import sys; from loadtests.commands.main import main; "
        f"sys.exit(main({arguments!r}, arm_command={[sys.executable, str(FAKE_ARM)]!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_traffic(folder, after)
        split = ["-m", "loadtests.commands.main", "split", "--admin", f"127.0.0.1:{port}", "--set-weights", weights]
        done = run([sys.executable, *split], folder)
        assert done.returncode == 0, done.stderr
        out, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    line = last_line(subprocess.CompletedProcess([], process.returncode, out, errors))
    assert line["complete"], errors
    run_dir = folder / line["run_dir"]
    return line, run_dir, read_weights(run_dir)


def experiment(folder: Path) -> Path:
    """The demonstration without its naive arm."""
    text = (ROOT / "loadtests" / "experiments" / "demo.toml").read_text()
    text = text.replace('[[arms]]\nname = "compiled-naive"\npreset = "compiled-naive"\n', "")
    path = folder / "two.toml"
    path.write_text(text.replace("rate = 4.0", "rate = 20.0"))
    return path


def test_weights_set_by_hand_in_mid_run_are_recorded_and_judged_as_they_were(tmp_path: Path) -> None:
    _, run_dir, journal = changed_by_hand(
        tmp_path,
        "run",
        "traffic.design=split",
        "traffic.duration_s=16",
        weights="eager=9,compiled-padded=1",
        after=100,
    )
    start, change = journal
    assert (dict(start.weights), start.why) == ({"eager": 1, "compiled-padded": 1}, "as configured")
    assert (dict(change.weights), change.action) == ({"eager": 9, "compiled-padded": 1}, BY_HAND)
    assert change.why == "it was eager=1, compiled-padded=1"
    assert change.done_ns is not None
    assert change.done_ns - change.at_ns < 4e9
    after = [row for row in requests(run_dir) if row["sent_ns"] > change.done_ns]
    assert sum(row["arm"] == "compiled-padded" for row in after) < 0.3 * len(after)
    summary = json.loads((run_dir / "summary.json").read_text())
    (ratio,) = [check for check in summary["validity"] if check["check"] == "sample ratio"]
    assert ratio["ok"], ratio["reason"]
    assert ratio["reason"].startswith("Over 2 stretches of weights")
    assert [row["action"] for row in summary["weights"]["changes"]] == ["start", "set by hand"]
    words = "eager=9, compiled-padded=1 (it was eager=1, compiled-padded=1)"
    assert words in (run_dir / "report.md").read_text()
    assert words in (run_dir / "report.html").read_text()


def test_weights_set_by_hand_during_a_ramp_end_it_and_are_told_beside_its_steps(tmp_path: Path) -> None:
    ramp = ["ramp.step_s=6", "ramp.least_requests=1", "ramp.most_step_s=14", "ramp.on_inconclusive=rollback"]
    _, run_dir, journal = changed_by_hand(
        tmp_path, "ramp", *ramp, "ramp.steps=[20,100]", weights="eager=5000,compiled-padded=5000"
    )
    (by_hand,) = [change for change in journal if change.by_hand]
    assert dict(by_hand.weights) == {"eager": 5000, "compiled-padded": 5000}
    assert journal[-1] == by_hand, "two hands must not pull at one lever"
    summary = json.loads((run_dir / "summary.json").read_text())
    (ratio,) = [check for check in summary["validity"] if check["check"] == "sample ratio"]
    assert ratio["ok"], ratio["reason"]
    assert summary["ramp"]["outcome"] == "hold"
    assert summary["ramp"]["changes"][-1]["action"] == "set by hand"
    assert "set by hand after" in (run_dir / "report.md").read_text()
