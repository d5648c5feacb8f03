"""`tailgate worker` without a run: what it refuses, and how it waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtests.commands.main import build_parser, main
from loadtests.experiments.reading import from_table
from loadtests.traffic.settings import TrafficConfig
from loadtests.trials.load import locust_command
from loadtests.trials.progress import read_workers
from loadtests.workers.channel_token import TOKEN_VARIABLE
from loadtests.workers.remote import parse_master
from servers.fields import ConfigError
from tests.fakes.listening import command_of, family
from tests.fakes.patience import PATIENCE_S
from tests.loadtests.test_chat import free_port

ROOT = Path(__file__).resolve().parents[3]
SECRET = "0123456789abcdef"


@pytest.mark.parametrize("text", ["nowhere", "host:", ":5557", "host:0", "host:65536", "host:port", ""])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        parse_master(text)


def test_addresses_of_both_families_are_read() -> None:
    assert parse_master("10.0.0.5:5557") == ("10.0.0.5", 5557)
    assert parse_master("[fd00::1]:5557") == ("fd00::1", 5557)


def test_bad_usage_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    for arguments, message in (
        (["--master", "nowhere"], '--master "nowhere" is not HOST:PORT'),
        (["--master", "localhost:1", "--keep", str(tmp_path / "file" / "x")], "cannot be made"),
    ):
        assert main(["worker", *arguments]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1


def test_a_worker_without_a_run_says_what_it_waits_for_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "loadtests.commands.main", "worker", "--master", f"127.0.0.1:{port}"]
    # A test process in the background of a script ignores Ctrl-C, and its children would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*command, "--keep", str(tmp_path / "kept")],
        cwd=ROOT,
        env={**os.environ, TOKEN_VARIABLE: SECRET},
        text=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert f"waiting for a run at 127.0.0.1:{port}; Ctrl-C ends" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1


# A load process that says when it is asked to stop in order, and then takes its time.
STANDS_IN = """
import signal, sys, time
def stop(number, frame):
    print("stops in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("load", flush=True)
time.sleep(120)
"""
WORKS = """
import sys
from pathlib import Path
from loadtests.commands import main as command
from loadtests.workers import remote
remote._LOCUST = (sys.executable, "-c", sys.argv[2], "--")
sys.exit(command.main(["worker", "--master", sys.argv[1], "--keep", sys.argv[3]]))
"""


def test_sigterm_stops_a_worker_and_its_load_in_order_as_a_container_does(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        address = f"127.0.0.1:{master.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", WORKS, address, STANDS_IN, str(tmp_path / "kept")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: SECRET},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "load\n"
        process.send_signal(signal.SIGTERM)
        told, complaint = process.communicate(timeout=PATIENCE_S)
    assert told == "stops in order\n"
    assert "interrupted" in complaint
    assert process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_drives_the_load_ends_with_the_worker_whatever_ends_that(number: signal.Signals, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        command = ["worker", "--master", f"127.0.0.1:{master.getsockname()[1]}", "--keep", "kept"]
        process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.commands.main", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: SECRET},
            stdin=subprocess.DEVNULL,
        )
        while len(driving := family(process.pid)[1:]) < 1:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(60)
    deadline = time.monotonic() + 60
    while any(command_of(pid) for pid in driving):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_workers": 1}, 'traffic.master_bind is "": give this host'),
        ({"remote_workers": 1, "master_bind": "10.0.0.5"}, 'traffic.master_bind is "10.0.0.5": give this host'),
        ({"remote_workers": 1, "master_bind": "0.0.0.0:5557"}, "give an IP address of this host"),
        ({"remote_workers": 1, "master_bind": "loadgen:5557"}, "give an IP address of this host"),
        ({"master_bind": "10.0.0.5:5557"}, "remote_workers is 0: remove master_bind"),
        ({"workers": 0}, "traffic.workers is 0: give a value from 1"),
        ({"remote_workers": -1}, "traffic.remote_workers is -1"),
    ],
)
def test_workers_on_other_hosts_need_an_address_to_come_to(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrafficConfig(rate=1.0, **changes)


def test_load_may_come_from_other_hosts_alone() -> None:
    traffic = TrafficConfig(rate=1.0, workers=0, remote_workers=3, master_bind="[fd00::1]:5557")
    assert (traffic.load_processes, traffic.master) == (3, ("fd00::1", 5557))


def experiment(**traffic: Any) -> Any:
    arms = [{"preset": "eager", "control": True}, {"preset": "compiled-padded"}]
    return from_table({"name": "hosts", "arms": arms, "traffic": {"rate": 1.0, **traffic}})


def test_arms_that_only_this_host_reaches_are_refused() -> None:
    remote = {"remote_workers": 2, "master_bind": "10.0.0.5:5557"}
    assert experiment(**remote).traffic.load_processes == 3
    with pytest.raises(ConfigError, match="eager, compiled-padded would be reached without the splitter"):
        experiment(**remote, direct=True)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (0, "-u 2 -r 2 --master-bind-host 10.0.0.5 --master-bind-port 5557 --remote-workers 2 "
            "--expect-workers-max-wait 90 --master"),
        (3, "-u 5 -r 5 --master-bind-host 10.0.0.5 --master-bind-port 5557 --remote-workers 2 "
            "--expect-workers-max-wait 90 --processes 3 --master-host 10.0.0.5 --master-port 5557"),
    ],
)  # fmt: skip
def test_locust_waits_for_the_workers_of_other_hosts(tmp_path: Path, workers: int, expected: str) -> None:
    command = locust_command(
        schedule=tmp_path / "s",
        trial_config=tmp_path / "t",
        records=tmp_path,
        workers=workers,
        remote_workers=2,
        master=("10.0.0.5", 5557),
        wait_s=89.5,
    )
    assert expected in " ".join(command)


def test_display_knows_how_many_workers_have_come_until_they_are_assigned(tmp_path: Path) -> None:
    assert read_workers(tmp_path) is None
    (tmp_path / "workers.json").write_text('{"expected": 3, "connected": 1}')
    assert read_workers(tmp_path) == (1, 3)
    (tmp_path / "workers.json").write_text('{"expected": 3, "connected": 3, "assigned": true}')
    assert read_workers(tmp_path) is None
    (tmp_path / "workers.json").write_text('{"expe')
    assert read_workers(tmp_path) is None


def test_deployed_workers_are_started_as_the_command_line_allows() -> None:
    deployment = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "workers.yaml").read_text())
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    variables = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    assert TOKEN_VARIABLE in [item["name"] for item in container["env"] if "valueFrom" in item]
    command = [*container["command"], *container["args"]]
    for name, value in variables.items():
        command = [part.replace(f"$({name})", value) for part in command]
    options = build_parser().parse_args(command[1:])
    assert (command[0], options.command, options.trials) == ("tailgate", "worker", 0)
    assert parse_master(options.master)[1] == 5557
    assert options.keep in [mount["mountPath"] for mount in container["volumeMounts"]]
