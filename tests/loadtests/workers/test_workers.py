"""Workers and their master: what they refuse, how they wait, and what they send each other."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any
from unittest.mock import Mock, patch

import gevent
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailgate.analysis.records.schemas import REQUESTS
from tailgate.analysis.records.tables import read_table
from tailgate.loadtests.commands.main import main
from tailgate.loadtests.generator import clock_offsets
from tailgate.loadtests.generator.clock_offsets import ClockComparison, Exchange
from tailgate.loadtests.generator.recorder import RequestRecorder, record_file
from tailgate.loadtests.generator.trial_config import TrialConfig, write_end
from tailgate.loadtests.traffic.drawing import Source, build_schedule
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.loadtests.trials.load import load_environment
from tailgate.loadtests.trials.processes import child_environment
from tailgate.loadtests.workers import channel as messages
from tailgate.loadtests.workers import file_copy
from tailgate.loadtests.workers.channel import TOKEN_VARIABLE
from tailgate.loadtests.workers.file_copy import FileReceiver, FileSender, folder_for
from tests.fakes.processes import PATIENCE_S, command_of, family, free_port, wait_for
from tests.fakes.request_rows import record, row_of

# Locust would patch the standard library for every other test in this process.
with patch.dict(os.environ, {"LOCUST_SKIP_MONKEY_PATCH": "1"}):
    import zmq
    from locust import runners
    from locust.env import Environment
    from locust.rpc.zmqrpc import BaseSocket
    from locust.runners import STATE_MISSING, MasterRunner

    from tailgate.loadtests.workers import master as masters
    from tailgate.loadtests.workers import worker as workers
    from tailgate.loadtests.workers.by_hand import OpenLoopUser
    from tailgate.loadtests.workers.load_process import LoadProcess
    from tailgate.loadtests.workers.locust_events import close_channel, keep_channel
    from tailgate.loadtests.workers.worker import Worker

ROOT = Path(__file__).resolve().parents[3]
SECRET = "0123456789abcdef"


REMOTE = "--set traffic.remote_workers=1 --set traffic.master_bind=127.0.0.1:5557"


@pytest.mark.parametrize(
    ("secret", "command", "message"),
    [
        (SECRET, "worker --master nowhere", '--master "nowhere" is not HOST:PORT'),
        (SECRET, "worker --master localhost:1 --keep /dev/null/x", "cannot be made"),
        (
            "",
            "worker --master localhost:1",
            f"so that only your workers take part in the load: export {TOKEN_VARIABLE}=",
        ),
        ("short", "worker --master localhost:1", "holds 5 characters; the least is 16"),
        ("", f"run demo --out /dev/null/x {REMOTE}", "needs a secret, so that only your workers"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: str, command: str, message: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, secret)
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


# `tailgate worker` at a master, with a load process that says when it is asked to stop in order.
WORKS = """
import sys
from tailgate.loadtests.commands import main, worker
code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('stops in order', flush=True)))"
worker.locust = lambda: (sys.executable, "-c", code + "; print('load', flush=True); signal.pause()", "--")
sys.exit(main.main(["worker", "--master", sys.argv[1], "--keep", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_worker_waits_for_a_run_and_what_drives_the_load_ends_in_order_with_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    address, pipe = ("127.0.0.1", free_port()), subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: SECRET}
    command = [sys.executable, "-c", WORKS, f"127.0.0.1:{address[1]}", str(tmp_path / "kept")]
    # A test process in the background of a script ignores Ctrl-C, and its children would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe)
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    assert process.stderr is not None
    assert "waiting for a run at 127.0.0.1:" in process.stderr.readline()
    with socket.create_server(address):
        assert process.stdout.readline() == "load\n"
        driving = family(process.pid)[1:]
        assert driving
        process.send_signal(number)
        output, complaint = process.communicate(timeout=PATIENCE_S)
    assert output == "stops in order\n"
    wait_for(lambda: not any(command_of(pid) for pid in driving))
    if number != signal.SIGKILL:
        assert ("interrupted" in complaint, process.returncode) == (True, 1)


OFFSET_NS = 3_200_000_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_copy, "PIECE_BYTES", 3_000)
    monkeypatch.setattr(file_copy, "RESEND_AFTER_S", 0.05)


class Channel:
    """From one host to another; `fate` says how often each message arrives, and they overtake each other."""

    def __init__(self, folder: Path, fate: Callable[[], int]) -> None:
        self.here, self.there = (folder / name / "requests-0.arrow" for name in ("run", "kept"))
        self.sent_bytes = 0

        def later(deliver: Callable[..., None], *message: Any) -> None:
            for _ in range(fate()):
                gevent.spawn_later(random.random() * 0.002, deliver, *message)

        def send(message: dict[str, Any]) -> None:
            self.sent_bytes += len(message["bytes"])
            later(self.receiver.take, *(message[name] for name in ("at", "bytes")))

        self.receiver = FileReceiver(self.here, confirm=lambda size: later(self.sender.confirm, size))
        self.sender = FileSender(self.there, send=send)

    def ship(self, batches: int = 20, *, within_s: float = 8.0) -> bool:
        """Whether the other host had all `batches` of 4 records within so many seconds."""
        clock = ClockComparison()
        clock.add(Exchange(0, OFFSET_NS, OFFSET_NS, 0))
        recorder = RequestRecorder(record_file(self.there), rows_per_batch=4, clock=clock)
        for number in range(4 * batches):
            recorder.append(record(number))
            gevent.sleep(0)  # the file grows while it is sent
        recorder.close()
        arrived = self.sender.wait_complete(within_s)
        self.sender.close()
        self.receiver.close()
        return arrived


@pytest.mark.parametrize("fates", [(1,), (0, 1, 1, 1, 2), (0, 1, 1, 2, 2)])
def test_each_record_arrives_once_and_on_the_masters_clock(tmp_path: Path, fates: tuple[int, ...]) -> None:
    channel, base = Channel(tmp_path, partial(random.Random(0).choice, fates)), record(0)
    assert channel.ship()
    assert channel.here.read_bytes() == channel.there.read_bytes()
    table, torn = read_table(channel.here, REQUESTS)
    rows = [] if torn else table.to_pylist()
    assert [row["request_id"] for row in rows] == [f"1-{number}" for number in range(80)]
    for name in ("scheduled_ns", "sent_ns", "first_token_ns", "end_ns"):
        assert {row[name] for row in rows} == {getattr(base, name) + OFFSET_NS}
    assert {row["server_recv_ns"] for row in rows} == {row_of(base)["server_recv_ns"]}
    assert rows[0]["token_ns"] == base.token_ns.tolist()


def test_what_a_silent_master_lacks_is_known_and_little_is_sent_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copy, "RESEND_AFTER_S", 60.0)
    channel = Channel(tmp_path, lambda: 0)
    assert not channel.ship(100, within_s=0.3)
    assert channel.sender.missing_bytes == channel.there.stat().st_size > 100_000
    assert 0 < channel.sent_bytes <= 3_000  # a piece, not the run


