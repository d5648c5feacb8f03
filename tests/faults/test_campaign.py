"""Short runs with faults of every family, promises that can be broken, and faults that do what they say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.campaign import carry_out
from tests.faults.fault import Moment
from tests.faults.machine import clocks, step_clock, why_no_clocks
from tests.faults.plan import FAMILIES, SECRETS, Plan, covering, plan
from tests.faults.processes import MARK, Signal, by_role, marked
from tests.faults.promises import PROMISES, Answered, Command, Injected, Story, breaches, leaks, tracebacks
from tests.faults.relay import Relay, Weather, change
from tests.faults.storage import REMOVED, Disk, Storage, why_no_disks

COUNTS = dict.fromkeys(FAMILIES, 2) | {"signals": 5}
SEEDS = [(family, seed) for family, count in COUNTS.items() for seed in covering(count, family)]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_every_promise_holds_under_faults(family: str, seed: int, tmp_path: Path) -> None:
    planned = plan(seed, quick=True, families=(family,))
    assert not breaches(carry_out(planned, tmp_path)), planned


S = 1_000_000_000
PLAN = Plan(seed=1, kind="run", truth="good", family="safety", duration_s=5.0)


def ended(code: int | None, verdict: str | None = None, *, stderr: str = "", **more: Any) -> Command:
    line = json.dumps({"verdict": verdict, "complete": verdict is not None, **more})
    return Command(code=code, stdout=f"{line}\n", stderr=stderr, limit_s=60.0)


def story(**changes: Any) -> Story:
    """Return a run that broke and kept every promise, with the changes."""
    return replace(Story(plan=PLAN, run=ended(1, stderr="tailgate: it broke\n")), **changes)


def hit(number: signal.Signals, role: str) -> Injected:
    moment = Moment(phase="traffic", after_s=1.0, fault=Signal(number, role))
    return Injected(moment=moment, at_ns=10 * S, hit=f"1 of {role}")


def planned(number: signal.Signals, role: str, **changes: Any) -> Plan:
    return replace(PLAN, moments=(hit(number, role).moment,), **changes)


def answers(*at_s: float) -> tuple[Answered, ...]:
    return tuple(Answered(request_id=f"1-{n}", arm="eager", at_ns=int(at * S)) for n, at in enumerate(at_s))


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PASSED, FAILED = ended(0, "PASS"), ended(99, "FAIL")
WITHOUT_CANDIDATE = {"run": PASSED, "answered": answers(5.0, 12.0), "injected": (hit(KILL, "candidate"),)}
BY_LOAD = {"answered": answers(5.0, 9.2, 11.0), "injected": (hit(KILL, "load"),)}
LAST_SECOND = {**BY_LOAD, "recorded": frozenset({"1-0"})}
GONE = replace(hit(KILL, "run"), moment=Moment(phase="judging", after_s=0.1, fault=Storage(REMOVED)))
LIVENESS = planned(STOP, "watcher", family="liveness")
# (promise, what breaks it, what does not)
CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "no wrong PASS",
        [
            *(
                {"plan": replace(PLAN, truth=truth), "run": PASSED}
                for truth in ("naive", "slow", "other answers", "dies")
            ),
            {"plan": replace(PLAN, truth="naive"), "analysis": PASSED},
            {"plan": replace(PLAN, truth="naive"), "summaries": ({"overall": "PASS"},)},
            WITHOUT_CANDIDATE,
        ],
        [
            {"plan": replace(PLAN, truth="naive"), "run": FAILED, "analysis": FAILED},
            {**WITHOUT_CANDIDATE, "answered": answers(5.0, 10.5)},  # it died after its last request
            {**WITHOUT_CANDIDATE, "injected": (hit(STOP, "candidate"),)},
        ],
    ),
    (
        "no wrong blame",
        [{"plan": planned(KILL, "control"), "run": FAILED}],
        [
            {"plan": planned(KILL, "candidate"), "run": FAILED},
            {"plan": replace(PLAN, truth="slow"), "run": FAILED},
        ],
    ),
    ("ends by itself within its limit", [{"run": ended(None)}, {"analysis": ended(None)}], [{}]),
    ("nothing is left behind", [{"left": ("process 'envoy'",)}, {"gone_after_s": 20.0}], [{}]),
    (
        "flushed records stay",
        [
            {"recorded_before": frozenset({"1-0", "1-1"}), "recorded": frozenset({"1-0"})},
            {**BY_LOAD, "recorded": frozenset({"1-1"})},
            {"answered": answers(5.0), "injected": (hit(KILL, "watcher"),)},  # the watcher records no request
        ],
        [LAST_SECOND, {"answered": answers(1.0, 2.0), "recorded": frozenset({"1-0", "1-1"})}],
    ),
    (
        "reasons are one line",
        [
            {"tracebacks": ("logs/monitor.log",)},
            {"run": ended(1, stderr="Traceback (most recent call last):\ntailgate: it broke\n")},
            {"run": ended(1, stderr="tailgate: " + "x" * 3000)},
            {"run": ended(1, stderr="tailgate: a fault in tailgate itself, KeyError: 1")},
            {"run": ended(1)},
            {"run": ended(-9)},
        ],
        [{}],
    ),
    (
        "can be judged afterwards",
        [{"analysis": item} for item in (ended(1), ended(1, stderr=2 * "tailgate: no\n"), ended(3), ended(-6))],
        [{"analysis": ended(1, stderr="tailgate: no records\n")}, {"analysis": ended(3, "INCONCLUSIVE")}],
    ),
    ("no secret in any file", [{"leaks": ("trial.json (FAULTS_TOKEN)",)}], [{}]),
    (
        "summaries are as published",
        [{"run": ended(3, "INCONCLUSIVE")}, {"summaries": ("no JSON",)}, {"summaries": ({"schema": 1},)}],
        [{}, {"run": ended(3, "INCONCLUSIVE"), "injected": (GONE,)}],
    ),
    (
        "goes on once faults are lifted",
        [
            {"plan": LIVENESS},
            {"plan": LIVENESS, "run": FAILED},
            {"plan": replace(LIVENESS, truth="naive"), "run": ended(3, "INCONCLUSIVE")},
        ],
        [
            {"plan": LIVENESS, "run": PASSED},
            {"plan": planned(STOP, "candidate", family="liveness"), "run": FAILED},
            {},  # a safety plan need not go on
        ],
    ),
]


@pytest.mark.parametrize(("promise", "broken", "kept"), CASES, ids=[case[0] for case in CASES])
def test_stories_break_or_keep_a_promise(
    promise: str, broken: list[dict[str, Any]], kept: list[dict[str, Any]]
) -> None:
    assert [changes for changes in broken if promise not in breaches(story(**changes))] == []
    assert [changes for changes in kept if promise in breaches(story(**changes))] == []


def test_every_promise_has_cases() -> None:
    assert [promise for promise, _, _ in CASES] == list(PROMISES)
    assert breaches(story()) == {}


def test_secrets_and_tracebacks_are_found_in_any_file(tmp_path: Path) -> None:
    name, secret = next(iter(SECRETS.items()))
    (tmp_path / "logs").mkdir()
    arm, load = tmp_path / "logs" / "arm.log", tmp_path / "logs" / "load.log"
    arm.write_bytes(b"\xff opens with " + secret.encode())
    load.write_text("Traceback (most recent call last):\n")
    assert leaks([tmp_path], []) == (f"{arm} ({name})",)
    assert len(leaks([], [f"python --token {secret}"])) == 1
    assert leaks([tmp_path / "none"], ["python"]) == ()
    assert tracebacks([tmp_path]) == (f"{load}",)
    load.write_text("Exception ignored in atexit callback:\nTraceback (most recent call last):\n")
    assert tracebacks([tmp_path]) == ()


_TELL = """
import sys, time
for _ in sys.stdin:
    time.sleep(0.01)
    print(time.time(), time.monotonic(), flush=True)
