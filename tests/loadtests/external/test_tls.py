"""TLS apart from sockets, and the settings that say whom to trust and which token to show."""

from __future__ import annotations

import contextlib
import itertools
import ssl
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.external.tls import SecurityConfig, TlsError, TlsStream, bearer_token, client_context, server_name
from servers.config import ConfigError
from tests.fakes.certificates import Certificates, make_certificates

SECRET = "s3cret-T0ken"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pem"))


class Server:
    """The other end, also without a socket."""

    def __init__(self, pem: Certificates, protocols: list[str]) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem.certificate, pem.key)
        if protocols:
            context.set_alpn_protocols(protocols)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)

    def shake(self, received: bytes) -> bytes:
        self.incoming.write(received)
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.outgoing.read()

    def say(self, plain: bytes) -> bytes:
        if plain:
            self.tls.write(plain)
        return self.outgoing.read()


def shaken(
    pem: Certificates, protocols: list[str], name: str = "localhost", **security: str
) -> tuple[TlsStream, Server]:
    stream = TlsStream(client_context(SecurityConfig(**{"tls_ca": pem.ca, **security})), name)
    server = Server(pem, protocols)
    out = stream.handshake(b"")
    for _ in range(5):
        out = server.shake(out)
        out = stream.handshake(out)
        if stream.ready:
            break
    assert stream.opened(server.shake(out)) == b""  # tickets for a later session
    return stream, server


@settings(deadline=None, max_examples=40)
@given(
    pieces=st.lists(st.one_of(st.binary(max_size=200), st.integers(10_000, 70_000).map(bytes)), max_size=8),
    cuts=st.lists(st.floats(0, 1), max_size=10),
)
def test_plain_bytes_come_out_whole_however_the_records_are_cut(
    pem: Certificates, pieces: list[bytes], cuts: list[float]
) -> None:
    stream, server = shaken(pem, ["h2"])
    data = b"".join(server.say(piece) for piece in pieces)
    edges = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    got = b"".join(stream.opened(data[start:end]) for start, end in itertools.pairwise(edges))
    assert got == b"".join(pieces)
    assert not stream.ended
    server.incoming.write(stream.sealed(b"question"))
    assert server.tls.read() == b"question"


def test_the_last_bytes_of_the_handshake_may_carry_the_first_plain_ones(pem: Certificates) -> None:
    stream = TlsStream(client_context(SecurityConfig(tls_ca=pem.ca)), "localhost")
    server = Server(pem, ["h2"])
    out = stream.handshake(server.shake(stream.handshake(b"")))
    assert stream.ready
    assert stream.opened(server.shake(out) + server.say(b"settings")) == b"settings"


def test_the_servers_goodbye_is_an_end(pem: Certificates) -> None:
    stream, server = shaken(pem, ["h2"])
    data = server.say(b"last words")
    with pytest.raises(ssl.SSLWantReadError):
        server.tls.unwrap()
    assert stream.opened(data + server.outgoing.read()) == b"last words"
    assert stream.ended


@pytest.mark.parametrize(
    ("protocols", "name", "security", "text"),
    [
        ([], "localhost", {}, "agreed on nothing by ALPN"),
        (["http/1.1"], "localhost", {}, "ALPN"),
        (["h2"], "arms.example", {}, 'another name than "arms.example": set tls_server_name'),
        (["h2"], "10.1.2.3", {}, 'another name than "10.1.2.3": set tls_server_name'),
        (["h2"], "localhost", {"tls_ca": "other_ca"}, "is not trusted .*: give its authority's PEM file as tls_ca"),
        (["h2"], "localhost", {"tls_ca": ""}, "is not trusted .*: give its authority's PEM file as tls_ca"),
    ],
)
def test_whoever_cannot_be_trusted_is_refused_in_one_line_with_the_remedy(
    pem: Certificates, protocols: list[str], name: str, security: dict[str, str], text: str
) -> None:
    files = {key: getattr(pem, value) if value else "" for key, value in security.items()}
    with pytest.raises(TlsError, match=text) as caught:
        shaken(pem, protocols, name, **files)
    assert "\n" not in str(caught.value)


def test_a_server_that_speaks_something_else_is_called_so(pem: Certificates) -> None:
    stream = TlsStream(client_context(SecurityConfig(tls_ca=pem.ca)), "localhost")
    stream.handshake(b"")
    with pytest.raises(TlsError, match="does not speak TLS: use http://"):
        stream.handshake(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_the_name_to_check_is_the_configured_one_or_the_host() -> None:
    assert server_name(SecurityConfig(), "arm.example") == "arm.example"
    assert server_name(SecurityConfig(tls_server_name="other.example"), "10.0.0.1") == "other.example"
    assert server_name(SecurityConfig(), "fe80::1%eth0") == "fe80::1"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_key": "k.pem"}, "security.tls_key is set alone"),
        ({"tls_certificate": "c.pem"}, "security.tls_certificate is set alone"),
        ({"token_env": "A", "token_file": "b"}, "are both set: keep one"),
        ({"token_env": SECRET}, "security.token_env is not the name of an environment variable"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        SecurityConfig(**settings)
    assert SECRET not in str(caught.value)


def test_files_that_are_missing_or_hold_something_else_are_named(pem: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for security, text in (
        (SecurityConfig(tls_ca=str(tmp_path / "none.pem")), "none.pem.* cannot be read"),
        (SecurityConfig(tls_ca=str(junk)), "junk.pem.* holds no certificate"),
        (SecurityConfig(tls_certificate=str(junk), tls_key=str(junk)), "junk.pem"),
        (SecurityConfig(tls_certificate=pem.certificate, tls_key=pem.client_key), "does not belong to"),
        (SecurityConfig(token_file=str(tmp_path / "none.txt")), "none.txt.* cannot be read"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            security.check()
        assert "\n" not in str(caught.value)


def test_a_token_is_read_and_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {SECRET}\n")
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    by_variable, by_file = SecurityConfig(token_env="TAILGATE_TEST_TOKEN"), SecurityConfig(token_file=str(file))
    assert bearer_token(by_variable) == bearer_token(by_file) == SECRET
    assert bearer_token(SecurityConfig()) == ""
    for security in (by_variable, by_file):
        assert SECRET not in repr(security) + repr(asdict(security))
    assert not any("secret" in item.name or item.name == "token" for item in fields(SecurityConfig))


@pytest.mark.parametrize("value", ["", "two words", f"{SECRET}\nX-Injected: 1", "pass\u00e9"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TAILGATE_TEST_TOKEN", value)
    with pytest.raises(ConfigError, match="TAILGATE_TEST_TOKEN") as caught:
        bearer_token(SecurityConfig(token_env="TAILGATE_TEST_TOKEN"))
    assert not value or value not in str(caught.value)
