"""What listens where: everything that the table of docs/security.md names is started, and its sockets are listed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from loadtests.commands.main import build_parser
from servers.address import host_port
from servers.config import ArmConfig
from tests.fakes.listening import Listener, family, listeners, unix_names
from tests.fakes.whole_run import FAKE_ARM, ROOT, tailgate

SOCKET = "a Unix socket"

RUN = """
name = "small"
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "compiled-padded"
[traffic]
duration_s = 2
rate = 20
length_scale = 0.05
block_s = 1
workers = 2
[trials]
starting_at_once = 2
[bed]
reference_s = 0
"""


def table() -> dict[str, str]:
    """What listens, and where by default, of "What listens where" in docs/security.md."""
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.partition("## What listens where")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert cells[0][:2] == ["what", "by default"]
    return {what: where for what, where, *_ in cells[2:]}


def row_of(found: Listener) -> str:
    """How the row begins that names the socket."""
    command = found.command
    if re.match(r"\S*envoy\S* ", command):
        return "Envoy's admin interface" if not found.port else "the splitter"
    for part, row in (
        (str(FAKE_ARM), "an arm"),
        ("tests.fakes.engine", "an arm"),
        ("loadtests.page", "the live page"),
        ("--trial-config", "Locust's master of a run"),
        ("commands.main provider", "the judge"),
    ):
        if part in command:
            return row
    raise AssertionError(f"the table names no socket of {found}")


def check(found: set[Listener], rows: dict[str, int]) -> None:
    """So many sockets of each row listen, each where the table has it by default, and no other does."""
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


@contextlib.contextmanager
def started(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**{key: value for key, value in os.environ.items() if "TAILGATE" not in key}, "PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            for member in family(process.pid):
                os.kill(member, signal.SIGKILL)
            raise


def said(process: subprocess.Popen[str], folder: Path) -> dict[str, object]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (folder / "stderr").read_text()
    answer: dict[str, object] = json.loads(line)
    return answer


def test_a_run_listens_on_loopback_alone_and_its_admin_interface_is_for_its_user(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RUN)
    found: set[Listener] = set()
    modes: set[tuple[int, int]] = set()
    with started(tmp_path, *tailgate("run", "small.toml")[1:]) as run:
        while run.poll() is None:
            for item in listeners(run.pid) - found:
                if item.command:  # not between the fork of a child and its own program, nor at its end
                    found.add(item)
                with contextlib.suppress(OSError):
                    if not item.port:
                        place = Path(item.address)
                        modes.add((stat.S_IMODE(place.parent.stat().st_mode), stat.S_IMODE(place.stat().st_mode)))
            time.sleep(0.05)
    assert run.returncode == 3, (tmp_path / "stderr").read_text()
    rows = {"an arm": 2, "the live page": 1, "the splitter": 1, "Envoy's admin interface": 1}
    check(found, {**rows, "Locust's master of a run": 1})
    assert modes == {(0o700, 0o600)}
    assert not [item.address for item in found if not item.port and Path(item.address).exists()]


def test_what_is_started_by_hand_listens_on_loopback_alone(tmp_path: Path) -> None:
    config = tmp_path / "arm.json"
    config.write_text(json.dumps(ArmConfig(name="eager").to_dict()))
    serve = ["-m", "tests.fakes.engine", "answers", "--config", str(config)]
    with started(tmp_path, *serve) as process:
        said(process, tmp_path)
        check(listeners(process.pid), {"an arm": 1})
        assert len(family(process.pid)) >= 2  # its engine, to which a pair of sockets leads
        assert unix_names(process.pid) == set()
    with started(tmp_path, *serve, "--metrics-port", "free") as process:
        where = said(process, tmp_path)
        found = listeners(process.pid)
        assert {(item.address, item.port) for item in found} == {
            ("127.0.0.1", where[name]) for name in ("port", "metrics_port")
        }

    split = ["-m", "loadtests.commands.main", "split", "--arm", "eager=127.0.0.1:1", "--port", "0"]
    with started(tmp_path, *split) as process:
        where = said(process, tmp_path)
        assert unix_names(process.pid) == {where["admin"]}
        found = listeners(process.pid)
        check(found, {"the splitter": 1, "Envoy's admin interface": 1})
        assert where["admin"] in {item.address for item in found}

    default, _ = host_port(build_parser().parse_args(["provider", "runs"]).listen)
    provider = ["-m", "loadtests.commands.main", "provider", str(tmp_path), "--listen", f"{default}:0"]
    with started(tmp_path, *provider) as process:
        said(process, tmp_path)
        check(listeners(process.pid), {"the judge": 1})


def test_every_row_of_the_table_is_one_that_is_started_here() -> None:
    """What is nowhere by default is not among what listens by default."""
    known = ("an arm", "the live page", "the judge", "the splitter", "Envoy's admin", "Locust's master of a run")
    rest = {what: where for what, where in table().items() if not what.startswith(known) and "by hand" not in what}
    assert set(rest.values()) == {"nowhere"}
    assert len(table()) == len(known) + 2 + 2
