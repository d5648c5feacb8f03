"""Load from several hosts: clocks, lost workers and the encrypted channel, with real Locust and paced fake arms."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.records.schemas import MACHINES, REQUESTS
from analysis.records.tables import read_table
from analysis.summary.summary import analyze
from loadtests.traffic.schedule import Schedule
from loadtests.trials.load import locust_command as load_command
from loadtests.trials.processes import child_environment
from loadtests.workers.channel_token import TOKEN_VARIABLE
from tests.fakes.credentials import Tap
from tests.fakes.inference import Behaviour, serve
from tests.fakes.processes import PATIENCE_S, family, free_port, wait_for
from tests.fakes.whole_run import ended, locust_command, records, tailgate
from tests.loadtests.test_chat import CHAT, account, planned
from tests.loadtests.workers.test_workers import SECRET

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000
ANCHOR_NS = time.time_ns() - time.monotonic_ns()

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


def start(
    command: list[str], folder: Path, environment: dict[str, str] | None = None, *, shift_ns: int = 0
) -> subprocess.Popen[str]:
    """Start the command, by default with the secret of all hosts; its output goes to `folder`/log."""
    folder.mkdir(exist_ok=True)
    given = environment or {**os.environ, TOKEN_VARIABLE: "what all hosts of this test know"}
    given = {**given, "PYTHONPATH": str(ROOT), "TAILGATE_CLOCK_ANCHOR_NS": str(ANCHOR_NS + shift_ns)}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command, cwd=folder, env=given, text=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


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
    run = start(tailgate("run", "hosts.toml", "--out", "out"), tmp_path)
    command = tailgate("worker", "--master", f"127.0.0.1:{port}", "--keep", "kept", "--trials", "1")
    hosts = {name: start(command, tmp_path / name, shift_ns=shift) for name, shift in shifts.items()}
    with ended(run, *hosts.values()):
        wait_for(lambda: len(records(trial_of(tmp_path))) > 120 or run.poll() is not None)
        trial = trial_of(tmp_path)
        known = accounts(trial)
        lost = next(number for number, item in known.items() if item["clock"]["offset_ns"] > 0)
        before = {row["request_id"] for row in records(trial) if int(row["request_id"].split("-")[1]) % 2 == lost}
        kill_tree(hosts["behind"])
        run.wait(timeout=90)
        assert hosts["ahead"].wait(timeout=PATIENCE_S) == 0
    output = (tmp_path / "log").read_text()
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

    # The other host was monitored, on the clock of the run.
    machines, torn = read_table(trial / f"machines-{1 - lost}.arrow", MACHINES)
    assert not torn
    assert {row["host"] for row in machines.to_pylist()} == {f"worker-{1 - lost}"}
    assert 0 < max(machines.column("at_ns").to_pylist()) - found[0]["start_ns"] < 30_000 * MS

    # What the lost host kept, copied by hand, is judged on the clock of the run too.
    (kept,) = (tmp_path / "behind" / "kept").glob("*/trial-01")
    assert kept.parent.name == trial.parent.name
    mine, _ = read_table(kept / f"requests-{lost}.arrow", REQUESTS)
    assert mine.num_rows >= got[lost]
    for name in (f"requests-{lost}.arrow", f"generator-{lost}.json"):
        shutil.copy(kept / name, trial / name)
    assert f"{mine.num_rows} of {found[lost]['planned']}" in reasons(trial.parent)["complete"]
    assert analyze(trial.parent)["design"]["duration_s"] < 6  # on a clock 3.2 s off it would be more


def test_the_clock_of_a_host_behind_an_asymmetric_network_is_followed(tmp_path: Path) -> None:
    """What the worker sends takes 20 ms more than what it gets."""
    here, port = "127.0.0.1", free_port()
    run_dir = tmp_path / "run" / "trial-01"
    run_dir.mkdir(parents=True)
    with serve(Behaviour(arm="")) as arm:
        schedule, arguments = planned(run_dir, {"*": arm.target}, duration_s=2.0)
        network = ["--master", "--master-bind-host", here, "--master-bind-port", str(port), "--remote-workers", "1"]
        arguments[1] = str(ROOT / arguments[1])
        master = start(locust_command(*arguments, *network), tmp_path / "master")
        wait_for(lambda: listens(here, port))
        tap = Tap((here, port), delay_s=0.02)
        command = tailgate("worker", "--master", f"{here}:{tap.port}", "--keep", "kept", "--trials", "1")
        worker = start(command, tmp_path / "worker", shift_ns=700 * MS)
        with ended(master, worker), tap:
            codes = master.wait(timeout=PATIENCE_S), worker.wait(timeout=PATIENCE_S)
            assert codes == (0, 0), (tmp_path / "master" / "log").read_text()
    rows = records(run_dir)
    assert len(rows) == 2 * len(schedule)
    assert {row["status"] for row in rows} == {"OK"}
    found = account(run_dir)
    clock = found["clock"]
    # The comparison is off by half of the 20 ms, and its uncertainty covers them.
    assert clock["round_trip_ns"] > 20 * MS
    assert 9 * MS < abs(clock["offset_ns"] + 700 * MS) <= clock["uncertainty_ns"] < 40 * MS
    assert found["complete"] is True


def kill_tree(process: subprocess.Popen[str]) -> None:
    for pid in (*family(process.pid)[1:], process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def master_command(folder: Path, **more: Any) -> list[str]:
    files = {"schedule": folder / "schedule.arrow", "trial_config": folder / "generator.json", "records": folder}
    return load_command(**files, **more)


def stranger(port: int, *, host: str = "127.0.0.1") -> list[str]:
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / CHAT), "--worker", "--loglevel", "DEBUG"]
    return [*command, "--master-host", host, "--master-port", str(port)]


@pytest.fixture(scope="module")
def two_arms() -> Iterator[dict[str, str]]:
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled")) as compiled:
        yield {"eager": eager.target, "compiled": compiled.target}


@pytest.mark.parametrize("closed", [True, False], ids=["with the secret", "without one"])
def test_a_remote_worker_joins_only_with_the_secret_and_the_channel_is_encrypted(
    closed: bool, two_arms: dict[str, str], tmp_path: Path
) -> None:
    """Without a secret everything can be read, which shows that the search finds it."""
    schedule, _ = planned(tmp_path, two_arms, duration_s=1.0)
    port = free_port()
    command = master_command(tmp_path, workers=0, remote_workers=1, master=("127.0.0.1", port), wait_s=60)
    mine = {**child_environment(), **({TOKEN_VARIABLE: SECRET} if closed else {})}
    others = {"none": child_environment(), "another": {**mine, TOKEN_VARIABLE: "another secret 0123"}}
    keep = ["--keep", str(tmp_path / "kept")]
    with contextlib.ExitStack() as stack:
        tap = stack.enter_context(Tap(("127.0.0.1", port)))
        master = start(command, tmp_path / "master", mine)
        stack.enter_context(ended(master))
        for name, environment in others.items() if closed else ():
            stack.enter_context(ended(start([*stranger(port), *keep], tmp_path / name, environment)))
            log = tmp_path / name / "log"
            wait_for(lambda: "Failed to connect to master" in log.read_text() or master.poll() is not None)  # noqa: B023
        stack.enter_context(ended(start([*stranger(tap.port), *keep], tmp_path / "worker", mine)))
        assert master.wait(timeout=60) == 0, (tmp_path / "master" / "log").read_text()
        seen = bytes(tap.seen)
    assert len(records(tmp_path)) == 2 * len(schedule)
    assert not (tmp_path / "generator-1.json").exists()
    assert len(seen) > 10_000
    assert SECRET.encode() not in seen
    # a message of Locust, the address of an arm, and an arm in the records
    for word in ("client_ready", two_arms["eager"], "compiled"):
        assert (word.encode() in seen) == (not closed), word
