"""Secrets are planted, a run is made, and everything that it wrote and every command line is searched for them.

One run ends, one is refused by its arms, one is killed. Real Envoy with TLS on both sides, real Locust, a worker that
comes through a relay which keeps what passes; arms are paced fakes that check the token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from loadtests.page.access import TOKEN_VARIABLE as PAGE_VARIABLE
from loadtests.workers.channel_token import TOKEN_VARIABLE as CHANNEL_VARIABLE
from servers.address import host_port
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.listening import Listener, command_of, family, listeners
from tests.fakes.locust_process import records
from tests.fakes.patience import PATIENCE_S
from tests.fakes.tap import Tap
from tests.loadtests.test_chat import free_port

ROOT = Path(__file__).resolve().parents[2]
FAKE_ARM = ROOT / "tests" / "fakes" / "arm.py"
TOKENS = {
    "PLANTED_TOKEN": "planted-bearer-5f0c81",
    CHANNEL_VARIABLE: "planted-channel-92ab37",
    PAGE_VARIABLE: "planted-page-token-d417",
}
OTHER = "planted-other-bearer-77e2"
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
{traffic}
[splitter]
access_log = true
tls_certificate = "given/server.pem"
tls_key = "given/server-key.pem"
tls_client_ca = "given/ca.pem"
[security]
tls_ca = "given/ca.pem"
tls_certificate = "given/client.pem"
tls_key = "given/client-key.pem"
{token}
[trials]
starting_at_once = 2
[bed]
reference_s = 0
"""
REMOTE = 'workers = 0\nremote_workers = 1\nmaster_bind = "{}:{}"'


class Watched:
    """While entered, the command lines, the sockets and the temporary files of some processes are noted."""

    def __init__(self, temporary: Path) -> None:
        self.commands: set[str] = set()
        self.sockets: set[Listener] = set()
        self.pids: list[int] = []
        self.temporary: dict[Path, bytes] = {}
        self._folder = temporary
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            for pid in self.pids:
                self.commands |= {command_of(member) for member in family(pid)}
                self.sockets |= listeners(pid)
            for path in self._folder.rglob("*"):
                with contextlib.suppress(OSError):
                    if path.is_file():
                        self.temporary[path] = path.read_bytes()


@pytest.fixture
def pem(tmp_path: Path) -> Certificates:
    """What the user gives: the one folder that holds secrets."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "token").write_text(TOKENS["PLANTED_TOKEN"])
    return make_certificates(tmp_path / "given", "127.0.0.1", ELSEWHERE)


def start(folder: Path, name: str, command: list[str], **variables: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, **TOKENS, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **variables}
    output = (folder / f"{name}.output").open("w")
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )


def start_run(folder: Path, *, duration_s: float, traffic: str, token: str) -> subprocess.Popen[str]:
    (folder / "small.toml").write_text(RUN.format(duration_s=duration_s, traffic=traffic, token=token))
    code = (
        "import sys; from loadtests.commands.main import main; "
        f"sys.exit(main(['run', 'small.toml'], arm_command={[sys.executable, str(FAKE_ARM)]!r}))"
    )
    return start(folder, "run", [sys.executable, "-c", code])


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def secrets(pem: Certificates) -> dict[str, bytes]:
    """What must be nowhere, by what it is."""
    found = {name: value.encode() for name, value in TOKENS.items()} | {"other token": OTHER.encode()}
    for name in ("key", "client_key"):
        lines = Path(getattr(pem, name)).read_text().splitlines()
        body = [line for line in lines if not line.startswith("-----")]
        assert body
        found |= {f"{name}, line {number}": line.encode() for number, line in enumerate(body) if len(line) > 20}
    return found


def written(folder: Path) -> dict[str, bytes]:
    """Every file below the folder but what was given, tables also as they read."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and folder / "given" not in path.parents:
            content = path.read_bytes()
            if path.suffix == ".arrow":
                content += "\n".join(_rows(content)).encode()
            found[str(path.relative_to(folder))] = content
    return found


def _rows(content: bytes) -> Iterator[str]:
    with contextlib.suppress(pa.ArrowInvalid, OSError), pa.ipc.open_stream(content) as stream:
        for batch in stream:
            yield str(batch.to_pylist())


def search(folder: Path, watched: Watched, pem: Certificates, seen: bytes = b"") -> None:
    """No secret is anywhere. That the search finds what is there is shown by names that are no secrets."""
    files = written(folder)
    places = {
        **files,
        "the command lines": "\n".join(watched.commands).encode(),
        "the channel": seen,
        **{str(path): content for path, content in watched.temporary.items()},
    }
    leaks = {(place, what) for place, text in places.items() for what, secret in secrets(pem).items() if secret in text}
    assert not leaks
    (experiment,) = (text for place, text in files.items() if place.endswith("experiment.toml"))
    assert b"given/server-key.pem" in experiment
    assert any("fakes/arm.py" in command for command in watched.commands)
    assert any("locust" in command for command in watched.commands)
    assert any(b"UNAUTHENTICATED" in text or b"'OK'" in text for place, text in files.items() if "requests-" in place)


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


def trial_rows(folder: Path) -> list[dict[str, object]]:
    return [row for trial in folder.glob("runs/*/trial-01") for row in records(trial)]


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


def test_a_run_whose_arms_refuse_the_load_writes_no_secret(pem: Certificates, tmp_path: Path) -> None:
    port = free_port()
    traffic = REMOTE.format("127.0.0.1", port)
    run = start_run(tmp_path, duration_s=2.0, traffic=traffic, token='token_env = "PLANTED_TOKEN"')
    load = worker(tmp_path, port, PLANTED_TOKEN=OTHER)
    with ended(run, load), Watched(tmp_path / "tmp") as watched:
        watched.pids += [run.pid, load.pid]
        assert run.wait(250) in (1, 3, 99), (tmp_path / "run.output").read_text()
    search(tmp_path, watched, pem)
    rows = trial_rows(tmp_path)
    assert {(row["status"], row["error"]) for row in rows} == {("UNAUTHENTICATED", "Bearer *** opens nothing")}


def test_a_run_that_is_killed_leaves_no_secret(pem: Certificates, tmp_path: Path) -> None:
    run = start_run(tmp_path, duration_s=60.0, traffic="workers = 2", token='token_file = "given/token"')
    with ended(run), Watched(tmp_path / "tmp") as watched:
        watched.pids.append(run.pid)
        deadline = time.monotonic() + 200
        while len(trial_rows(tmp_path)) < 30:
            assert run.poll() is None, (tmp_path / "run.output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = family(run.pid)
        run.send_signal(signal.SIGKILL)
        run.wait()
        while any(command_of(pid) for pid in children):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    search(tmp_path, watched, pem)
