"""What a server's process takes from its environment, and small parts of all servers."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tailgate.servers import stdout
from tailgate.servers.address import host_port, joined
from tailgate.servers.complaint import ConfigError
from tailgate.servers.config import ModelConfig
from tailgate.servers.metadata import whole_number
from tailgate.servers.program import isolate_compiler, pin_to_card
from tailgate.servers.security import ServerTls, check_named, is_bearer, server_tls, token_from_variable
from tests.fakes.credentials import Certificates
from tests.servers.test_config import arm_from, refusal

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cret-T0ken"


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch is taken to lie: a build without an assembler, as those for CPUs are."""
    folder = tmp_path / "torch"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=f"{folder}/__init__.py")
    )
    return folder


def variables(folder: str = "/cache", **others: str) -> dict[str, str]:
    environment = {"PATH": "/bin", **others}
    isolate_compiler(environment, folder)
    return environment


@pytest.mark.usefixtures("torch_folder")
def test_nothing_is_taken_over_but_the_folder() -> None:
    carried = {
        "TORCH_COMPILE_JOB_ID": "mine",
        "TORCH_COMPILE_STICKY_PGO_READ": "mine",
        "TORCH_COMPILE_DYNAMIC_SOURCES": "L['x']",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TRITON_CACHE_DIR": "/home/me/.triton",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/mine",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "1",
        "TORCHINDUCTOR_FX_COMPILE_MODE": "async+SUBPROCESS",
    }
    assert variables(**carried) == {
        "PATH": "/bin",
        "TORCHINDUCTOR_CACHE_DIR": "/cache",
        "TRITON_CACHE_DIR": "/cache/triton",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
    }
    kept = variables(folder="", TORCHINDUCTOR_CACHE_DIR="/tmp/mine")
    assert (kept["TORCHINDUCTOR_CACHE_DIR"], "TRITON_CACHE_DIR" in kept) == ("/tmp/mine", False)


CUDA = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("device", "environment", "expected"),
    [
        ("cuda:1", {}, ("cuda:0", {CUDA: "1"})),
        ("cuda:1", {CUDA: "2, 3"}, ("cuda:0", {CUDA: "3"})),
        ("cuda:0", {CUDA: "GPU-a,GPU-b"}, ("cuda:0", {CUDA: "GPU-a"})),
        # names no visible card
        ("auto", {}, ("auto", {})),
        ("cuda:2", {CUDA: "0,1"}, ("cuda:2", {})),
        ("cuda:0", {CUDA: ""}, ("cuda:0", {})),
        # on the processor
        ("cpu", {CUDA: "2,3"}, ("cpu", {CUDA: ""})),
    ],
)
def test_a_process_sees_only_its_card(
    device: str, environment: dict[str, str], expected: tuple[str, dict[str, str]]
) -> None:
    arm = arm_from("eager", model=ModelConfig(device=device))
    changed = dict(environment)
    assert pin_to_card(arm, changed).model.device == expected[0]
    assert changed == {**environment, **expected[1]}


