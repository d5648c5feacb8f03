"""Blocking exchanges with an OpenAI-compatible server, for what the orchestrator asks beside the load."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

from loadtests.external.addresses import Address
from loadtests.external.arms import ExternalArm, OpenAiOptions, header_values
from loadtests.external.client_security import bearer_token, client_context, server_name
from loadtests.external.openai_wire import EventStream, request_path


def headers_of(config: ExternalArm) -> dict[str, str]:
    """The headers of every request to the arm: its own, and the bearer token where there is one."""
    assert isinstance(config.options, OpenAiOptions)
    headers = {"User-Agent": "tailgate", "Accept-Encoding": "identity", **header_values(config.options)}
    token = bearer_token(config)
    return {**headers, "Authorization": f"Bearer {token}"} if token else headers


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, file: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._file = file

    def connect(self) -> None:
        """Connect to the socket's file."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._file)


def connect(config: ExternalArm, address: Address, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the address, which may be dialled with the first request; `timeout_s` is for each wait."""
    if address.socket:
        return _UnixConnection(address.socket, timeout_s)
    if not address.tls:
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    name = server_name(config, address.host)
    context = client_context(config, protocols=("http/1.1",))
    connection = http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=context)
    if name != address.host:
        # The certificate is for another name than is dialled.
        plain = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        plain.connect()
        connection.sock = context.wrap_socket(plain.sock, server_hostname=name)
    return connection


def post(
    connection: http.client.HTTPConnection, config: ExternalArm, address: Address, body: bytes
) -> http.client.HTTPResponse:
    """The answer's head to a request for a stream; its body is not read yet."""
    assert isinstance(config.options, OpenAiOptions)
    content = {"Content-Type": "application/json", "Accept": "text/event-stream", "Host": address.host_header}
    connection.request("POST", request_path(config.options, address), body, {**headers_of(config), **content})
    return connection.getresponse()


def events(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event of a streamed answer, as it comes."""
    stream = EventStream()
    while piece := answer.read1(65_536):
        yield from stream.feed(piece)
    tail = stream.close()
    if tail is not None:
        yield tail
