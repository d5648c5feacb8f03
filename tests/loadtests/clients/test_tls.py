"""TLS of the gRPC client: handshakes, certificates and tokens."""

from __future__ import annotations

import ssl

import pytest

from tailgate.loadtests.clients.inference import InferenceClient
from tailgate.loadtests.external.client_security import OPEN, SecurityConfig
from tests.fakes.credentials import Certificates
from tests.fakes.http2 import Exchange, Peer, RawPeer, Wire, chunk, finished, generate
from tests.fakes.processes import PATIENCE_S
from tests.loadtests.clients.test_connection import request


def context(
    pem: Certificates, *, protocols: tuple[str, ...] = ("h2",), asks: bool = False, newest: bool = True
) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(pem.certificate, pem.key)
    if not newest:
        made.maximum_version = ssl.TLSVersion.TLSv1_2
    if protocols:
        made.set_alpn_protocols(list(protocols))
    if asks:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(pem.ca)
    return made


SECRET = "s3cret-T0ken"


def answer(exchange: Exchange) -> None:
    exchange.answer(*(chunk([number]) for number in range(3)))


def asked(target: str, security: SecurityConfig = OPEN, connect_timeout_s: float = PATIENCE_S) -> tuple[str, str]:
    """Status and error of one call of a client of its own."""
    client = InferenceClient(target, security=security, connect_timeout_s=connect_timeout_s)
    call = finished(generate(client, request()))
    client.close()
    assert "\n" not in call.error
    return call.status, call.error.removeprefix(f"cannot connect to {client.target}: ")


def refused(target: str, security: SecurityConfig = OPEN, connect_timeout_s: float = PATIENCE_S) -> str:
    status, error = asked(target, security, connect_timeout_s)
    assert status == "UNAVAILABLE"
    return error


def test_a_server_without_http2_is_refused_with_the_remedy(pem: Certificates) -> None:
    security = SecurityConfig(tls_ca=pem.ca)
    with Peer(answer, tls=context(pem, protocols=())) as peer:
        assert refused(peer.target, security).startswith(
            "it agreed on nothing by ALPN and not on HTTP/2: make the server"
        )
    with Peer(answer, tls=context(pem, protocols=("http/1.1",))) as peer:
        assert "ALPN" in refused(peer.target, security)


@pytest.mark.parametrize("newest", [True, False], ids=["TLS 1.3", "TLS 1.2"])
def test_a_server_that_asks_for_a_client_certificate_gets_it(pem: Certificates, newest: bool) -> None:
    with Peer(answer, tls=context(pem, asks=True, newest=newest)) as peer:
        assert refused(peer.target, SecurityConfig(tls_ca=pem.ca)).startswith("it refused this client")
        security = SecurityConfig(tls_ca=pem.ca, tls_certificate=pem.client_certificate, tls_key=pem.client_key)
        assert asked(peer.target, security) == ("OK", "")


def test_plain_and_secure_are_distinguished_from_both_sides(pem: Certificates) -> None:
    with Peer(answer, tls=context(pem)) as peer:
        assert "TLS: use https://" in refused(peer.target.removeprefix("https://"))
    with RawPeer(lambda link: link.send(b"\x15\x03\x01\x00\x02\x02\x46" + bytes(9))) as raw:
        assert "the server speaks TLS: use https://" in refused(raw.target)
    with RawPeer(lambda link: link.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as raw:
        assert "does not speak plaintext HTTP/2 (it answered b'HTTP/1.1" in refused(raw.target)

    def plain(link: Wire) -> None:
        link.sock.recv(1_000)
        link.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with RawPeer(plain) as raw:
        assert "it does not speak TLS: use http://" in refused(f"https://{raw.target}", SecurityConfig(tls_ca=pem.ca))


def test_a_handshake_that_never_comes_is_given_up(pem: Certificates) -> None:
    with RawPeer(lambda link: None) as raw:
        assert "no TLS handshake in 0.2 s" in refused(f"https://{raw.target}", SecurityConfig(tls_ca=pem.ca), 0.2)


def test_a_token_that_a_server_repeats_is_in_no_error(pem: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat(exchange: Exchange) -> None:
        given = exchange.headers["authorization"]
        exchange.start(extra=[("grpc-status", "16"), ("grpc-message", f"{given} is unknown")], end=True)

    monkeypatch.setenv("TAILGATE_TEST_TOKEN", SECRET)
    with Peer(repeat, tls=context(pem)) as peer:
        security = SecurityConfig(tls_ca=pem.ca, token_env="TAILGATE_TEST_TOKEN")
        assert asked(peer.target, security) == ("UNAUTHENTICATED", "Bearer *** is unknown")