def drawn() -> Schedule:
    traffic, most = TrafficConfig(duration_s=30.0, rate=20.0), {"max_prompt_tokens": 64, "max_new_tokens": 8}
    return build_schedule(traffic, Source(), arms=["a", "b"], seed=1, trial=1, **most)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("20260101T120000Z-demo/trial-01", "20260101T120000Z-demo/trial-01"),
        *(("../../etc/x", "etc/x"), ("/root/../x", "root/x"), ("..", "."), ("", ".")),
    ],
)
def test_a_name_from_the_network_stays_within_the_folder(name: str, folder: str, tmp_path: Path) -> None:
    for _ in range(2):  # workers of one host share it
        assert folder_for(tmp_path, name) == tmp_path / folder


def test_heartbeats_do_not_go_by_a_wall_clock_that_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "time", time)
    keep_channel()
    before_s = time.time()
    monkeypatch.setattr(time, "time", lambda: before_s + 3600)
    assert abs(runners.time.time() - before_s) < 60


def test_each_run_without_them_has_a_secret_of_its_own_that_no_arm_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    traffic = TrafficConfig(rate=1.0, workers=2)
    assert TOKEN_VARIABLE not in child_environment()
    tokens = {load_environment(traffic)[TOKEN_VARIABLE] for _ in range(3)}
    assert len(tokens) == 3
    assert SECRET not in tokens
    remote = TrafficConfig(rate=1.0, remote_workers=2, master_bind="127.0.0.1:5557")
    assert remote.load_processes == 3
    assert load_environment(remote)[TOKEN_VARIABLE] == SECRET
    assert os.environ[TOKEN_VARIABLE] == SECRET


