"""The locustfile in real Locust processes: by hand, over several processes, on the web page, and under a schedule."""

from __future__ import annotations

import csv
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.traffic.drawing import build_schedule
from loadtests.traffic.schedule import Schedule
from loadtests.traffic.settings import TrafficConfig
from loadtests.traffic.source import Source
from tests.fakes.inference import Behaviour, ServedFake, serve
from tests.fakes.locust_process import records, run_locust, start_locust
from tests.fakes.patience import PATIENCE_S, wait_for

ROOT = Path(__file__).parents[2]
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
def server() -> Iterator[ServedFake]:
    with serve(Behaviour(token_s=0.002, fail_every=10)) as served:
        yield served


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


def test_headless_run_by_hand_writes_csv_and_html(server: ServedFake, tmp_path: Path) -> None:
    arguments = ["-f", CHAT, "--headless", "--host", f"http://{server.target}", "-u", "4", "-r", "4", "-t", "12s"]
    arguments += ["--request-rate", "5", "--stop-timeout", "5", "--records", str(tmp_path / "records")]
    arguments += ["--csv", str(tmp_path / "out"), "--html", str(tmp_path / "out.html")]
    code, output = run_locust(*arguments, "--json-file", str(tmp_path / "out"))
    assert "Traceback" not in output
    assert code == 1, output  # Locust's own rule: some requests failed
    rows = records(tmp_path / "records")
    assert 8 < len(rows) < 480  # 4 users x 5/s x about 12 s, of which a busy machine takes most to start them
    statuses = Counter(row["status"] for row in rows)
    assert set(statuses) == {"OK", "RESOURCE_EXHAUSTED"}
    stats = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())}
    assert stats["Generate e2e [eager]"]["num_requests"] == statuses["OK"]
    assert stats["Generate ttft [eager]"]["num_requests"] == statuses["OK"]
    assert stats["Generate e2e"]["num_failures"] == statuses["RESOURCE_EXHAUSTED"]
    with (tmp_path / "out_stats.csv").open() as file:  # Locust writes it each second and not at the end
        table = {row["Name"]: row for row in csv.DictReader(file)}
    assert 10 < int(table["Generate e2e [eager]"]["Request Count"]) <= statuses["OK"]
    assert "Generate e2e [eager]" in (tmp_path / "out.html").read_text()
    assert "the queue is full: 128 of 128" in (tmp_path / "out_failures.csv").read_text()
    assert account(tmp_path / "records")["complete"] is True


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


def test_one_process_replays_the_schedule_at_the_given_start_and_quits(
    two_arms: dict[str, str], tmp_path: Path
) -> None:
    start_ns = time.time_ns() + 6_000_000_000
    schedule, arguments = planned(tmp_path, two_arms, duration_s=1.0, start_ns=start_ns)
    code, output = run_locust(*arguments)
    assert (code, "Traceback" in output) == (0, False), output
    rows = records(tmp_path)
    assert len(rows) == 2 * len(schedule)
    assert min(row["scheduled_ns"] for row in rows) == start_ns + int(schedule.offset_ns[0])
    progress = json.loads((tmp_path / "progress-0.json").read_text())
    assert progress["arms"]["eager"]["n"] == progress["overall"]["compiled"]["n"] == len(schedule)
    assert progress["overall"]["eager"]["ttft_p99_ms"] > 0


def test_failed_requests_do_not_fail_the_load_process(two_arms: dict[str, str], tmp_path: Path) -> None:
    targets = {"eager": two_arms["eager"], "compiled": f"127.0.0.1:{free_port()}"}
    schedule, arguments = planned(tmp_path, targets, duration_s=1.0)
    code, output = run_locust(*arguments)
    assert (code, "Traceback" in output) == (0, False), output
    by_arm = Counter((row["arm"], row["status"]) for row in records(tmp_path))
    assert by_arm == {("eager", "OK"): len(schedule), ("compiled", "UNAVAILABLE"): len(schedule)}


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


def test_killed_worker_leaves_its_flushed_records_and_the_other_finishes(
    two_arms: dict[str, str], tmp_path: Path
) -> None:
    schedule, arguments = planned(tmp_path, two_arms, duration_s=6.0)
    port = free_port()
    network = ["--master-bind-host", "127.0.0.1", "--master-bind-port", str(port), "--expect-workers", "2"]
    master = start_locust(*arguments, "--master", *network)
    workers = [
        start_locust("-f", CHAT, "--worker", "--master-host", "127.0.0.1", "--master-port", str(port)) for _ in "ab"
    ]
    try:
        wait_for(lambda: len(list(tmp_path.glob("requests-*.arrow"))) == 2 and len(records(tmp_path)) > 40)
        before = {row["request_id"] for row in records(tmp_path)}
        workers[0].kill()
        output, _ = master.communicate(timeout=PATIENCE_S)
    finally:
        for process in (master, *workers):
            process.kill()
            process.wait()
    after = {row["request_id"] for row in records(tmp_path)}
    assert before <= after
    complete = [account(tmp_path, worker)["complete"] for worker in (0, 1)]
    assert sorted(complete) == [False, True]
    survivor = complete.index(True)
    mine = {f"1-{index}-{arm}" for index in range(survivor, len(schedule), 2) for arm in ("eager", "compiled")}
    assert mine <= after
    assert "is lost" in output
    dead = account(tmp_path, 1 - survivor)
    assert dead["lost"] in ("it no longer answers", "it is no longer connected")
    assert dead["planned"] + account(tmp_path, survivor)["planned"] == 2 * len(schedule)


