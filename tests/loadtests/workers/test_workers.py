"""`tailgate worker` without a run: what it refuses, and how it waits."""

from __future__ import annotations

import ast
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.schemas import BED, REQUESTS
from analysis.records.tables import RecordError, read_table
from loadtests.commands.main import main
from loadtests.experiments.reading import from_table
from loadtests.generator.recorder import RequestRecorder, record_file
from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from loadtests.trials.load import load_environment, locust_command
from loadtests.trials.processes import child_environment
from loadtests.workers import host_watch
from loadtests.workers.channel_token import TOKEN_VARIABLE, channel_token
from loadtests.workers.clock_offsets import ClockComparison, Exchange, clock_identity, host_identity
from loadtests.workers.host_watch import HostWatch, write_samples
from loadtests.workers.shipping import Inbox, Outbox, ShareParts, new_folder
from servers.clock import ANCHOR_NS
from servers.fields import ConfigError
from tests.fakes.processes import PATIENCE_S, command_of, family, free_port, wait_for
from tests.fakes.request_rows import record, row_of

ROOT = Path(__file__).resolve().parents[3]
SECRET = "0123456789abcdef"


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


OFFSET_NS = 3_200_000_000


class Channel:
    """Carries messages in both directions; `fate` says how often each arrives, and they overtake each other."""

    def __init__(self, fate: Callable[[], int]) -> None:
        self._fate = fate
        self.inbox: Inbox | None = None
        self.outbox: Outbox | None = None
        self.sent = 0

    def to_master(self, message: dict[str, Any]) -> None:
        self.sent += 1
        for _ in range(self._fate()):
            gevent.spawn_later(random.random() * 0.002, self._arrive, message)

    def to_worker(self, number: int) -> None:
        for _ in range(self._fate()):
            gevent.spawn_later(random.random() * 0.002, self._acknowledge, number)

    def _arrive(self, message: dict[str, Any]) -> None:
        assert self.inbox is not None
        self.inbox.take(message["number"], message["rows"], message["offset_ns"], message["batch"])

    def _acknowledge(self, number: int) -> None:
        assert self.outbox is not None
        self.outbox.acknowledged(number)