def test_unusable_certificates_are_refused_by_name(pem: Certificates, tmp_path: Path) -> None:
    assert server_tls("", "") is None
    assert server_tls(pem.certificate, pem.key) == ServerTls(certificate=pem.certificate, key=pem.key)
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(Path(pem.key).read_bytes(), None)
    password = serialization.BestAvailableEncryption(b"a password")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password))
    for files, text in (
        ((pem.certificate, ""), "TLS key"),
        (("", pem.key), "TLS certificate"),
        ((str(tmp_path / "no.pem"), pem.key), 'TLS certificate ".*no.pem"'),
        ((pem.certificate, str(tmp_path / "no.pem")), 'TLS key ".*no.pem"'),
        ((pem.certificate, pem.client_key), "does not belong"),
        ((pem.key, pem.key), "cannot be used"),
        ((pem.certificate, str(locked)), "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            server_tls(*files)
        assert "\n" not in str(caught.value)


def test_errors_about_a_token_name_its_source_and_never_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", f"{SECRET}\n")
    assert token_from_variable("TOKEN", key="--token-env") == SECRET
    for name, value, text in (
        ("TOKEN", "", "--token-env .*TOKEN.*not set"),
        ("TOKEN", f"{SECRET} {SECRET}", "TOKEN .*no bearer token"),
        (SECRET, "", "--token-env"),
    ):
        monkeypatch.setenv("TOKEN", value)
        with pytest.raises(ConfigError, match=text) as caught:
            token_from_variable(name, key="--token-env")
        assert SECRET not in str(caught.value)
    refusal(check_named, {"--token-env": " ", "--tls-key": None}, words=("--token-env", "empty"))


def test_the_right_token_alone_is_accepted() -> None:
    for header in (f"Bearer {SECRET}", f"bearer  {SECRET}", f"Bearer {SECRET}".encode()):
        assert is_bearer(header, SECRET)
    for other in (f"Bearer {SECRET}x", f"Basic {SECRET}", SECRET, "Bearer", "", None, "Bearer \u00e9"):
        assert not is_bearer(other, SECRET)


BAD_ADDRESSES = ("", "host", "host:", ":1", "host:0", "host:65536", "host:port", "host:٣", "a b:1", "a/b:1", "hö:1")


def test_a_written_address_is_read_back_and_any_other_is_refused_in_the_words_of_the_caller() -> None:
    for address in (("localhost", 1), ("10.0.0.5", 65535), ("::1", 50051), ("arm.example", 443)):
        assert host_port(joined(*address)) == address
    assert host_port("localhost:0", listens=True) == ("localhost", 0)
    with pytest.raises(ConfigError, match=r"^--admin is odd, with 0 or a port from 1024 to 65535$"):
        host_port("localhost:443", "--admin is odd", listens=True)
    for text in (*BAD_ADDRESSES, f"h:{'1' * 5000}"):
        with pytest.raises(ConfigError, match="host:port"):
            host_port(text)
        with pytest.raises(ConfigError, match=r"^--admin is odd$"):
            host_port(text, "--admin is odd")


def test_a_whole_number_is_one_that_a_column_holds() -> None:
    for text in ("0", "-7", "1795658587999068231", str(2**63 - 1), str(-(2**63))):
        assert whole_number(text) == int(text)
    for other in (str(2**63), "1" * 5000, "²", "1_0", " 1", "", None):
        assert whole_number(other) is None


def test_committed_stubs_are_those_of_the_pinned_generator(tmp_path: Path) -> None:
    words = re.findall(r"^PROTO :?\+?= (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    arguments = " ".join(words).replace("_out=.", f"_out={tmp_path}").split()
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], cwd=ROOT, check=True)
    made = sorted(tmp_path.rglob("*_pb2*"))
    assert len(made) == 9
    for fresh in made:
        committed = ROOT / fresh.relative_to(tmp_path)
        assert committed.read_text() == fresh.read_text(), f"{fresh.name} is stale: run make proto"
    project = (ROOT / "pyproject.toml").read_text()
    for stub, pattern, requirement in (
        ("inference_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'", "grpcio"),
        ("inference_pb2.py", r"# Protobuf Python Version: (\d+\.\d+)", "protobuf"),
    ):
        floor = re.search(pattern, (ROOT / "servers" / "rpc" / stub).read_text())
        assert floor is not None
        assert f'"{requirement}>={floor[1]}"' in project


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_stdout_gets_words_or_with_json_one_object_alone(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, as_json, lines in (("words", False, "words\n"), ("words", True, '{"found": 1}\n'), ("", False, "")):
        monkeypatch.setattr(sys, "stdout", shown := stream())
        stdout.write(words, {"found": 1}, as_json=as_json)
        assert shown.getvalue() == lines
    with pytest.raises(ValueError, match="JSON"):
        stdout.write("", {"ratio": float("nan")}, as_json=True)


LINES = """
import logging, warnings
from tailgate.servers.program import log_to_stderr
log_to_stderr(logging.{level})
logging.getLogger("torchao").warning("of a library")
logging.getLogger("torchao").error("broken")
logging.getLogger("tailgate.serve").warning("own")
warnings.warn("deprecated", stacklevel=1)
"""


def shown(level: str) -> str:
    code = LINES.format(level=level)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_a_screen_shows_own_lines_and_errors_of_libraries_and_a_log_file_shows_warnings_too() -> None:
    screen, file = shown("WARNING"), shown("INFO")
    assert [word in screen for word in ("own", "broken", "of a library", "deprecated")] == [True, True, False, False]
    assert [word in file for word in ("own", "broken", "of a library", "deprecated")] == [True, True, True, True]
