"""Secrets are planted, a run is made, and everything that it wrote and every command line is searched for them.

One run ends, one is refused by its arms, one is killed. Real Envoy with TLS on both sides, real Locust, a worker that
comes through a relay which keeps what passes; arms are paced fakes that check the token.
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
from tests.fakes.certificates import Certificates
from tests.fakes.patience import PATIENCE_S
from tests.fakes.planted_secrets import (
    ELSEWHERE,
    OTHER,
    TOKENS,
    Watched,
    ended,
    pem,
    search,
    start,
    start_run,
    trial_rows,
)
from tests.fakes.tap import Tap
from tests.loadtests.test_chat import free_port

__all__ = ["pem"]

REMOTE = 'workers = 0\nremote_workers = 1\nmaster_bind = "{}:{}"'


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


def test_a_run_with_a_worker_elsewhere_writes_and_sends_no_secret(pem: Certificates, tmp_path: Path) -> None:
    port = free_port()
    run = start_run(
        tmp_path, duration_s=4.0, traffic=REMOTE.format(ELSEWHERE, port), token='token_env = "PLANTED_TOKEN"'
    )
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
    assert {row["status"] for row in trial_rows(tmp_path)} == {"OK"}
    assert answers >= {401, 200}
    assert len(seen) > 10_000
    search(tmp_path, watched, pem, seen)
    # what others must reach is where they reach it, and nothing else
    places = {(item.address, "envoy" in item.command.split()[0]) for item in watched.sockets if item.port}
    assert {address for address, is_envoy in places if is_envoy} == {ELSEWHERE}
    assert {item.address for item in watched.sockets if "--trial-config" in item.command} == {ELSEWHERE}
    assert {item.address for item in watched.sockets if "fakes/arm.py" in item.command} == {"127.0.0.1"}
