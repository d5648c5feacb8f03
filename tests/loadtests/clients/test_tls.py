"""TLS apart from sockets, and its handshake over one."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.clients.tls import TlsError, TlsStream, secure
from loadtests.external.client_security import SecurityConfig, client_context
from tests.fakes.certificates import Certificates, make_certificates


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
    stream = TlsStream(client_context(SecurityConfig(**{"tls_ca": pem.ca, **security})), name, http2=True)
    server = Server(pem, protocols)
    out = stream.handshake(b"")
    for _ in range(5):
        out = server.shake(out)
        out = stream.handshake(out)
        if stream.ready:
            break
    assert stream.decrypted(server.shake(out)) == b""  # tickets for a later session
    return stream, server


@settings(max_examples=40)
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
    got = b"".join(stream.decrypted(data[start:end]) for start, end in itertools.pairwise(edges))
    assert got == b"".join(pieces)
    assert not stream.ended
    server.incoming.write(stream.encrypted(b"question"))
    assert server.tls.read() == b"question"


def test_the_last_bytes_of_the_handshake_may_carry_the_first_plain_ones(pem: Certificates) -> None:
    stream = TlsStream(client_context(SecurityConfig(tls_ca=pem.ca)), "localhost", http2=True)
    server = Server(pem, ["h2"])
    out = stream.handshake(server.shake(stream.handshake(b"")))
    assert stream.ready
    assert stream.decrypted(server.shake(out) + server.say(b"settings")) == b"settings"


def test_the_servers_goodbye_is_an_end(pem: Certificates) -> None:
    stream, server = shaken(pem, ["h2"])
    data = server.say(b"last words")
    with pytest.raises(ssl.SSLWantReadError):
        server.tls.unwrap()
    assert stream.decrypted(data + server.outgoing.read()) == b"last words"
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
    stream = TlsStream(client_context(SecurityConfig(tls_ca=pem.ca)), "localhost", http2=True)
    stream.handshake(b"")
    with pytest.raises(TlsError, match="does not speak TLS: use http://"):
        stream.handshake(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_server_that_is_refused_is_told_why(pem: Certificates) -> None:
    """Otherwise its log says no more than that somebody hung up."""
    near, far = socket.socketpair()
    told: list[ssl.SSLError] = []

    def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem.certificate, pem.key)
        try:
            with context.wrap_socket(far, server_side=True) as peer:
                peer.recv(1)
        except ssl.SSLError as problem:
            told.append(problem)

    server = threading.Thread(target=serve)
    server.start()
    with near, pytest.raises(TlsError, match="is not trusted"):
        secure(near, client_context(SecurityConfig()), "localhost", http2=False)
    server.join()
    assert "UNKNOWN_CA" in str(told[0].reason)
