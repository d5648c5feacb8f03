from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.traffic.settings import TrafficConfig
from loadtests.trials.load import load_environment, locust_command
from loadtests.trials.processes import child_environment
from loadtests.workers.channel_token import TOKEN_VARIABLE
from tests.fakes.inference import Behaviour, serve
from tests.fakes.patience import wait_for
from tests.fakes.tap import Tap
from tests.loadtests.test_chat import CHAT, account, free_port, planned, records
from tests.loadtests.workers.test_remote import ROOT, SECRET


@contextlib.contextmanager
def started(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=(folder / "log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stranger(port: int, *, host: str = "127.0.0.1") -> list[str]:
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / CHAT), "--worker", "--loglevel", "DEBUG"]
    return [*command, "--master-host", host, "--master-port", str(port)]


def listens_on(port: int) -> set[str]:
    """The addresses at which the port of this machine listens, in the kernel's hexadecimal."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, _, number = local.partition(":")
                if state == "0A" and int(number, 16) == port:
                    found.add(address)
    return found


@pytest.fixture(scope="module")
def two_arms() -> Iterator[dict[str, str]]:
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled")) as compiled:
        yield {"eager": eager.target, "compiled": compiled.target}


def test_a_stranger_gets_no_part_of_a_run_with_two_local_workers(two_arms: dict[str, str], tmp_path: Path) -> None:
    schedule, _ = planned(tmp_path, two_arms, duration_s=4.0)
    command = locust_command(
        schedule=tmp_path / "schedule.arrow", trial_config=tmp_path / "generator.json", records=tmp_path, workers=2
    )
    port = int(command[command.index("--master-bind-port") + 1])
    traffic = TrafficConfig(rate=1.0, workers=2)
    with (
        started(stranger(port), tmp_path / "stranger", child_environment()) as outside,
        started(command, tmp_path / "master", load_environment(traffic)) as master,
    ):
        wait_for(lambda: bool(listens_on(port)) or master.poll() is not None)
        assert listens_on(port) == {"0100007F"}
        assert master.wait(timeout=60) == 0, (tmp_path / "master" / "log").read_text()
        assert outside.poll() is None  # it still asks
    assert len(records(tmp_path)) == 2 * len(schedule)
    assert sum(account(tmp_path, worker)["planned"] for worker in (0, 1)) == 2 * len(schedule)
    assert not (tmp_path / "generator-2.json").exists()
    assert "Failed to connect to master" in (tmp_path / "stranger" / "log").read_text()
    assert "index 2" not in (tmp_path / "master" / "log").read_text()


def test_a_worker_of_another_host_joins_with_the_secret_and_without_it_does_not(
    two_arms: dict[str, str], tmp_path: Path
) -> None:
    planned(tmp_path, two_arms, duration_s=1.0)
    port = free_port()
    command = locust_command(
        schedule=tmp_path / "schedule.arrow",
        trial_config=tmp_path / "generator.json",
        records=tmp_path,
        workers=0,
        remote_workers=1,
        master=("127.0.0.1", port),
        wait_s=60,
    )
    mine = {**child_environment(), TOKEN_VARIABLE: SECRET}
    strangers = {"none": child_environment(), "another": {**mine, TOKEN_VARIABLE: "another secret 0123"}}
    keep = ["--keep", str(tmp_path / "kept")]
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(started(command, tmp_path / "master", mine))
        for name, theirs in strangers.items():
            stack.enter_context(started([*stranger(port), *keep], tmp_path / name, theirs))
        for name in strangers:
            log = tmp_path / name / "log"
            wait_for(lambda: "Failed to connect to master" in log.read_text() or master.poll() is not None)  # noqa: B023
        with started([*stranger(port), *keep], tmp_path / "worker", mine):
            assert master.wait(timeout=60) == 0, (tmp_path / "master" / "log").read_text()
    assert len(records(tmp_path)) > 0
    assert "1 workers connected" in (tmp_path / "master" / "log").read_text()


@pytest.mark.parametrize("closed", [True, False], ids=["with the secret", "by hand without one"])
def test_who_listens_on_the_way_reads_nothing_of_what_goes_over_the_channel(
    closed: bool, two_arms: dict[str, str], tmp_path: Path
) -> None:
    """Without a secret everything can be read: that is what the search finds where there is something to find."""
    schedule, _ = planned(tmp_path, two_arms, duration_s=1.0)
    port = free_port()
    command = locust_command(
        schedule=tmp_path / "schedule.arrow",
        trial_config=tmp_path / "generator.json",
        records=tmp_path,
        workers=0,
        remote_workers=1,
        master=("127.0.0.1", port),
        wait_s=60,
    )
    mine = {**child_environment(), **({TOKEN_VARIABLE: SECRET} if closed else {})}
    keep = ["--keep", str(tmp_path / "kept")]
    with (
        Tap(("127.0.0.1", port)) as tap,
        started(command, tmp_path / "master", mine) as master,
        started([*stranger(tap.port), *keep], tmp_path / "worker", mine),
    ):
        assert master.wait(timeout=60) == 0, (tmp_path / "master" / "log").read_text()
        seen = bytes(tap.seen)
    assert len(records(tmp_path)) == 2 * len(schedule)
    assert len(seen) > 10_000
    # a message of Locust, an arm's address, an arm in the records, and the secret itself
    told = {what: what.encode() in seen for what in ("client_ready", two_arms["eager"], "compiled", SECRET)}
    assert told == {"client_ready": not closed, two_arms["eager"]: not closed, "compiled": not closed, SECRET: False}