def test_the_channel_is_encrypted_and_takes_no_process_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseSocket, "__init__", plain := BaseSocket.__init__)  # restored
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    for _ in range(2):  # Locust loads a locustfile more than once
        close_channel()
    master, worker = (BaseSocket(kind, True).socket for kind in (zmq.ROUTER, zmq.DEALER))
    worker.connect(f"tcp://127.0.0.1:{master.bind_to_random_port('tcp://127.0.0.1')}")
    worker.send(b"hello")
    assert master.poll(20_000)
    assert master.recv_multipart()[1] == b"hello"
    assert master.getsockopt(zmq.MECHANISM) == worker.getsockopt(zmq.MECHANISM) == zmq.CURVE
    strangers = []
    for secret in ("another-secret-0123", None):
        monkeypatch.setattr(BaseSocket, "__init__", plain)
        monkeypatch.setenv(TOKEN_VARIABLE, secret) if secret else monkeypatch.delenv(TOKEN_VARIABLE)
        close_channel()
        strangers.append(BaseSocket(zmq.DEALER, True).socket)
        strangers[-1].connect(master.getsockopt_string(zmq.LAST_ENDPOINT))
        strangers[-1].send(b"let me in")
    assert not master.poll(500)
    for end in (master, worker, *strangers):
        end.close(linger=0)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> LoadProcess:
    monkeypatch.setattr(logging, "raiseExceptions", True)  # restored
    options = Fake(trial="", headless=True, html_file="")
    environment = Environment(parsed_options=options)  # type: ignore[arg-type]
    environment.create_local_runner()
    return LoadProcess(environment)


@pytest.mark.usefixtures("load")
def test_a_log_on_a_full_disk_gets_no_traceback_of_its_own_writing(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "No space left"))))
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None))
    assert capsys.readouterr().err == ""


def test_locust_counts_each_finished_request_once_and_keeps_ttft_out_of_the_total(load: LoadProcess) -> None:
    for status in ("OK", "CANCELLED", "UNAVAILABLE"):
        load.count_in_locust(record(status=status))
    stats: Any = load.environment.stats
    counts = {key: (entry.num_requests, entry.num_failures) for key, entry in stats.entries.items()}
    assert counts == {("Generate [eager]", "E2E"): (2, 1), ("Generate [eager]", "TTFT"): (1, 0)}
    assert (stats.total.num_requests, stats.total.num_failures) == (2, 1)


class ByHand(OpenLoopUser):
    def wait(self) -> None:
        """Wait for nothing."""


def gaps_ns(worker: int) -> list[int]:
    lengths = {"length_scale": 0.1, "max_prompt_tokens": 64, "max_new_tokens": 8}
    options = Fake(trial="", seed=1, burstiness=4.0, request_rate=1000.0, arm="", **lengths)
    counts: Any = {"users": count(), "requests": count(), "tests": 0, "task": "generate"}
    load = Fake(options=options, generator=Mock(), worker=worker, **counts)
    user = ByHand(Fake(tailgate_load=load))  # type: ignore[arg-type]
    user.on_start()
    at_ns = [user._next_ns]
    for _ in range(256):
        user._plan_next()
        at_ns.append(user._next_ns)
    return np.diff(at_ns).tolist()


def test_users_by_hand_keep_their_rate_and_workers_draw_other_gaps() -> None:
    assert np.mean(gaps_ns(0)) == pytest.approx(1e6, rel=0.2)
    assert gaps_ns(0) == gaps_ns(0) != gaps_ns(1)


def say(runner: Mock, kind: str, node: str = "", **data: Any) -> None:
    """Deliver a message to who registered for it."""
    (listener,) = (call.args[1] for call in runner.register_message.call_args_list if call.args[0] == kind)
    listener(environment=None, msg=Fake(node_id=node, data=data))


def sent(runner: Mock, kind: str) -> list[dict[str, Any]]:
    return [call.args[1] for call in runner.send_message.call_args_list if call.args[0] == kind]


