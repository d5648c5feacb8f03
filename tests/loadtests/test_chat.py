"""The locustfiles in real Locust processes under a schedule, and what their flags refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from tailgate.loadtests.generator.trial_config import TrialConfig
from tailgate.loadtests.traffic.drawing import Source, build_schedule
from tailgate.loadtests.traffic.schedule import Schedule
from tailgate.loadtests.traffic.settings import TrafficConfig
from tailgate.servers.config import Task
from tests.fakes.inference import Behaviour, serve
from tests.fakes.processes import free_port
from tests.fakes.whole_run import records, run_locust

# Locust would patch the standard library for every other test in this process.
with patch.dict(os.environ, {"LOCUST_SKIP_MONKEY_PATCH": "1"}):
    from locust.argument_parser import get_empty_argument_parser

    from tailgate.loadtests.workers.by_hand import add_arguments, hand_config

CHAT = "loadtests/chat.py"


def several(processes: int) -> list[str]:
    port = free_port()
    bind = f"--master-bind-host 127.0.0.1 --master-bind-port {port} --master-port {port}"
    return ["--processes", str(processes), *bind.split()]


def account(directory: Path, worker: int = 0) -> Any:
    return json.loads((directory / f"generator-{worker}.json").read_text())


def planned(
    directory: Path, targets: dict[str, str], *, duration_s: float = 2.0, **trial: Any
) -> tuple[Schedule, list[str]]:
    """A mirrored schedule and its trial in `directory`, and the arguments that replay it."""
    arms, traffic = ("eager", "compiled"), TrafficConfig(duration_s=duration_s, rate=25.0, length_scale=0.05)
    schedule = build_schedule(traffic, Source(), arms=arms, seed=1, trial=1, max_prompt_tokens=64, max_new_tokens=8)
    schedule.write(directory / "schedule.arrow")
    TrialConfig(arms=arms, targets=targets, **trial).write(directory / "generator.json")
    return schedule, ["-f", CHAT, "--headless", "--trial", str(directory)]


@pytest.mark.process
def test_two_processes_split_the_schedule_without_loss(tmp_path: Path) -> None:
    with serve(Behaviour(arm="eager")) as eager, serve(Behaviour(arm="compiled")) as compiled:
        schedule, arguments = planned(tmp_path, {"eager": eager.target, "compiled": compiled.target})
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
    (start_ns,) = {item["start_ns"] for item in accounts}
    offsets = dict(enumerate(schedule.offset_ns.tolist()))
    for row in rows:
        assert row["scheduled_ns"] - start_ns == offsets[int(row["request_id"].split("-")[1])]
        assert row["sent_ns"] >= row["scheduled_ns"]


@pytest.mark.process
def test_bad_usage_ends_locust_with_one_line() -> None:
    code, output = run_locust("-f", CHAT, "--headless", "--trial", "none")
    assert code == 2
    assert '"none/generator.json"' in output
    assert "Traceback" not in output


REFUSED: list[tuple[Task, str, list[str], tuple[str, ...]]] = [
    ("generate", "nowhere", [], ("nowhere", "host:port")),
    ("generate", "", [], ("--host",)),
    ("generate", "h:1", ["--request-rate", "0"], ("--request-rate", "0")),
    ("generate", "h:1", ["--request-rate", "inf"], ("--request-rate", "inf is not above 0 and finite")),
    ("generate", "https://h:1", ["--tls-ca", "/nowhere/ca.pem"], ("/nowhere/ca.pem",)),
    ("generate", "https://h:1", ["--token-env", "TAILGATE_TEST_TOKEN"], ("TAILGATE_TEST_TOKEN", "not set")),
    ("generate", "https://h:1", ["--token-env", "s3cret-T0ken"], ("token_env",)),
    ("generate", "https://h:1", ["--client-key", "k.pem"], ("tls_key",)),
    ("embed", "nowhere", [], ("nowhere", "host:port")),
    ("embed", "h:1", ["--max-new-tokens", "8"], ("--max-new-tokens",)),
]


@pytest.mark.parametrize(("task", "host", "flags", "words"), REFUSED)
def test_flags_that_cannot_work_are_refused(
    capsys: pytest.CaptureFixture[str], task: Task, host: str, flags: list[str], words: tuple[str, ...]
) -> None:
    def give() -> None:
        parser = get_empty_argument_parser(add_help=False)
        add_arguments(parser, task=task)
        options = parser.parse_args(flags)
        hand_config(Mock(host=host, parsed_options=options), 1, task=task)

    with pytest.raises((ValueError, SystemExit)) as refused:
        give()
    said = f"{refused.value}{capsys.readouterr().err}"
    assert [word for word in words if word not in said] == [], said
    assert "s3cret" not in said