def test_the_names_of_serving_benchmarks_mean_what_they_mean_there(server: ServedFake, tmp_path: Path) -> None:
    flags = ["--request-rate", "inf", "--max-concurrency", "3", "--num-prompts", "20", "--seed", "4"]
    code, output = run_locust(
        *("-f", CHAT, "--host", server.target, "--headless", "-u", "1", "-r", "1", "--records", str(tmp_path)),
        *(*flags, "--goodput", "ttft:5000", "tpot:5000"),
    )
    assert code in (0, 1), output  # Locust's own: every tenth request fails here
    rows = records(tmp_path)
    assert len(rows) == 20
    changes = sorted([(row["sent_ns"], 1) for row in rows] + [(row["end_ns"], -1) for row in rows])
    running = [sum(change for _, change in changes[: place + 1]) for place in range(len(changes))]
    assert max(running) == 3
    good = sum(row["status"] == "OK" for row in rows)
    assert sum(map(int, re.findall(r"goodput.*?; (\d+) of \d+ requests", output))) == good
    assert sum(map(int, re.findall(r"goodput.*?; \d+ of (\d+) requests", output))) == 20
    assert "within ttft 5000 ms, tpot 5000 ms" in output


def test_load_test_shape_drives_the_number_of_sources(server: ServedFake, tmp_path: Path) -> None:
    shape = tmp_path / "shape.py"
    shape.write_text(
        "from locust import LoadTestShape\n\n\n"
        "class Steps(LoadTestShape):\n"
        "    def tick(self):\n"
        "        return None if self.get_run_time() > 5 else ((8, 8) if self.get_run_time() > 2.5 else (1, 1))\n"
    )
    arguments = ["-f", f"{CHAT},{shape}", "--headless", "--host", server.target, "--request-rate", "10"]
    _, output = run_locust(*arguments, "--records", str(tmp_path / "records"))
    assert "Traceback" not in output
    times = sorted(row["scheduled_ns"] for row in records(tmp_path / "records"))
    early = sum(at - times[0] < 2e9 for at in times)
    late = sum(times[-1] - at < 1.5e9 for at in times)
    assert late > 2 * early


def test_web_page_starts_stops_and_restarts(server: ServedFake, tmp_path: Path) -> None:
    port = free_port()
    arguments = ["-f", CHAT, "--web-host", "127.0.0.1", "--web-port", str(port), "--records", str(tmp_path)]
    process = start_locust(*arguments)

    def page(path: str, form: dict[str, str] | None = None) -> str:
        data = urllib.parse.urlencode(form).encode() if form else None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=data, timeout=10) as answer:
            return str(answer.read().decode())

    def rows_seen() -> int:
        return sum(row["num_requests"] for row in json.loads(page("/stats/requests"))["stats"][:-1])

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
        assert rows_seen() == 0
        for trial in (1, 2):
            page("/swarm", {**swarm, "host": server.target})
            wait_for(lambda: sum(row["trial"] == trial for row in records(tmp_path)) > 5)  # noqa: B023
            wait_for(lambda: rows_seen() > 10)
            page("/stop", {"x": "1"})
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "Traceback" not in output
    assert 'target "nonsense" is not host:port' in output
    assert {row["trial"] for row in records(tmp_path)} == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "nowhere"], 'target "nowhere" is not host:port'),
        ([], "no host is given"),
        (["--schedule", "a.arrow"], "--schedule and --trial-config belong together"),
        (["--host", "h:1", "--live-page", "docs"], '--live-page "docs" is no run directory, as it holds no experiment'),
        (["--host", "h:1", "--live-page", "http://h:1/?token=x"], "--live-page holds a token"),
        (["--host", "h:1", "--live-page", "http://h:1/"], "a link on Locust's web page, which --headless leaves out"),
        (["--schedule", "a.arrow", "--trial-config", "no.json"], 'trial config "no.json" cannot be read'),
        (["--host", "localhost:1", "--request-rate", "0"], "argument --request-rate: 0 is not above 0"),
    ],
)
def test_bad_usage_is_one_clear_line(arguments: list[str], message: str) -> None:
    code, output = run_locust("-f", CHAT, "--headless", *arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
