"""Load from several hosts: clocks and lost workers, with real Locust and paced fake arms."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.analysis.summary.summary import analyze
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from tests.fakes.credentials import start
from tests.fakes.processes import PATIENCE_S, family, free_port, wait_for
from tests.fakes.whole_run import ended, records, tailgate
from tests.loadtests.test_chat import account

MS = 1_000_000

EXPERIMENT = """
name = "hosts"
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "compiled-padded"
[traffic]
duration_s = 5
workers = 0
remote_workers = 2
master_bind = "127.0.0.1:{port}"
rate = 30
length_scale = 0.05
block_s = 1
[gates]
min_blocks = 2
cold_s = 0
[trials]
starting_at_once = 2
[parity]
served = false
[machines]
reference_s = 0
"""


def trial_of(folder: Path) -> Path:
    found = list(folder.glob("out/*/trial-01"))
    return found[0] if found else folder / "none"


def accounts(trial: Path) -> dict[int, dict[str, Any]]:
    return {worker: account(trial, worker) for worker in (0, 1)}


def reasons(run_dir: Path) -> dict[str, str]:
    """Return the reasons of each failed check, joined."""
    found: dict[str, str] = {}
    for row in analyze(run_dir)["validity"]:
        if not row["ok"]:
            found[row["check"]] = f"{found.get(row['check'], '')} {row['reason']}"
    return found


def test_a_lost_host_is_reported_and_its_flushed_records_are_judged(tmp_path: Path) -> None:
    """Two hosts drive all load, with clocks 3.2 s behind and 45 ms ahead. One is killed."""
    shifts = {"behind": -3_200 * MS, "ahead": 45 * MS}
    port = free_port()
    (tmp_path / "hosts.toml").write_text(EXPERIMENT.format(port=port))
    clock = {ANCHOR_VARIABLE: str(ANCHOR_NS)}
    run = start(tmp_path, "run", tailgate("run", "hosts.toml", "--out", "out", "--json"), **clock)
    command = tailgate("worker", "--master", f"127.0.0.1:{port}", "--keep", "kept", "--trials", "1")
    hosts = {
        name: start(tmp_path / name, "worker", command, **{ANCHOR_VARIABLE: str(ANCHOR_NS + shift)})
        for name, shift in shifts.items()
    }
    with ended(run, *hosts.values()):
        wait_for(lambda: len(records(trial_of(tmp_path))) > 120 or run.poll() is not None)
        trial = trial_of(tmp_path)
        known = accounts(trial)
        lost = next(number for number, item in known.items() if item["clock"]["offset_ns"] > 0)
        before = {row["request_id"] for row in records(trial) if int(row["request_id"].split("-")[1]) % 2 == lost}
        kill_tree(hosts["behind"])
        run.wait(timeout=90)
        assert hosts["ahead"].wait(timeout=PATIENCE_S) == 0
    output = (tmp_path / "run.output").read_text()
    line = json.loads(output.splitlines()[-1])
    assert (run.returncode, line["verdict"], line["complete"]) == (3, "INCONCLUSIVE", True), output

    # Records of both are on the clock of the run: each request is where the schedule has it.
    schedule = Schedule.read(trial / "schedule.arrow")
    found = accounts(trial)
    for number, shift in ((lost, shifts["behind"]), (1 - lost, shifts["ahead"])):
        clock = found[number]["clock"]
        assert abs(clock["offset_ns"] + shift) <= clock["uncertainty_ns"] < 50 * MS
    most_ns = max(found[number]["clock"]["uncertainty_ns"] for number in (0, 1))
    off_by = [
        abs(row["scheduled_ns"] - found[0]["start_ns"] - int(schedule.offset_ns[int(row["request_id"].split("-")[1])]))
        for row in records(trial)
    ]
    assert max(off_by) <= most_ns
    # All of one, of the other all that was flushed, and the verdict names what is missing.
    got = Counter(int(row["request_id"].split("-")[1]) % 2 for row in records(trial))
    assert got[1 - lost] == found[1 - lost]["planned"] == found[1 - lost]["records"]["written"]
    assert before <= {row["request_id"] for row in records(trial)}
    failed = reasons(trial.parent)
    assert all(word in failed["complete"] for word in ("lost", f"{got[lost]} of {found[lost]['planned']}"))
    assert "clock" not in failed.get("load generator", "")

    # What the lost host kept, copied by hand, is judged on the clock of the run too.
    (kept,) = (tmp_path / "behind" / "kept").glob("*/trial-01")
    assert kept.parent.name == trial.parent.name
    mine, _ = read_table(kept / f"requests-{lost}.arrow", REQUESTS)
    assert mine.num_rows >= got[lost]
    for name in (f"requests-{lost}.arrow", f"generator-{lost}.json"):
        shutil.copy(kept / name, trial / name)
    assert f"{mine.num_rows} of {found[lost]['planned']}" in reasons(trial.parent)["complete"]
    assert analyze(trial.parent)["design"]["duration_s"] < 6  # on a clock 3.2 s off it would be more


def kill_tree(process: subprocess.Popen[str]) -> None:
    for pid in (*family(process.pid)[1:], process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