class Trial:
    """A master with two workers, "x" and "y"."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.schedule, self.nodes = folder, drawn(), {node: Fake(id=node, state="") for node in "xy"}
        self.schedule.write(folder / "schedule.arrow")
        TrialConfig(arms=("a", "b"), targets={"*": "h:1"}).write(folder / "generator.json")
        self.runner = Mock(spec=MasterRunner, get_worker_index="xy".index)
        self.runner.clients = Fake(ready=[*self.nodes.values()], running=[], spawning=[], get=self.nodes.get)
        options = Fake(trial=str(folder), remote_workers=0)
        self.environment = Fake(runner=self.runner, parsed_options=options, process_exit_code=None)
        self.master = masters.Master(self.environment)  # type: ignore[arg-type]
        self.master.assign()

    def account(self, number: int) -> Any:
        return json.loads((self.folder / f"generator-{number}.json").read_text())

    def exit_code(self) -> Any:
        wait_for(lambda: self.runner.quit.called, sleep=gevent.sleep)
        return self.environment.process_exit_code


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    quick = Fake(spawn=gevent.spawn, Timeout=gevent.Timeout, sleep=lambda seconds: gevent.sleep(seconds / 100))
    monkeypatch.setattr(masters, "gevent", quick)
    return Trial(tmp_path)


def test_a_trial_starts_once_when_all_are_ready_and_ends_with_the_last(trial: Trial) -> None:
    runner, (_, assigned) = trial.runner, sent(trial.runner, messages.ASSIGN)
    assert Schedule.parse(assigned["share"], ()).table == trial.schedule.share(1, 2).table
    say(runner, messages.READY, "x")
    assert sent(runner, messages.START) == []
    for _ in range(2):
        say(runner, messages.READY, "y")
    (start,) = sent(runner, messages.START)
    say(runner, messages.ACCOUNT, "y", complete=False, clock={"offset_ns": 7})
    assert start["start_ns"] > 0
    assert trial.account(1)["clock"] == {"offset_ns": 7}
    write_end(trial.folder, at_ns=9, arms={})
    (end,) = wait_for(lambda: sent(runner, messages.END), sleep=gevent.sleep)
    assert (end["at_ns"], end["arms"]) == (9, {})
    say(runner, messages.DONE, "x", error=None, missing="")
    gevent.sleep(0.02)
    runner.quit.assert_not_called()
    say(runner, messages.DONE, "y", error=None, missing="3 bytes are on y")
    assert trial.exit_code() == 0
    assert trial.account(1)["lost"] == "3 bytes are on y"
    trial.master.close()


def test_a_lost_worker_is_marked_and_the_trial_fails_once_all_are(trial: Trial) -> None:
    del trial.nodes["x"]
    wait_for(lambda: (trial.folder / "generator-0.json").exists(), sleep=gevent.sleep)
    assert trial.account(0)["lost"] == "it is no longer connected"
    trial.runner.quit.assert_not_called()
    trial.nodes["y"].state = STATE_MISSING
    assert trial.exit_code() == 1


def test_records_of_a_worker_go_to_a_new_file_of_its_own(trial: Trial) -> None:
    piece = {"at": 0, "bytes": b"abc"}
    say(trial.runner, messages.FILE, "y", **piece)
    (have,) = wait_for(lambda: sent(trial.runner, messages.HAVE), sleep=gevent.sleep)
    assert have == {"size": 3}
    assert (trial.folder / "requests-1.arrow").read_bytes() == b"abc"
    (trial.folder / "requests-0.arrow").write_bytes(b"taken")
    say(trial.runner, messages.FILE, "x", **piece)
    assert trial.exit_code() == 1
    assert (trial.folder / "requests-0.arrow").read_bytes() == b"taken"


def worker_of(keep: Path | None) -> tuple[Worker, Mock, Any]:
    """A worker whose clock is OFFSET_NS behind the master's, its runner, and its load process."""
    load, runner = Mock(log=Fake(complete=False, error=None), generator=Mock(failure=None)), Mock()
    worker = Worker(Fake(runner=runner), load, keep=keep)  # type: ignore[arg-type]
    worker._clock.add(Exchange(0, OFFSET_NS, OFFSET_NS, 0))
    return worker, runner, load


def last_report(runner: Mock) -> dict[str, Any]:
    """What the worker reported at its end."""
    (report,) = wait_for(lambda: sent(runner, messages.DONE), sleep=gevent.sleep)
    return report


