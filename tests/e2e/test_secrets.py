"""Secrets with a load worker on another host: everything that was written, sent and shown is searched for them.

Real Envoy with TLS on both sides, real Locust, a worker behind a relay that keeps what passes, and paced fake arms that
check the token.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

from loadtests.page.access import TOKEN_VARIABLE as PAGE_VARIABLE
from servers.address import host_port
from tests.fakes.patience import PATIENCE_S
from tests.fakes.planted_secrets import OTHER, TLS, TOKENS, Watched, give, search, start
from tests.fakes.tap import Tap
from tests.fakes.whole_run import ended, requests, tailgate
from tests.loadtests.test_chat import free_port

ELSEWHERE = "127.0.0.2"  # an address of this machine that is not the default

RUN = """
name = "small"
[[arms]]
preset = "eager"
control = true
[[arms]]
preset = "compiled-padded"
[traffic]
design = "split"
duration_s = {duration_s}
rate = 20
length_scale = 0.05
block_s = 1
workers = 0
remote_workers = 1
master_bind = "{host}:{port}"
[trials]
starting_at_once = 2
[bed]
reference_s = 0
"""


def start_run(folder: Path, *, duration_s: float, host: str, port: int) -> subprocess.Popen[str]:
    text = RUN.format(duration_s=duration_s, host=host, port=port) + TLS.format(token='token_env = "PLANTED_TOKEN"')
    (folder / "small.toml").write_text(text)
    return start(folder, "run", tailgate("run", "small.toml"))


def ask_for_weights(folder: Path, token: str) -> int:
    """The status of the page's answer; 0 where there is no page."""
    pages = list(folder.glob("runs/*/page.json"))
    if not pages:
        return 0
    try:
        host, port = host_port(json.loads(pages[0].read_text())["url"].removeprefix("http://").rstrip("/"))
        connection = http.client.HTTPConnection(host, port, timeout=10)
        body = json.dumps({"weights": {"eager": 2}})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", "/weights", body, headers)
        return connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException):
        return 0


def worker(folder: Path, port: int, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadtests.commands.main", "worker", "--master", f"127.0.0.1:{port}"]
    return start(folder, "worker", [*command, "--keep", "kept", "--trials", "1"], **variables)


def test_a_run_with_a_worker_elsewhere_writes_and_sends_no_secret(tmp_path: Path) -> None:
    pem = give(tmp_path, "127.0.0.1", ELSEWHERE)
    port = free_port()
    run = start_run(tmp_path, duration_s=4.0, host=ELSEWHERE, port=port)
    answers = set()
    with Tap((ELSEWHERE, port)) as tap, Watched(tmp_path / "tmp") as watched:
        load = worker(tmp_path, tap.port)
        watched.pids += [run.pid, load.pid]
        with ended(run, load):
            while run.poll() is None:
                answers |= {ask_for_weights(tmp_path, token) for token in (OTHER, TOKENS[PAGE_VARIABLE])}
                time.sleep(0.2)
            assert load.wait(PATIENCE_S) == 0
        seen = bytes(tap.seen)
    assert run.returncode in (0, 3, 99), (tmp_path / "run.output").read_text()
    assert {row["status"] for path in tmp_path.glob("runs/*-small") for row in requests(path)} == {"OK"}
    assert answers >= {401, 200}
    assert len(seen) > 10_000
    search(tmp_path, watched, pem, seen)
    # what others must reach is where they reach it, and nothing else
    places = {(item.address, "envoy" in item.command.split()[0]) for item in watched.sockets if item.port}
    assert {address for address, is_envoy in places if is_envoy} == {ELSEWHERE}
    assert {item.address for item in watched.sockets if "--trial-config" in item.command} == {ELSEWHERE}
    assert {item.address for item in watched.sockets if "fakes/arm.py" in item.command} == {"127.0.0.1"}


def test_a_run_whose_arms_refuse_the_load_writes_no_secret(tmp_path: Path) -> None:
    pem = give(tmp_path)
    port = free_port()
    run = start_run(tmp_path, duration_s=2.0, host="127.0.0.1", port=port)
    load = worker(tmp_path, port, PLANTED_TOKEN=OTHER)
    with ended(run, load), Watched(tmp_path / "tmp") as watched:
        watched.pids += [run.pid, load.pid]
        assert run.wait(250) in (1, 3, 99), (tmp_path / "run.output").read_text()
    search(tmp_path, watched, pem)
    rows = [row for path in tmp_path.glob("runs/*-small") for row in requests(path)]
    assert {(row["status"], row["error"]) for row in rows} == {("UNAUTHENTICATED", "Bearer *** opens nothing")}
