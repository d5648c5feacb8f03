"""The locustfile in real Locust processes: by hand, over several processes, on the web page, and under a schedule."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from tests.fakes.inference import Behaviour, serve
from tests.fakes.locust_process import records, run_locust, start_locust
from tests.fakes.patience import PATIENCE_S, wait_for

CHAT = "loadtests/chat.py"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def several(processes: int) -> list[str]:
    port = str(free_port())
    return [
        "--processes",
        str(processes),
        "--master-bind-host",
        "127.0.0.1",
        "--master-bind-port",
        port,
        "--master-port",
        port,
    ]


def account(directory: Path, worker: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / f"generator-{worker}.json").read_text())
    return content


@pytest.fixture(scope="module")
def two_arms() -> Iterator[dict[str, str]]:
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled")) as compiled:
        yield {"eager": eager.target, "compiled": compiled.target}


def planned(
    directory: Path, targets: dict[str, str], *, duration_s: float = 2.0, **trial: object
) -> tuple[Schedule, list[str]]:
    """A mirrored schedule and its trial in `directory`, and the arguments that replay it."""
    traffic = TrafficConfig(duration_s=duration_s, rate=25.0, length_scale=0.05)
    schedule = build_schedule(
        traffic, Source(), arms=["eager", "compiled"], seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=8
    )
    schedule.write(directory / "schedule.arrow")
    config = {"trial": 1, "arms": ["eager", "compiled"], "targets": targets, "drain_s": 10, **trial}
    (directory / "generator.json").write_text(json.dumps(config))
    files = ["--schedule", str(directory / "schedule.arrow"), "--trial-config", str(directory / "generator.json")]
    return schedule, ["-f", CHAT, "--headless", *files, "--records", str(directory)]


@pytest.mark.process
def test_two_processes_split_the_schedule_without_loss(two_arms: dict[str, str], tmp_path: Path) -> None:
    schedule, arguments = planned(tmp_path, two_arms)
    code, output = run_locust(*arguments, *several(2))
    assert (code, "Traceback" in output) == (0, False), output
    rows = records(tmp_path)
    expected = {f"1-{index}-{arm}" for index in range(len(schedule)) for arm in ("eager", "compiled")}
    assert {row["request_id"] for row in rows} == expected
    assert len(rows) == len(expected)
    assert {row["status"] for row in rows} == {"OK"}
    accounts = [account(tmp_path, worker) for worker in (0, 1)]
    assert [item["complete"] for item in accounts] == [True, True]
    assert sum(item["planned"] for item in accounts) == len(rows)
    assert all(item["started"] == item["finished"] == item["planned"] > 0 for item in accounts)
    start_ns = accounts[0]["start_ns"]
    assert accounts[1]["start_ns"] == start_ns
    offsets = dict(enumerate(schedule.offset_ns.tolist()))
    for row in rows:
        assert row["scheduled_ns"] - start_ns == offsets[int(row["request_id"].split("-")[1])]
        assert row["sent_ns"] >= row["scheduled_ns"]


@pytest.mark.process
@pytest.mark.parametrize(("signal_number", "processes"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_signal_flushes_everything_and_cancels_what_runs(
    tmp_path: Path, signal_number: signal.Signals, processes: int
) -> None:
    with serve(Behaviour(stall_every=2, stall_s=60)) as slow:
        _, arguments = planned(tmp_path, {"*": slow.target}, duration_s=60.0)
        process = start_locust(*arguments, *(several(processes) if processes > 1 else []))

        def started() -> int:
            return sum(json.loads(path.read_text())["started"] for path in tmp_path.glob("generator-?.json"))

        wait_for(lambda: started() >= 40)
        process.send_signal(signal_number)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in output
    told = [account(tmp_path, worker) for worker in range(processes)]
    rows = records(tmp_path)
    assert len(rows) == sum(item["started"] for item in told) == sum(item["finished"] for item in told)
    assert not any(item["complete"] for item in told)
    cancelled = [row for row in rows if row["status"] == "CANCELLED"]
    assert 10 < len(cancelled) < len(rows)
    assert {row["error"] for row in cancelled} == {"cut by the end of the run"}
