"""Who may take a part of the load: real Locust masters, real workers, and strangers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.commands.main import main
from loadtests.traffic.settings import TrafficConfig
from loadtests.trials.load import load_environment
from loadtests.trials.processes import child_environment
from loadtests.workers.channel_token import TOKEN_VARIABLE, channel_token
from servers.fields import ConfigError
from tests.loadtests.test_chat import free_port

ROOT = Path(__file__).parents[3]
SECRET = "0123456789abcdef"

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