def ship(tmp_path: Path, channel: Channel, *, batches: int = 20, resend_after_s: float = 0.05) -> bool:
    """Whether the master had all `batches` of 4 records within some seconds."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "kept" / "requests-0.arrow"
    channel.inbox = Inbox(tmp_path / "run" / "requests-0.arrow", acknowledge=channel.to_worker)
    channel.outbox = Outbox(
        path,
        send=channel.to_master,
        clock=lambda: (OFFSET_NS, 1000),
        resend_after_s=resend_after_s,
        window_bytes=20_000,
    )
    recorder = RequestRecorder(record_file(path, remedy="", on_written=channel.outbox.written), rows_per_batch=4)
    for number in range(4 * batches):
        recorder.append(record(number))
    recorder.close()
    arrived = channel.outbox.wait_empty(8.0)
    channel.outbox.close()
    channel.inbox.close()
    return arrived


def test_each_record_arrives_once_and_on_the_masters_clock(tmp_path: Path) -> None:
    channel = Channel(lambda: 1)
    assert ship(tmp_path, channel)
    table, torn = read_table(tmp_path / "run" / "requests-0.arrow", REQUESTS)
    assert not torn
    rows = table.to_pylist()
    assert [row["request_id"] for row in rows] == [f"1-{number}" for number in range(80)]
    base = record(0)
    for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns"):
        assert {row[name] for row in rows} == {getattr(base, name) + OFFSET_NS}
    assert {row["server_recv_ns"] for row in rows} == {row_of(base)["server_recv_ns"]}
    assert rows[0]["token_ns"] == base.token_ns.tolist()
    kept, _ = read_table(tmp_path / "kept" / "requests-0.arrow", REQUESTS)
    assert set(kept.column("sent_ns").to_pylist()) == {base.sent_ns}


@pytest.mark.parametrize("seed", range(3))
def test_a_channel_that_loses_and_repeats_and_disorders_loses_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    channel = Channel(lambda: rng.choice((0, 1, 1, 1, 2)))
    assert ship(tmp_path, channel)
    rows = read_table(tmp_path / "run" / "requests-0.arrow", REQUESTS)[0].to_pylist()
    assert [row["request_id"] for row in rows] == [f"1-{number}" for number in range(80)]
    assert channel.sent > 20


def test_what_a_silent_master_lacks_is_counted_and_little_is_sent_to_it(tmp_path: Path) -> None:
    channel = Channel(lambda: 0)
    (tmp_path / "run").mkdir()
    path = tmp_path / "kept" / "requests-0.arrow"
    outbox = Outbox(path, send=channel.to_master, clock=lambda: (0, 0), window_bytes=20_000, resend_after_s=60.0)
    recorder = RequestRecorder(record_file(path, remedy="", on_written=outbox.written), rows_per_batch=4)
    for number in range(400):
        recorder.append(record(number))
    recorder.close()
    assert not outbox.wait_empty(0.1)
    assert outbox.unacknowledged_rows == 400
    assert channel.sent <= 20  # a window, not the run
    outbox.close()


@pytest.mark.parametrize("batch", [b"", b"nonsense", b"\xff" * 64])
def test_what_is_no_batch_of_records_is_refused(tmp_path: Path, batch: bytes) -> None:
    inbox = Inbox(tmp_path / "requests-0.arrow", acknowledge=lambda number: None)
    with pytest.raises(ValueError, match="batch 0"):
        inbox.take(0, 4, 0, batch)
    inbox.close()
    assert read_table(tmp_path / "requests-0.arrow", REQUESTS)[0].num_rows == 0


def test_shares_put_together_from_their_parts_are_the_schedule(tmp_path: Path) -> None:
    traffic = TrafficConfig(duration_s=30.0, rate=20.0)
    schedule = build_schedule(
        traffic, Source(), arms=["a", "b"], seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=8
    )
    indices: list[int] = []
    for worker in range(3):
        parts = ShareParts(schedule.share(worker, 3), part_bytes=1000)
        assert len(parts) > 5
        content = b"".join(parts.part(number) for number in range(len(parts)))
        (tmp_path / f"{worker}.arrow").write_bytes(content)
        share = Schedule.read(tmp_path / f"{worker}.arrow")
        indices += share.table["index"].to_pylist()
        assert share.arms == schedule.arms
    assert sorted(indices) == list(range(len(schedule)))
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("20260101T120000Z-demo/trial-01", "20260101T120000Z-demo/trial-01"),
        ("../../etc/trial-01", "etc/trial-01"),
        ("/root/../x", "root/x"),
        ("..", "trial"),
        ("", "trial"),
    ],
)
def test_a_name_from_the_network_stays_within_the_folder(tmp_path: Path, name: str, expected: str) -> None:
    assert new_folder(tmp_path, name) == tmp_path / expected
    assert new_folder(tmp_path, name).name.endswith("-2")


_STEPPED = """\
import time
from loadtests.workers.locust_channel import keep_channel
from locust import runners
keep_channel()
before_s, true_s = runners.time.time(), time.time
assert abs(before_s - true_s()) < 60
time.time = lambda: true_s() + 3600
assert abs(runners.time.time() - before_s) < 60
"""


def test_heartbeats_do_not_go_by_a_wall_clock_that_steps() -> None:
    subprocess.run([sys.executable, "-c", _STEPPED], check=True, timeout=60, cwd=ROOT)


def test_workers_of_other_hosts_need_a_secret_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    remote = ["--set", "traffic.remote_workers=1", "--set", f"traffic.master_bind=127.0.0.1:{free_port()}"]
    for command in (["run", "demo", "--out", str(tmp_path), *remote], ["worker", "--master", "127.0.0.1:1"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"needs a secret, so that no stranger takes a part of the load: export {TOKEN_VARIABLE}" in said
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match="holds 5 characters; the least is 16"):
        channel_token("it")


def test_each_run_without_them_has_a_secret_of_its_own_that_no_arm_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    traffic = TrafficConfig(rate=1.0, workers=2)
    assert TOKEN_VARIABLE not in child_environment()
    tokens = {load_environment(traffic)[TOKEN_VARIABLE] for _ in range(3)}
    assert len(tokens) == 3
    assert SECRET not in tokens
    remote = TrafficConfig(rate=1.0, remote_workers=1, master_bind="127.0.0.1:5557")
    assert load_environment(remote)[TOKEN_VARIABLE] == SECRET
    assert os.environ[TOKEN_VARIABLE] == SECRET


# In a process of its own: importing Locust patches the standard library.
_CODE = """
from locust.env import Environment
import logging, sys
from loadtests.workers.load_process import LoadProcess
LoadProcess(Environment())
handler = logging.StreamHandler(open("/dev/full", "w"))
handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None))
print("went on", flush=True)
import os
os._exit(0)
"""


def test_a_log_on_a_full_disk_gets_no_traceback_of_its_own_writing() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("went on\n", "")


HOUR_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to import; nothing here is about how long."""
    monkeypatch.setattr(host_watch, "_STOP_WITHIN_S", 60.0)


