"""Blocking exchanges with an OpenAI-compatible server, for what the orchestrator asks beside the load."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

from loadtests.external.addresses import Address, ExternalConfig
from loadtests.external.client_security import client_context, server_name
from loadtests.external.openai_wire import EventStream


def headers_with(token: str) -> dict[str, str]:
    """What every request says of itself; the bearer token where there is one."""
    headers = {"User-Agent": "tailgate", "Accept-Encoding": "identity"}
    return {**headers, "Authorization": f"Bearer {token}"} if token else headers


def connect(config: ExternalConfig, address: Address, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the address, which may be dialled with the first request; `timeout_s` is for each wait."""
    if not address.tls:
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    name = server_name(config.security, address.host)
    context = client_context(config.security, protocols=("http/1.1",))
    connection = http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=context)
    if name != address.host:
        # The certificate is for another name than is dialled.
        plain = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        plain.connect()
        connection.sock = context.wrap_socket(plain.sock, server_hostname=name)
    return connection


def post(connection: http.client.HTTPConnection, path: str, body: bytes, token: str) -> http.client.HTTPResponse:
    """The answer's head to a request for a stream; its body is not read yet."""
    content = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    connection.request("POST", path, body, {**headers_with(token), **content})
    return connection.getresponse()


def events(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event of a streamed answer, as it comes."""
    stream = EventStream()
    while piece := answer.read1(65_536):
        yield from stream.feed(piece)
    tail = stream.close()
    if tail is not None:
        yield tail
