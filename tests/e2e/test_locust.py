"""The locustfiles in real Locust processes: by hand, killed, on the web page, and against other servers."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.drawing import Source, build_schedule
from tailgate.loadtests.traffic.settings import TrafficConfig
from tests.fakes.inference import Behaviour, serve
from tests.fakes.processes import PATIENCE_S, free_port, wait_for
from tests.fakes.whole_run import records, start_locust
from tests.loadtests.test_chat import CHAT


def several(processes: int) -> list[str]:
    port = free_port()
    bind = f"--master-bind-host 127.0.0.1 --master-bind-port {port} --master-port {port}"
    return ["--processes", str(processes), *bind.split()]


def planned(directory: Path, target: str) -> list[str]:
    """Write a mirrored schedule of a minute and its trial; return the arguments that replay it."""
    arms, traffic = ("eager", "compiled"), TrafficConfig(duration_s=60.0, rate=25.0, length_scale=0.05)
    schedule = build_schedule(traffic, Source(), arms=arms, seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=8)
    schedule.write(directory / "schedule.arrow")
    TrialConfig(arms=arms, targets={"*": target}).write(directory / "generator.json")
    return ["-f", CHAT, "--headless", "--trial", str(directory)]


@pytest.mark.parametrize(("signal_number", "processes"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_signal_flushes_everything_and_cancels_what_runs(
    tmp_path: Path, signal_number: signal.Signals, processes: int
) -> None:
    with serve(Behaviour(stall_every=2, stall_s=60)) as slow:
        arguments = planned(tmp_path, slow.target)
        process = start_locust(*arguments, *(several(processes) if processes > 1 else []))

        def started() -> int:
            return sum(json.loads(path.read_text())["started"] for path in tmp_path.glob("generator-?.json"))

        wait_for(lambda: started() >= 40)
        process.send_signal(signal_number)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in output
    accounts = [json.loads((tmp_path / f"generator-{worker}.json").read_text()) for worker in range(processes)]
    rows = records(tmp_path)
    assert len(rows) == sum(item["started"] for item in accounts) == sum(item["finished"] for item in accounts)
    assert not any(item["complete"] for item in accounts)
    cancelled = [row for row in rows if row["status"] == "CANCELLED"]
    assert 10 < len(cancelled) < len(rows)
    assert all("end of the run" in row["error"] for row in cancelled)


def test_web_page_starts_stops_and_restarts(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["-f", CHAT, "--web-host", "127.0.0.1", "--web-port", str(port), "--records", str(tmp_path)]
    process = start_locust(*arguments)

    def page(path: str, form: dict[str, str] | None = None) -> str:
        data = urllib.parse.urlencode(form).encode() if form else None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=data, timeout=10) as answer:
            return str(answer.read().decode())

    def counts() -> dict[str, int]:
        return {row["method"]: row["num_requests"] for row in json.loads(page("/stats/requests"))["stats"]}

    def up() -> bool:
        try:
            return bool(page("/"))
        except (urllib.error.URLError, ConnectionError):
            return False

    try:
        wait_for(up)
        assert "burstiness" in page("/")
        swarm = {"user_count": "2", "spawn_rate": "2", "request_rate": "10"}
        page("/swarm", {**swarm, "host": "nonsense"})
        time.sleep(0.5)
        assert counts() == {"": 0}  # "Aggregated"
        with serve(Behaviour()) as server:
            for trial in (1, 2):
                page("/swarm", {**swarm, "host": server.target})
                wait_for(lambda: sum(row["trial"] == trial for row in records(tmp_path)) > 5)  # noqa: B023
                wait_for(lambda: counts()[""] > 10)
                seen = counts()
                assert seen[""] == seen["E2E"]
                assert 0 < seen["TTFT"] <= seen["E2E"]
                page("/stop", {"x": "1"})
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "Traceback" not in output
    assert all(word in output for word in ("nonsense", "host:port"))
    assert {row["trial"] for row in records(tmp_path)} == {1, 2}