def wait_for_rows(path: Path) -> list[dict[str, Any]]:
    def rows() -> list[dict[str, Any]]:
        return read_table(path, BED)[0].to_pylist() if path.exists() else []

    wait_for(lambda: {row["kind"] for row in rows()} == {"host", "process"})
    return rows()


def test_samples_of_a_workers_host_arrive_on_the_runs_clock(tmp_path: Path) -> None:
    watch = HostWatch(tmp_path / "bed-2.arrow", trial=4, host="worker-2", sample_s=0.05)
    wait_for_rows(tmp_path / "bed-2.arrow")
    assert os.getpgid(watch._process.pid) != os.getpgid(0)  # no Ctrl-C of the worker's terminal reaches it
    facts = watch.stop()
    assert list(facts["machines"]) == ["worker-2"]
    assert facts["gaps"] == []
    there = read_table(tmp_path / "bed-2.arrow", BED)[0].to_pylist()

    write_samples(watch.samples(HOUR_NS), tmp_path / "here.arrow")
    table, truncated = read_table(tmp_path / "here.arrow", BED)
    assert not truncated
    here = table.to_pylist()
    assert here == [{**row, "at_ns": row["at_ns"] + HOUR_NS} for row in there]
    assert {(row["trial"], row["host"]) for row in here} == {(4, "worker-2")}
    assert {(row["name"], row["pid"]) for row in here if row["kind"] == "process"} == {("load", os.getpid())}


def test_a_watcher_that_cannot_write_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "bed-0.arrow.new").mkdir()
    watch = HostWatch(tmp_path / "bed-0.arrow", trial=1, host="worker-0", sample_s=0.05)
    (gap,) = watch.stop()["gaps"]
    assert gap["host"] == "worker-0"
    assert "its watcher ended with exit code 1" in gap["why"]
    with pytest.raises(RecordError, match=r"bed-0\.arrow cannot be read"):
        watch.samples(0)


# Locust changes the standard library of a process that imports it.
MASTER = """
import sys
from types import SimpleNamespace as Fake
from loadtests.workers.master import Master, _Load

sent = []
runner = Fake(register_message=lambda *_: None, send_message=lambda kind, data, client: sent.append(data))
options = Fake(records=sys.argv[1], schedule="", trial_config="", remote_workers=0)
master = Master(Fake(runner=runner, parsed_options=options))
load = _Load(number=2, client_id="x", planned=1)
for part in (0, 1, 1):  # the answer to the last was lost
    master._on_bed(load, {"part": part, "of": 2, "bytes": b"no samples"})
print(sent)
"""


def test_samples_that_the_master_cannot_take_are_not_called_kept(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MASTER, str(tmp_path)], capture_output=True, text=True, check=True)
    first, last, again = ast.literal_eval(done.stdout.splitlines()[-1])
    assert first == {"part": 0, "error": None}
    assert last == again
    assert last["error"].startswith("the master cannot take them: they are no samples")


MS = 1_000_000


def exchange(*, at_ns: int, offset_ns: int, there_ns: int, thought_ns: int, back_ns: int) -> Exchange:
    received = at_ns + there_ns + offset_ns
    return Exchange(at_ns, received, received + thought_ns, at_ns + there_ns + thought_ns + back_ns)


times = st.integers(0, 500 * MS)


@given(offset=st.integers(-(10**18), 10**18), there=times, thought=times, back=times)
def test_the_true_offset_lies_within_the_uncertainty_however_lopsided_the_way(
    offset: int, there: int, thought: int, back: int
) -> None:
    clock = ClockComparison()
    clock.add(exchange(at_ns=10**18, offset_ns=offset, there_ns=there, thought_ns=thought, back_ns=back))
    found, uncertainty = clock.at(10**18 + there + thought + back)
    assert abs(found - offset) <= uncertainty + 1  # a nanosecond for rounding
    assert uncertainty == (there + back) // 2


def test_an_exchange_in_which_time_went_back_is_not_believed() -> None:
    clock = ClockComparison()
    clock.add(Exchange(sent_ns=100, received_ns=0, answered_ns=0, back_ns=50))
    assert clock.summary(0)["exchanges"] == 0
    assert clock.at(0) == (0, 0)


def test_processes_of_one_kernel_with_one_anchor_have_one_clock() -> None:
    assert clock_identity() == (f"{host_identity()}/{ANCHOR_NS}" if host_identity() else "")
