"""Throw-away authorities and certificates as PEM files."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import trustme

from tailgate.loadtests.workers.channel import TOKEN_VARIABLE as CHANNEL_VARIABLE
from tests.fakes.processes import Listener, command_of, family, listeners
from tests.fakes.whole_run import FAKE_ARM, ROOT


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: an authority, a server and a client that it signed, and an authority that signed nothing."""

    ca: str
    other_ca: str
    certificate: str
    key: str
    client_certificate: str
    client_key: str


def make_certificates(folder: Path, *names: str) -> Certificates:
    authority, other = trustme.CA(), trustme.CA()
    server = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    client = authority.issue_cert("load@tailgate.test")

    def write(name: str, *blobs: trustme.Blob) -> str:
        (folder / name).write_bytes(b"".join(blob.bytes() for blob in blobs))
        return str(folder / name)

    return Certificates(
        ca=write("ca.pem", authority.cert_pem),
        other_ca=write("other-ca.pem", other.cert_pem),
        certificate=write("server.pem", *server.cert_chain_pems),
        key=write("server-key.pem", server.private_key_pem),
        client_certificate=write("client.pem", *client.cert_chain_pems),
        client_key=write("client-key.pem", client.private_key_pem),
    )


TOKENS = {
    "PLANTED_TOKEN": "planted-bearer-5f0c81",
    CHANNEL_VARIABLE: "planted-channel-92ab37",
}
OTHER = "planted-other-bearer-77e2"
TLS = """
[splitter]
tls_certificate = "given/server.pem"
tls_key = "given/server-key.pem"
[security]
tls_ca = "given/ca.pem"
tls_certificate = "given/client.pem"
tls_key = "given/client-key.pem"
{token}
"""


class Watched:
    """Notes the command lines, the sockets and the temporary files of some processes while it is entered."""

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
        while not self._ended.wait(0.1):
            for pid in self.pids:
                self.commands |= {command_of(member) for member in family(pid)}
                self.sockets |= listeners(pid)
            for path in self._folder.rglob("*"):
                with contextlib.suppress(OSError):
                    if path.is_file():
                        self.temporary[path] = path.read_bytes()


def give(folder: Path, *names: str) -> Certificates:
    """Write what the user gives into `folder`/given: the one folder with secrets."""
    (folder / "given").mkdir()
    (folder / "given" / "token").write_text(TOKENS["PLANTED_TOKEN"])
    return make_certificates(folder / "given", *(names or ("127.0.0.1",)))


def start(folder: Path, name: str, command: list[str], **variables: str) -> subprocess.Popen[str]:
    """Start the command with the tokens in its environment; its output goes to `name`.output."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **TOKENS, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **variables}
    output = (folder / f"{name}.output").open("w")
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )


def search(folder: Path, watched: Watched, pem: Certificates) -> None:
    """Assert that no secret is anywhere. Names that are no secrets show that the search finds what is there."""
    files = _written(folder)
    places = {**files, "the command lines": "\n".join(watched.commands).encode()}
    places |= {str(path): content for path, content in watched.temporary.items()}
    secrets = _secrets(pem)
    assert [(place, what) for place, text in places.items() for what, secret in secrets.items() if secret in text] == []
    (experiment,) = (text for place, text in files.items() if place.endswith("experiment.toml"))
    assert b"given/server-key.pem" in experiment
    assert any("fakes/arm.py" in command for command in watched.commands)
    assert any("locust" in command for command in watched.commands)
    assert any(b"UNAUTHENTICATED" in text or b"'OK'" in text for place, text in files.items() if "requests-" in place)


def _secrets(pem: Certificates) -> dict[str, bytes]:
    found = {name: value.encode() for name, value in TOKENS.items()} | {"other token": OTHER.encode()}
    for name in ("key", "client_key"):
        lines = Path(getattr(pem, name)).read_text().splitlines()
        body = [line for line in lines if not line.startswith("-----")]
        assert body
        found |= {f"{name}, line {number}": line.encode() for number, line in enumerate(body) if len(line) > 20}
    return found


def _written(folder: Path) -> dict[str, bytes]:
    """Return every file below the folder except what was given, tables also as they read."""
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


def listening() -> dict[str, str]:
    """Return the sockets and their default addresses in "What listens where" of docs/how-to/security.md."""
    text = (ROOT / "docs" / "how-to" / "security.md").read_text()
    section = text.partition("## What listens where")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert cells[0][:2] == ["what", "by default"]
    return {what: where for what, where, *_ in cells[2:]}


def _row_of(found: Listener) -> str:
    if re.match(r"\S*envoy\S* ", found.command):
        return "Envoy's admin interface" if not found.port else "the splitter"
    rows = {"commands.main import main": "the live page", str(FAKE_ARM): "an arm"}
    rows["--trial "] = "Locust's master of a run"
    return next((row for part, row in rows.items() if part in found.command), found.command)


def check_listeners(found: Iterable[Listener], rows: Mapping[str, int]) -> None:
    """Check that `rows` sockets of each row listen at their default address, and no others."""
    # A process that has not begun its own program yet holds the sockets of its parent.
    places = {(_row_of(item), item.address, item.port) for item in found}
    assert Counter(row for row, _, _ in places) == rows, found
    for row, address, _ in places:
        (default,) = (where for what, where in listening().items() if what.startswith(row))
        assert address.startswith("/") if default == "a Unix socket" else address == default, row
