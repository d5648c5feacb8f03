"""Secrets and sockets: no secret is written, and sockets listen where docs/how-to/security.md says."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from tests.fakes.credentials import TLS, Watched, check_listeners, give, listening, search, start
from tests.fakes.processes import PATIENCE_S, free_port, listeners, unix_names, wait_for
from tests.fakes.whole_run import FAKE_ARM, ended, records, requests, tailgate
from tests.loadtests.trials.test_run_endings import LONG

ELSEWHERE = "127.0.0.2"
BEHIND_NS = -3_200_000_000

RUN = LONG.replace("duration_s = 60", "duration_s = 4").replace("workers = 2", "workers = 0\nremote_workers = 1")


def assert_on_schedule(trial: Path) -> None:
    """Assert that the records of a worker 3.2 s behind are on the clock of the run: each where its schedule has it."""
    account = json.loads((trial / "generator-0.json").read_text())
    uncertainty_ns = account["clock"]["uncertainty_ns"]
    assert abs(account["clock"]["offset_ns"] + BEHIND_NS) <= uncertainty_ns < 50_000_000
    offsets = Schedule.read(trial / "schedule.arrow", ()).offset_ns
    for row in records(trial):
        due_ns = account["start_ns"] + int(offsets[int(row["request_id"].split("-")[1])])
        assert abs(row["scheduled_ns"] - due_ns) <= uncertainty_ns


def test_a_run_with_a_remote_worker_on_another_clock_writes_no_secret(tmp_path: Path) -> None:
    pem = give(tmp_path, "127.0.0.1", ELSEWHERE)
    master = f"{ELSEWHERE}:{free_port()}"
    (tmp_path / "small.toml").write_text(RUN + TLS.format(token='token_env = "PLANTED_TOKEN"'))
    run = start(tmp_path, "run", tailgate("run", "small.toml", "--set", f"traffic.master_bind={master}"))
    with Watched(tmp_path / "tmp") as watched:
        command = [sys.executable, "-m", "tailgate.loadtests.commands.main", "worker", "--master", master]
        clock = {ANCHOR_VARIABLE: str(ANCHOR_NS + BEHIND_NS)}
        load = start(tmp_path, "worker", [*command, "--keep", "kept", "--trials", "1"], **clock)
        watched.pids += [run.pid, load.pid]
        with ended(run, load):
            while run.poll() is None:
                time.sleep(0.2)
            assert load.wait(PATIENCE_S) == 0
    assert run.returncode in (0, 3, 99), (tmp_path / "run.output").read_text()
    assert {row["status"] for path in tmp_path.glob("runs/*-small") for row in requests(path)} == {"OK"}
    (trial,) = tmp_path.glob("runs/*-small/trial-01")
    assert_on_schedule(trial)
    search(tmp_path, watched, pem)
    # Only what remote hosts must reach is at their address.
    places = {(item.address, "envoy" in item.command.split()[0]) for item in watched.sockets if item.port}
    assert {address for address, is_envoy in places if is_envoy} == {ELSEWHERE}
    assert {item.address for item in watched.sockets if "--trial " in item.command} == {ELSEWHERE}
    assert {item.address for item in watched.sockets if str(FAKE_ARM) in item.command} == {"127.0.0.1"}


def test_a_splitter_by_hand_listens_on_loopback(tmp_path: Path) -> None:
    split = ["split", "--arm", "eager=127.0.0.1:1", "--port", "0", "--json"]
    process = start(tmp_path, "split", [sys.executable, "-m", "tailgate.loadtests.commands.main", *split])
    with ended(process):
        output = tmp_path / "split.output"
        admin = json.loads(wait_for(lambda: re.search(r"^\{.*\}$", output.read_text(), re.M))[0])["admin"]
        assert unix_names(process.pid) == {admin}
        found = listeners(process.pid)
        check_listeners(found, {"the splitter": 1, "Envoy's admin interface": 1})
        assert admin in {item.address for item in found}


def test_every_row_of_the_table_that_listens_by_default_is_started_here() -> None:
    known = ("an arm", "the live page", "the splitter", "Envoy's admin", "Locust's master of a run")
    rest = {what: where for what, where in listening().items() if not what.startswith(known) and "by hand" not in what}
    assert set(rest.values()) == {"nowhere"}
    assert len(listening()) == len(known) + 3 + 2
