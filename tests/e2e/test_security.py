"""Secrets and sockets: no secret is written, and sockets listen where docs/how-to/security.md says."""

from __future__ import annotations

import contextlib
import json
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.servers.clock import ANCHOR_NS, ANCHOR_VARIABLE
from tests.fakes.credentials import TLS, Watched, give, search, start
from tests.fakes.processes import PATIENCE_S, Listener, free_port, listeners, unix_names, wait_for
from tests.fakes.whole_run import FAKE_ARM, ROOT, ended, records, requests, tailgate

ELSEWHERE = "127.0.0.2"
BEHIND_NS = -3_200_000_000

RUN = """
name = "small"
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "compiled-padded"
[traffic]
duration_s = {duration_s}
rate = 20
length_scale = 0.05
block_s = 1
{traffic}
[trials]
starting_at_once = 2
[machines]
reference_s = 0
"""


def start_run(folder: Path, *arguments: str, duration_s: float, host: str, port: int) -> subprocess.Popen[str]:
    traffic = f'design = "split"\nworkers = 0\nremote_workers = 1\nmaster_bind = "{host}:{port}"'
    text = RUN.format(duration_s=duration_s, traffic=traffic) + TLS.format(token='token_env = "PLANTED_TOKEN"')
    (folder / "small.toml").write_text(text)
    return start(folder, "run", tailgate("run", "small.toml", *arguments))


def worker(folder: Path, master: str, *, clock_ns: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tailgate.loadtests.commands.main", "worker", "--master", master]
    clock = {ANCHOR_VARIABLE: str(ANCHOR_NS + clock_ns)}
    return start(folder, "worker", [*command, "--keep", "kept", "--trials", "1"], **clock)


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
    port = free_port()
    run = start_run(tmp_path, duration_s=4.0, host=ELSEWHERE, port=port)
    with Watched(tmp_path / "tmp") as watched:
        load = worker(tmp_path, f"{ELSEWHERE}:{port}", clock_ns=BEHIND_NS)
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
    arms = [item for item in watched.sockets if row_of(item, "the run") == "an arm"]
    assert {item.address for item in arms} == {"127.0.0.1"}


SOCKET = "a Unix socket"


def table() -> dict[str, str]:
    """Return the sockets and their default addresses in "What listens where" of docs/how-to/security.md."""
    text = (ROOT / "docs" / "how-to" / "security.md").read_text()
    section = text.partition("## What listens where")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert cells[0][:2] == ["what", "by default"]
    return {what: where for what, where, *_ in cells[2:]}


def row_of(found: Listener, otherwise: str = "") -> str:
    command = found.command
    if re.match(r"\S*envoy\S* ", command):
        return "Envoy's admin interface" if not found.port else "the splitter"
    for part, row in (
        ("commands.main import main", "the live page"),
        (str(FAKE_ARM), "an arm"),
        ("--trial ", "Locust's master of a run"),
    ):
        if part in command:
            return row
    if otherwise:
        return otherwise
    raise AssertionError(f"the table names no socket of {found}")


def check(found: set[Listener], rows: dict[str, int]) -> None:
    """Check that `rows` sockets of each row listen at their default address, and no others."""
    where = table()
    counted = dict.fromkeys(rows, 0)
    for item in found:
        row = row_of(item)
        (default,) = (address for what, address in where.items() if what.startswith(row))
        counted[row] = counted.get(row, 0) + 1
        if default == SOCKET:
            assert item.address.startswith("/"), item
        else:
            assert item.address == default, item
    assert counted == rows, found


def test_a_run_listens_on_loopback_and_its_admin_interface_is_for_its_user(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN.format(duration_s=2, traffic="workers = 2"))
    found: set[Listener] = set()
    modes: set[tuple[int, int]] = set()
    run = start(tmp_path, "run", tailgate("run", "small.toml", "--json"))
    with ended(run):
        while run.poll() is None:
            for item in listeners(run.pid) - found:
                if item.command:  # empty between fork and exec
                    found.add(item)
                with contextlib.suppress(OSError):
                    if not item.port:
                        place = Path(item.address)
                        modes.add((stat.S_IMODE(place.parent.stat().st_mode), stat.S_IMODE(place.stat().st_mode)))
            time.sleep(0.05)
    *_, last = (tmp_path / "run.output").read_text().splitlines()
    assert run.returncode == 3, last
    assert json.loads(last)["verdict"] == "INCONCLUSIVE"
    rows = {"an arm": 2, "the live page": 1, "the splitter": 1, "Envoy's admin interface": 1}
    check(found, {**rows, "Locust's master of a run": 1})
    assert modes == {(0o700, 0o600)}
    assert not [item.address for item in found if not item.port and Path(item.address).exists()]


def test_a_splitter_by_hand_listens_on_loopback(tmp_path: Path) -> None:
    split = ["split", "--arm", "eager=127.0.0.1:1", "--port", "0", "--json"]
    process = start(tmp_path, "split", [sys.executable, "-m", "tailgate.loadtests.commands.main", *split])
    with ended(process):
        output = tmp_path / "split.output"
        admin = json.loads(wait_for(lambda: re.search(r"^\{.*\}$", output.read_text(), re.M))[0])["admin"]
        assert unix_names(process.pid) == {admin}
        found = listeners(process.pid)
        check(found, {"the splitter": 1, "Envoy's admin interface": 1})
        assert admin in {item.address for item in found}


def test_every_row_of_the_table_that_listens_by_default_is_started_here() -> None:
    known = ("an arm", "the live page", "the splitter", "Envoy's admin", "Locust's master of a run")
    rest = {what: where for what, where in table().items() if not what.startswith(known) and "by hand" not in what}
    assert set(rest.values()) == {"nowhere"}
    assert len(table()) == len(known) + 3 + 2