"""


@pytest.mark.skipif(bool(why_no_clocks()), reason=f"no clocks to change: {why_no_clocks()}")
def test_the_wall_clock_of_a_process_steps_and_its_monotonic_clock_does_not(tmp_path: Path) -> None:
    given = {**os.environ, **clocks(tmp_path)}
    command = [sys.executable, "-c", _TELL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given) as process:
        for shift in (0, 3600, -3600, 0):
            step_clock(tmp_path, shift)
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            assert wall - time.time() == pytest.approx(shift, abs=30)
            assert monotonic - time.monotonic() == pytest.approx(0, abs=30)
        process.stdin.close()


@pytest.mark.skipif(bool(why_no_disks()), reason=f"no disks to break: {why_no_disks()}")
def test_a_full_disk_refuses_writes_until_it_is_freed(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk", size_mib=8).mounted() as disk:
        disk.fill()
        with (disk.path / "x").open("wb", buffering=0) as file:
            with pytest.raises(OSError, match="No space left"):
                file.write(bytes(100_000))
            disk.free()
            assert file.write(bytes(1000)) == 1000
    assert not (tmp_path / "disk").is_mount()


def test_a_relay_passes_on_resets_once_and_accepts_new_connections(tmp_path: Path) -> None:
    async def use(target: int) -> None:
        relay = Relay(("127.0.0.1", target))
        await relay.start()

        def reset_and_go_on() -> None:
            for change_it in (lambda: change(tmp_path / "weather", Weather(reset=True)), None):
                with socket.create_connection(("127.0.0.1", relay.port), timeout=30) as wire:
                    wire.sendall(b"x")
                    assert wire.recv(1) == b"x"
                    if change_it is not None:
                        change_it()
                        with pytest.raises(ConnectionResetError):
                            wire.recv(1)

        following = asyncio.create_task(relay.follow(tmp_path / "weather"))
        await asyncio.to_thread(reset_and_go_on)
        following.cancel()

    def echo(listener: socket.socket) -> None:
        while True:
            wire, _ = listener.accept()
            wire.sendall(wire.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        asyncio.run(use(listener.getsockname()[1]))


def test_marked_processes_are_found_with_their_children_and_no_others() -> None:
    mark = f"test-of-processes-{os.getpid()}"  # concurrent tests have theirs
    shell = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'input()'!r}], stdin=0)"
    started = subprocess.Popen([sys.executable, "-c", shell], env={**os.environ, MARK: mark}, stdin=subprocess.PIPE)
    try:
        while len(found := marked(mark)) < 2:
            assert started.poll() is None
        assert started.pid in found
        assert {item.parent for pid, item in found.items() if pid != started.pid} == {started.pid}
        assert by_role(mark, started.pid)["orchestrator"] == [started.pid]
        assert not marked(f"{mark}0")
    finally:
        started.communicate(b"\n")
