"""Plant secrets in a run, watch its processes, and search everything it wrote for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from loadtests.page.access import TOKEN_VARIABLE as PAGE_VARIABLE
from loadtests.workers.channel_token import TOKEN_VARIABLE as CHANNEL_VARIABLE
from tests.fakes.certificates import Certificates, make_certificates
from tests.fakes.listening import Listener, command_of, family, listeners
from tests.fakes.locust_process import records

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


def trial_rows(folder: Path) -> list[dict[str, object]]:
    return [row for trial in folder.glob("runs/*/trial-01") for row in records(trial)]