def test_a_worker_keeps_the_masters_times_on_its_own_clock(tmp_path: Path) -> None:
    _, runner, load = worker_of(tmp_path)
    say(runner, messages.END, at_ns=9 * OFFSET_NS, arms={"a": 8 * OFFSET_NS})
    say(runner, messages.START, start_ns=7 * OFFSET_NS)
    assert last_report(runner) == {"error": None, "missing": ""}
    load.generator.end_at.assert_called_once_with(8 * OFFSET_NS)
    load.generator.end_arm_at.assert_called_once_with("a", 7 * OFFSET_NS)
    (start_ns,) = load.generator.run.call_args.args
    assert start_ns == 6 * OFFSET_NS
    assert load.log.complete


def test_a_worker_says_what_the_master_lacks_and_that_it_failed(tmp_path: Path) -> None:
    worker, runner, load = worker_of(tmp_path)
    load.generator.failure = "the disk is full"
    sender = Mock(missing_bytes=3, path=tmp_path / "requests-0.arrow")
    sender.wait_complete.return_value = False
    worker._sender = sender
    worker._send_account({"settled_ns": 5})
    say(runner, messages.START, start_ns=1)
    report = last_report(runner)
    assert (report["error"], load.log.complete) == ("the disk is full", False)
    assert f"3 bytes of requests-0.arrow did not reach the master: they are in {tmp_path}" in report["missing"]
    sender.missing_bytes = 0
    worker._send_account({"settled_ns": 6})
    assert [account["settled_ns"] for account in sent(runner, messages.ACCOUNT)] == [None, 6]


def test_a_worker_takes_no_share_that_it_would_misread() -> None:
    for protocol, error in ((1, "the master speaks version 1 of"), (messages.PROTOCOL, "shares no clock")):
        runner = worker_of(None)[1]
        say(runner, messages.ASSIGN, protocol=protocol, worker=0, records="", host="another")
        assert error in last_report(runner)["error"]


def test_a_worker_compares_clocks_before_it_begins_also_where_an_answer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_ANSWER_WITHIN_S", 0.05)
    worker, runner, _ = worker_of(tmp_path)
    asked = count()

    def answer(kind: str, data: dict[str, Any]) -> None:
        if next(asked) != 1:
            times = {"received_ns": data["sent_ns"], "answered_ns": data["sent_ns"]}
            gevent.spawn(say, runner, messages.CLOCK, sent_ns=data["sent_ns"], **times)

    runner.send_message.side_effect = answer
    worker._compare_clocks()
    assert (worker._clock.count, next(asked)) == (20, 20)


def exchange(*, at_ns: int, offset_ns: int, there_ns: int, thought_ns: int, back_ns: int) -> Exchange:
    received = at_ns + there_ns + offset_ns
    return Exchange(at_ns, received, received + thought_ns, at_ns + there_ns + thought_ns + back_ns)


times = st.integers(0, 500_000_000)


@given(offset=st.integers(-(10**18), 10**18), there=times, thought=times, back=times)
def test_the_true_offset_lies_within_the_uncertainty(offset: int, there: int, thought: int, back: int) -> None:
    clock = ClockComparison()
    clock.add(exchange(at_ns=10**18, offset_ns=offset, there_ns=there, thought_ns=thought, back_ns=back))
    back_ns = 10**18 + there + thought + back
    uncertainty = clock.best.uncertainty_ns(back_ns)
    assert clock.best.uncertainty_ns(back_ns + 10**9) == uncertainty + 50_000, "clocks drift"
    assert abs(clock.best.offset_ns - offset) <= uncertainty + 1  # a nanosecond for rounding
    assert uncertainty == (there + back) // 2


def test_the_quickest_exchange_is_believed_and_none_in_which_time_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockComparison()
    for travel in (2, 40):
        clock.add(exchange(at_ns=0, offset_ns=travel, there_ns=travel, thought_ns=0, back_ns=travel))
    clock.add(Exchange(sent_ns=100, received_ns=0, answered_ns=0, back_ns=50))
    assert (clock.count, clock.best.offset_ns) == (2, 2)
    assert [clock.best.uncertainty_ns(at_ns) for at_ns in (4, 4 + 10**9)] == [2, 50_002]
    moments = iter((4 + 10**9, 4, 4))
    monkeypatch.setattr(clock_offsets, "now_ns", moments.__next__)
    for _ in range(2):
        assert clock.offset_of_records() == 2
    assert clock.account()["worst_uncertainty_ns"] == 50_002
